"""The charts of a run and of several: their series and axes. Data only; `page.js` draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oktopk.telemetry.figures import total
from oktopk.telemetry.run import PAIRS, Floats, Run, sum_known
from oktopk.telemetry.schema import SPLIT

STEP, SECONDS, BYTES = "step", "seconds", "bytes"
AXES = {STEP: "step", SECONDS: "training time (s)", BYTES: "bytes sent by rank 0"}
STRETCHES = "Means over stretches of steps; the longest step of each can be switched on."
MOST_STRETCHES = 150
"""Points of a stack, because more of them are narrower than a pixel."""

NOMINAL, TRAINING = "Nominal figures (the literature's)", "A training run"
"""Headings of docs/accounting.md."""


@dataclass(frozen=True)
class Series:
    """A curve: its name, its values, the colour it shares with the same thing elsewhere; `off` until it is chosen."""

    name: str
    y: Floats
    color: str
    style: str = "line"  # or "faint", "dots", "dash", "area" (stacked), "bar"
    off: bool = False


@dataclass(frozen=True)
class Group:
    """Series over the same places: `x` by axis.

    rank     the rank that must be chosen to show the group; None: it is always shown
    thin     how a long group gets shorter: "extremes" keeps the least and the greatest of each stretch of steps, "mean"
             and "longest" make one value of a stretch
    """

    x: Mapping[str, Floats]
    series: Sequence[Series]
    rank: int | None = None
    thin: str = "extremes"


@dataclass(frozen=True)
class Chart:
    """A chart.

    y_title       with the unit; ticks of bytes and seconds are written with theirs
    log           whether y is logarithmic; then the reader may choose
    from_zero     whether y begins at zero, if it is not logarithmic
    marks         steps at which something happened: a line across
    labels        names of the places of bars, with `x_title` as the name of their axis
    zoom          (name, highest y): a closer look that the reader can choose
    definition    the heading in docs/accounting.md that defines the figures
    """

    name: str
    title: str
    about: str
    y_title: str
    groups: Sequence[Group]
    axes: Sequence[str] = (STEP,)
    kind: str = "number"
    log: bool = False
    from_zero: bool = True
    wide: bool = False
    marks: Sequence[tuple[Mapping[str, float], str]] = ()
    zoom: tuple[str, float] | None = None
    labels: Sequence[str] = ()
    x_title: str = ""
    definition: str = "Measured figures"

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not any(np.isfinite(series.y).any() for group in self.groups for series in group.series)


def charts_of(run: Run) -> dict[str, list[Chart]]:
    """Return the charts of a run that have something to show, by section of the page."""
    sections = {
        "Learning": _learning(run),
        "Compression": _compression(run),
        "Traffic": [_bytes(run), _messages(run)],
        "Time": _time(run),
        "Balance": [_sent_by_rank(run), _owners(run)],
    }
    return {name: [chart for chart in charts if not chart.is_empty] for name, charts in sections.items()}


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the runs over each other."""

    def by_epoch(name: str) -> list[Group]:
        return [Group(_epochs(run), [Series(run.name, _of_epochs(run, name), f"run{i}")]) for i, run in enumerate(runs)]

    def by_step(values: Sequence[Floats], thin: str = "extremes") -> list[Group]:
        return [Group(_steps(run), [Series(run.name, values[i], f"run{i}")], thin=thin) for i, run in enumerate(runs)]

    defined: dict[str, Any] = {"axes": (SECONDS, BYTES, STEP), "definition": TRAINING}
    charts = [
        Chart("all-wer", "WER", "Word errors in the validation set: how soon, and after how many bytes.",
              "WER (errors a word)", by_epoch("wer"), **defined),
        Chart("all-val-loss", "Validation loss", "The mean over utterances of the validation set.",
              "loss (nats an utterance)", by_epoch("val_loss"), **defined),
        Chart("all-train-loss", "Training loss", "The mean of each epoch's steps.",
              "loss (nats an utterance)", by_epoch("train_loss"), **defined),
        Chart("all-sent", "Bytes sent", "By rank 0 since the start, measured.", "bytes sent (B)",
              by_step([run.sent_so_far for run in runs]), (STEP, SECONDS), "bytes"),
        Chart("all-seconds", "Time of a step", "On rank 0, means over stretches of steps.", "time a step (s)",
              by_step([run.step_seconds for run in runs], "mean"), (STEP, BYTES), "seconds", definition=TRAINING),
        Chart("all-bytes-a-step", "Bytes of a step", "Sent by rank 0, measured.", "bytes a step (B)",
              by_step([run.column("sent_bytes") for run in runs]), (STEP, SECONDS), "bytes", log=True),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.is_empty]


def floats(values: Iterable[float | None]) -> Floats:
    """Return the values, NaN where one is not known."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _steps(run: Run, chosen: NDArray[np.bool_] | slice = slice(None)) -> dict[str, Floats]:
    """Return the places of the chosen steps on each axis."""
    return {STEP: run.steps[chosen], SECONDS: run.seconds[chosen], BYTES: run.sent_so_far[chosen]}


def _epochs(run: Run) -> dict[str, Floats]:
    columns = {STEP: "step", SECONDS: "seconds", BYTES: "sent_bytes"}
    return {axis: _of_epochs(run, name) for axis, name in columns.items()}


def _of_epochs(run: Run, name: str) -> Floats:
    return floats(epoch[name] for epoch in run.epochs)


def _marks(run: Run) -> list[tuple[dict[str, float], str]]:
    """Return the first sparse step and the resumed ones, at their beginning: axes have a step's end."""
    found = [(run.boundary, "first sparse step")]
    found += [(event["step"], "resumed") for event in run.events if event["event"] == "resume"]
    places, marks = _steps(run), []
    for step, name in found if run.num_steps else ():
        if step is not None:
            row = int(np.searchsorted(run.steps, step))
            before = {axis: float(places[axis][row - 1]) if row else 0.0 for axis in (SECONDS, BYTES)}
            marks.append(({STEP: float(step), **before}, name))
    return marks


def _learning(run: Run) -> list[Chart]:
    loss, known = run.column("loss"), ~np.isnan(run.column("residual_norm"))
    epochs = [
        Series("training, mean of an epoch", _of_epochs(run, "train_loss"), "blue", "dots"),
        Series("validation", _of_epochs(run, "val_loss"), "orange", "dots"),
    ]
    errors = [
        Series("WER", _of_epochs(run, "wer"), "orange", "dots"), Series("CER", _of_epochs(run, "cer"), "green", "dots"),
    ]  # fmt: skip
    norms = [Group(_steps(run), [Series("gradient delivered", run.column("grad_norm"), "muted", "faint")])]
    for rank in range(run.num_ranks):
        residual = Series(f"residual of rank {rank}", run.column(f"ranks.{rank}.residual_norm")[known], f"rank{rank}")
        norms.append(Group(_steps(run, known), [residual]))
    defined: dict[str, Any] = {"marks": _marks(run), "definition": TRAINING}
    return [
        Chart("loss", "Loss", "The mean over workers of the loss of an utterance.", "loss (nats an utterance)",
              [Group(_steps(run), [Series("training, each step", loss, "muted", "faint")]),
               Group(_epochs(run), epochs)], tuple(AXES),
              log=bool((np.nan_to_num(loss, nan=1.0) > 0).all()), wide=True, **defined),
        Chart("errors", "Word and character errors", "Of the validation set; WER may pass 1.",
              "errors a word, a character", [Group(_epochs(run), errors)], tuple(AXES), **defined),
        Chart("norms", "Residual against gradient",
              "What a step delivered, and what a rank still holds back after it, looked at every tenth sparse step.",
              "norm (gradient's unit)", norms, log=True, **defined),
    ]  # fmt: skip


def _compression(run: Run) -> list[Chart]:
    defined: dict[str, Any] = {"marks": _marks(run), "definition": NOMINAL}

    def curves(values: Mapping[str, Floats], chosen: NDArray[np.bool_] | slice = slice(None)) -> list[Group]:
        colors = ("blue", "orange")
        series = [Series(name, y[chosen], color) for (name, y), color in zip(values.items(), colors, strict=False)]
        return [Group(_steps(run, chosen), series)]

    of_k = {"selected by rank 0 / k": run.of_wanted("selected"), "delivered / k": run.of_wanted("nnz")}
    thresholds = {"local": run.column("threshold"), "global": run.column("global_threshold")}
    return [
        Chart("sparsity", "Sparsity", "1 - nnz / numel: 0 in dense steps.", "share of zeros",
              curves({"sparsity": run.column("sparsity")}), **defined),
        Chart("ratio", "Compression ratio", "numel / nnz: 1 in dense steps.", "ratio (times)",
              curves({"compression ratio": run.column("compression_ratio")}), **defined),
        Chart("selected", "Selected and delivered, of k", "k is what the density asks for: 1 is just that.",
              "elements / k", curves(of_k), from_zero=False, **defined),
        Chart("thresholds", "Thresholds", "What an element must reach to be sent, and to be delivered.", "score",
              curves(thresholds, run.is_sparse), log=True),
    ]  # fmt: skip


def _bytes(run: Run) -> Chart:
    order = ("exchange", "gather", "dense_tail", "headers", "agree")
    parts = run.bytes_by_part()
    named = [name for name in order if name in parts] + [name for name in parts if name not in order]
    stack = [Series("side dense" if name == "dense_tail" else name, parts[name], name, "area") for name in named]
    lines = [
        Series("dense would send", run.dense_bytes, "muted", "dash"),
        Series("bound 6k(P-1)/P", run.bound_bytes, "red", "dash"),
    ]
    highest = float(np.nanmax(run.bound_bytes, initial=0.0))
    return Chart(
        "bytes", "Bytes of each step, by phase", "Sent by rank 0, measured; headers are apart from what they head.",
        "bytes a step (B)", [Group(_steps(run), stack), Group(_steps(run), lines)], kind="bytes", wide=True,
        marks=_marks(run), zoom=("sparse steps", 1.3 * highest) if highest else None, definition="Words on the wire",
    )  # fmt: skip


def _messages(run: Run) -> Chart:
    """Return the number of messages of each size, in powers of two, by collective: bin i ends below 2^i."""
    used = [size.bit_length() for made in run.messages.values() for size in made.sizes]
    span = range(min(used, default=0), max(used, default=-1) + 1)
    groups = []
    for i, ((phase, collective), made) in enumerate(run.messages.items()):
        counts = dict.fromkeys(span, 0)
        for size, count in made.sizes.items():
            counts[size.bit_length()] += count
        color = phase if phase in (*PAIRS, "agree", "dense_tail") else f"run{i}"
        bars = Series(f"{phase}: {collective}", floats(counts.values()), color, "bar")
        groups.append(Group({STEP: floats(span)}, [bars]))
    return Chart(
        "messages", "Message sizes", "Messages that rank 0 sent, by collective; a bar is a power of two.",
        "messages (count)", groups, log=True, wide=True, labels=[_bin_label(i) for i in span],
        x_title="message size (at least)",
    )  # fmt: skip


def _bin_label(i: int) -> str:
    low = 1 << max(i - 1, 0)
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if low >= size:
            return f"{low // size} {unit}"
    return f"{low} B"


def _time(run: Run) -> list[Chart]:
    split, phases, shares = list[Group](), list[Group](), list[Group]()
    for rank in range(run.num_ranks) or [None]:  # a record without ranks is of one
        split += _stack(run, [Series(SPLIT[name], y, name, "area") for name, y in run.split_of(rank).items()], rank)
        phases += _stack(run, [Series(name, y, name, "area") for name, y in run.phases_of(rank).items()], rank)
        communication, computation = run.communication(rank)
        whole = communication + computation
        share = np.divide(100 * communication, whole, out=np.full_like(whole, np.nan), where=whole > 0)
        shares.append(Group(_steps(run), [Series(f"rank {rank or 0}", share, f"rank{rank or 0}")], thin="mean"))
    marks = _marks(run)
    return [
        Chart("split", "The training thread: time of a step",
              f"What the step's time went on, measured on each rank. {STRETCHES}",
              "time a step (s)", split, kind="seconds", marks=marks, definition=TRAINING),
        Chart("phases", "The exchange's thread: time of a step",
              f"It works while backward still computes. {STRETCHES}",
              "time a step (s)", phases, kind="seconds", marks=marks, definition="Phases"),
        Chart("communication", "Communication, of communication and computation",
              "Seconds in which messages travelled against those in which anything was computed; the two overlap. "
              "Means over stretches of steps.",
              "communication (%)", shares, wide=True, marks=marks, definition="Phases"),
    ]  # fmt: skip


def _stack(run: Run, parts: Sequence[Series], rank: int | None) -> list[Group]:
    """Return the parts of a step's time by their mean, and the whole of it by its longest."""
    if not parts:
        return []
    whole = Series("longest step", sum_known([part.y for part in parts]), "ink", "faint", off=True)
    return [Group(_steps(run), parts, rank, "mean"), Group(_steps(run), [whole], rank, "longest")]


def _sent_by_rank(run: Run) -> Chart:
    ranks = range(run.num_ranks)
    bars = [
        Series(name, floats(total(run.column(f"ranks.{rank}.{name}_bytes")) for rank in ranks), color, "bar")
        for name, color in (("sent", "blue"), ("received", "orange"))
    ]
    return Chart(
        "ranks", "Bytes by rank", "All steps together, as each rank measured them.", "bytes (B)",
        [Group({STEP: floats(ranks)}, bars)], kind="bytes", labels=[str(rank) for rank in ranks], x_title="rank",
    )  # fmt: skip


def _owners(run: Run) -> Chart:
    known, names = run.is_sparse, run.names("nnz_by_owner")
    owned = np.array([run.column(f"nnz_by_owner.{owner}")[known] for owner in range(len(names))])
    average = owned.mean(axis=0) if len(names) else np.empty(0)
    series = [
        Series(f"region of rank {owner}", np.divide(y, average, out=np.full_like(y, np.nan), where=average > 0),
               f"rank{owner}", "faint")
        for owner, y in enumerate(owned)
    ]  # fmt: skip
    return Chart(
        "owners", "Load of the regions' owners", "Elements delivered from each region, over their mean: 1 is even.",
        "delivered / mean", [Group(_steps(run, known), series)], from_zero=False,
    )  # fmt: skip


def thinned(chart: Chart, points: int) -> Chart:
    """Return the chart with at most about `points` places in each group; see `Group.thin`."""
    marked = [at[STEP] for at, _ in chart.marks]
    return replace(chart, groups=[_thinned(group, points, marked) for group in chart.groups])


def _thinned(group: Group, points: int, marked: Sequence[float]) -> Group:
    size = len(group.series[0].y) if group.series else 0
    is_stack = group.thin != "extremes"
    points = min(points, MOST_STRETCHES) if is_stack else points
    if size <= points:
        return group
    if is_stack:  # one value for each stretch of steps, at its end
        parts = np.array_split(np.arange(size), points)
        rows = np.array([part[-1] for part in parts])
        combined = np.mean if group.thin == "mean" else np.max
        ys = [np.array([_known(combined, each.y[part]) for part in parts]) for each in group.series]
    else:
        kept = set(extremes([series.y for series in group.series], points).tolist())
        for row in np.searchsorted(group.x[STEP], marked).tolist():  # where something changes: both sides of it
            kept |= {max(row - 1, 0), min(row, size - 1)}
        rows = np.array(sorted(kept))
        ys = [series.y[rows] for series in group.series]
    x = {axis: values[rows] for axis, values in group.x.items()}
    return replace(group, x=x, series=[replace(each, y=y) for each, y in zip(group.series, ys, strict=True)])


def _known(combined: Any, values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(combined(known)) if len(known) else np.nan


def extremes(columns: Sequence[Floats], points: int) -> NDArray[np.int64]:
    """Return at most `points` rows (or a few for each column): the first, the last, and where a column is extreme.

    The rows are cut into equal bins; of each bin and column the least and the greatest stay.
    """
    size = len(columns[0])
    bins = max(points // (2 * len(columns)), 8)
    width = -(-size // bins)
    kept = {0, size - 1}
    for column in columns:
        padded = np.full(bins * width, np.nan)
        padded[:size] = column
        table = padded.reshape(bins, width)
        known = ~np.isnan(table).all(axis=1)
        rows = np.flatnonzero(known) * width
        kept.update((rows + np.nanargmin(table[known], axis=1)).tolist())
        kept.update((rows + np.nanargmax(table[known], axis=1)).tolist())
    return np.array(sorted(kept), dtype=np.int64)
