"""The charts of a run and of several: which series each shows, over what. Data only; `page.js` draws them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oktopk.telemetry.run import PAIRS, Floats, Run, sum_known
from oktopk.telemetry.schema import SPLIT

STEP, SECONDS, BYTES = "step", "seconds", "bytes"
STRETCHES = "Means over stretches of steps; the longest step of each can be switched on."
MOST_STRETCHES = 150
AXES = {STEP: "step", SECONDS: "training time (s)", BYTES: "bytes sent by rank 0"}


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

    rank     the group is this rank's, and shown when that is chosen; None: it is shown always
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
    labels        names of the places of bars, and `x_title` what they are
    zoom          (name, highest y): a closer look that the reader can choose
    definition    the heading in docs/accounting.md that defines what is shown
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


@dataclass
class _Places:
    """Where a run's steps and epochs are on each axis."""

    run: Run
    steps: dict[str, Floats] = field(init=False)
    epochs: dict[str, Floats] = field(init=False)

    def __post_init__(self) -> None:
        run = self.run
        self.steps = {STEP: run.steps, SECONDS: run.seconds, BYTES: run.sent_so_far}
        columns = {STEP: "step", SECONDS: "seconds", BYTES: "sent_bytes"}
        self.epochs = {axis: floats(epoch[name] for epoch in run.epochs) for axis, name in columns.items()}

    def marks(self) -> list[tuple[dict[str, float], str]]:
        """Return the first sparse step, and where the run went on after a stop."""
        found = [(self.run.boundary, "first sparse step")]
        found += [(event["step"], "resumed") for event in self.run.events if event["event"] == "resume"]
        return [(self._place(step), name) for step, name in found if step is not None and self.run.num_steps]

    def _place(self, step: int) -> dict[str, float]:
        """Return where a step begins: it ends where the axes of time and bytes have it."""
        row = int(np.searchsorted(self.steps[STEP], step))
        before = {axis: float(self.steps[axis][row - 1]) if row else 0.0 for axis in (SECONDS, BYTES)}
        return {STEP: float(step), **before}


def charts_of(run: Run) -> dict[str, list[Chart]]:
    """Return the charts of a run that have something to show, by section of the page."""
    places = _Places(run)
    sections = {
        "Learning": [_loss(run, places), _errors(run, places), _norms(run, places)],
        "Compression": [_sparsity(run, places), _ratio(run, places), _selected(run, places), _thresholds(run, places)],
        "Traffic": [_bytes(run, places), _messages(run)],
        "Time": [_split(run, places), _phases(run, places), _communication(run, places)],
        "Balance": [_sent_by_rank(run), _owners(run, places)],
    }
    return {name: [chart for chart in charts if not chart.is_empty] for name, charts in sections.items()}


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the runs over each other."""
    places = [_Places(run) for run in runs]
    everywhere = (SECONDS, BYTES, STEP)

    def by_epoch(name: str) -> list[Group]:
        return [
            Group(place.epochs, [Series(run.name, floats(epoch[name] for epoch in run.epochs), f"run{i}")])
            for i, (run, place) in enumerate(zip(runs, places, strict=True))
        ]

    def by_step(values: Sequence[Floats]) -> list[Group]:
        return [
            Group(place.steps, [Series(run.name, y, f"run{i}")])
            for i, (run, place, y) in enumerate(zip(runs, places, values, strict=True))
        ]

    defined: dict[str, Any] = {"axes": everywhere, "definition": "A training run"}
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
              [replace(group, thin="mean") for group in by_step([run.step_seconds for run in runs])], (STEP, BYTES),
              "seconds", definition="A training run"),
        Chart("all-bytes-a-step", "Bytes of a step", "Sent by rank 0, measured.", "bytes a step (B)",
              by_step([run.column("sent_bytes") for run in runs]), (STEP, SECONDS), "bytes", log=True),
    ]  # fmt: skip
    return [chart for chart in charts if not chart.is_empty]


def floats(values: Iterable[float | None]) -> Floats:
    """Return the values, NaN where one is not known."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _loss(run: Run, places: _Places) -> Chart:
    epochs = [
        Series("training, mean of an epoch", floats(epoch["train_loss"] for epoch in run.epochs), "blue", "dots"),
        Series("validation", floats(epoch["val_loss"] for epoch in run.epochs), "orange", "dots"),
    ]
    steps = Series("training, each step", run.column("loss"), "muted", "faint")
    positive = bool((np.nan_to_num(run.column("loss"), nan=1.0) > 0).all())
    return Chart(
        "loss", "Loss", "The mean over workers of the loss of an utterance.", "loss (nats an utterance)",
        [Group(places.steps, [steps]), Group(places.epochs, epochs)], tuple(AXES), log=positive, wide=True,
        marks=places.marks(),
        definition="A training run",
    )  # fmt: skip


def _errors(run: Run, places: _Places) -> Chart:
    series = [
        Series("WER", floats(epoch["wer"] for epoch in run.epochs), "orange", "dots"),
        Series("CER", floats(epoch["cer"] for epoch in run.epochs), "green", "dots"),
    ]
    return Chart(
        "errors", "Word and character errors", "Of the validation set; WER may pass 1.", "errors a word, a character",
        [Group(places.epochs, series)], tuple(AXES), marks=places.marks(), definition="A training run",
    )  # fmt: skip


def _norms(run: Run, places: _Places) -> Chart:
    known = ~np.isnan(run.column("residual_norm"))
    groups = [Group(places.steps, [Series("gradient delivered", run.column("grad_norm"), "muted", "faint")])]
    for rank in range(run.num_ranks):
        residual = Series(f"residual of rank {rank}", run.column(f"ranks.{rank}.residual_norm")[known], f"rank{rank}")
        groups.append(Group(_at(places.steps, known), [residual]))
    about = "What a step delivered, and what a rank still holds back after it, looked at every tenth sparse step."
    return Chart(
        "norms", "Residual against gradient", about, "norm (gradient's unit)", groups, log=True, marks=places.marks(),
        definition="A training run",
    )  # fmt: skip


def _sparsity(run: Run, places: _Places) -> Chart:
    return Chart(
        "sparsity", "Sparsity", "1 - nnz / numel: 0 in dense steps.", "share of zeros",
        [Group(places.steps, [Series("sparsity", run.column("sparsity"), "blue")])], marks=places.marks(),
        definition="Nominal figures (the literature's)",
    )  # fmt: skip


def _ratio(run: Run, places: _Places) -> Chart:
    return Chart(
        "ratio", "Compression ratio", "numel / nnz: 1 in dense steps.", "ratio (times)",
        [Group(places.steps, [Series("compression ratio", run.column("compression_ratio"), "blue")])],
        marks=places.marks(), definition="Nominal figures (the literature's)",
    )  # fmt: skip


def _selected(run: Run, places: _Places) -> Chart:
    series = [
        Series("selected by rank 0 / k", run.of_wanted("selected"), "blue"),
        Series("delivered / k", run.of_wanted("nnz"), "orange"),
    ]
    return Chart(
        "selected", "Selected and delivered, of k", "k is what the density asks for: 1 is just that.", "elements / k",
        [Group(places.steps, series)], from_zero=False, marks=places.marks(),
        definition="Nominal figures (the literature's)",
    )  # fmt: skip


def _thresholds(run: Run, places: _Places) -> Chart:
    known = run.is_sparse
    series = [
        Series("local", run.column("threshold")[known], "blue"),
        Series("global", run.column("global_threshold")[known], "orange"),
    ]
    return Chart(
        "thresholds", "Thresholds", "What an element must reach to be sent, and to be delivered.", "score", log=True,
        groups=[Group(_at(places.steps, known), series)],
    )  # fmt: skip


def _bytes(run: Run, places: _Places) -> Chart:
    order = ("exchange", "gather", "dense_tail", "headers", "agree")
    parts = run.bytes_by_part()
    named = [name for name in order if name in parts] + [name for name in parts if name not in order]
    shown = {"dense_tail": "side dense"}
    stack = [Series(shown.get(name, name), parts[name], name, "area") for name in named]
    lines = [
        Series("dense would send", run.dense_bytes, "muted", "dash"),
        Series("bound 6k(P-1)/P", run.bound_bytes, "red", "dash"),
    ]
    highest = float(np.nanmax(run.bound_bytes, initial=0.0))
    return Chart(
        "bytes", "Bytes of each step, by phase", "Sent by rank 0, measured; headers are apart from what they head.",
        "bytes a step (B)", [Group(places.steps, stack), Group(places.steps, lines)], kind="bytes", wide=True,
        marks=places.marks(), zoom=("sparse steps", 1.3 * highest) if highest else None,
        definition="Words on the wire",
    )  # fmt: skip


def _messages(run: Run) -> Chart:
    """Return how many messages there were of each size, in powers of two, by collective."""
    largest = max((max(made.sizes, default=0) for made in run.messages.values()), default=0)
    bins = range(max(largest, 1).bit_length() + 1)
    used = [i for i in bins if any(_bin(size) == i for made in run.messages.values() for size in made.sizes)]
    span = range(min(used, default=0), max(used, default=-1) + 1)
    groups = []
    for i, ((phase, collective), made) in enumerate(run.messages.items()):
        counts = dict.fromkeys(span, 0)
        for size, count in made.sizes.items():
            counts[_bin(size)] += count
        color = phase if phase in (*PAIRS, "agree", "dense_tail") else f"run{i}"
        bars = Series(f"{phase}: {collective}", floats(counts.values()), color, "bar")
        groups.append(Group({STEP: floats(span)}, [bars]))
    return Chart(
        "messages", "Message sizes", "Messages that rank 0 sent, by collective; a bar is a power of two.",
        "messages (count)", groups, log=True, wide=True, labels=[_bin_label(i) for i in span],
        x_title="message size (at least)",
    )  # fmt: skip


def _bin(size: int) -> int:
    """Return the power of two that a size is below: sizes of 2^(i-1) up to 2^i - 1 are in bin i."""
    return size.bit_length()


def _bin_label(i: int) -> str:
    low = 1 << max(i - 1, 0)
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if low >= size:
            return f"{low // size} {unit}"
    return f"{low} B"


def _split(run: Run, places: _Places) -> Chart:
    groups = []
    for rank in _ranks(run):
        parts = [Series(SPLIT[name], y, name, "area") for name, y in run.split_of(rank).items()]
        groups += _stack(places, parts, rank)
    return Chart(
        "split", "The training thread: time of a step",
        f"What the step's time went on, measured on each rank. {STRETCHES}",
        "time a step (s)", groups, kind="seconds", marks=places.marks(), definition="A training run",
    )  # fmt: skip


def _phases(run: Run, places: _Places) -> Chart:
    groups = []
    for rank in _ranks(run):
        parts = [Series(name, y, name, "area") for name, y in run.phases_of(rank).items()]
        groups += _stack(places, parts, rank)
    return Chart(
        "phases", "The exchange's thread: time of a step", f"It works while backward still computes. {STRETCHES}",
        "time a step (s)", groups, kind="seconds", marks=places.marks(), definition="Phases",
    )  # fmt: skip


def _communication(run: Run, places: _Places) -> Chart:
    groups = []
    for rank in _ranks(run):
        communication, computation = run.communication(rank)
        whole = communication + computation
        share = np.divide(100 * communication, whole, out=np.full_like(whole, np.nan), where=whole > 0)
        curve = Series(f"rank {rank or 0}", share, f"rank{rank or 0}")
        groups.append(Group(places.steps, [curve], thin="mean"))
    return Chart(
        "communication", "Communication, of communication and computation",
        "Seconds in which messages travelled against those in which anything was computed; the two overlap. "
        "Means over stretches of steps.",
        "communication (%)", groups, wide=True, marks=places.marks(), definition="Phases",
    )  # fmt: skip


def _stack(places: _Places, parts: Sequence[Series], rank: int | None) -> list[Group]:
    """Return the parts of a step's time, and its whole: the parts by their mean, the whole by its longest."""
    if not parts:
        return []
    whole = Series("longest step", sum_known([part.y for part in parts]), "ink", "faint", off=True)
    return [Group(places.steps, parts, rank, "mean"), Group(places.steps, [whole], rank, "longest")]


def _ranks(run: Run) -> Sequence[int | None]:
    """Return the ranks, or None for the one that a record without ranks is of."""
    return range(run.num_ranks) or [None]


def _sent_by_rank(run: Run) -> Chart:
    ranks = range(run.num_ranks)
    names = {"sent_bytes": ("sent", "blue"), "received_bytes": ("received", "orange")}
    bars = [
        Series(name, floats(_total_of(run, f"ranks.{rank}.{column}") for rank in ranks), color, "bar")
        for column, (name, color) in names.items()
    ]
    return Chart(
        "ranks", "Bytes by rank", "All steps together, as each rank measured them.", "bytes (B)",
        [Group({STEP: floats(ranks)}, bars)], kind="bytes", labels=[str(rank) for rank in ranks], x_title="rank",
    )  # fmt: skip


def _total_of(run: Run, name: str) -> float | None:
    values = run.column(name)
    return None if np.isnan(values).all() else float(np.nansum(values))


def _owners(run: Run, places: _Places) -> Chart:
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
        "delivered / mean", [Group(_at(places.steps, known), series)], from_zero=False,
    )  # fmt: skip


def _at(x: Mapping[str, Floats], chosen: NDArray[np.bool_]) -> dict[str, Floats]:
    return {axis: values[chosen] for axis, values in x.items()}


def thinned(chart: Chart, points: int) -> Chart:
    """Return the chart with at most about `points` places in each group; see `Group.thin`."""
    marked = [at[STEP] for at, _ in chart.marks]
    return replace(chart, groups=[_thinned(group, points, marked) for group in chart.groups])


def _thinned(group: Group, points: int, marked: Sequence[float]) -> Group:
    size = len(group.series[0].y) if group.series else 0
    if group.thin != "extremes":
        return _by_stretch(group, size, min(points, MOST_STRETCHES))
    if size <= points:
        return group
    kept = set(extremes([series.y for series in group.series], points).tolist())
    for row in np.searchsorted(group.x[STEP], marked).tolist():  # where something changes: both sides of it
        kept |= {max(row - 1, 0), min(row, size - 1)}
    rows = np.array(sorted(kept))
    return replace(
        group,
        x={axis: values[rows] for axis, values in group.x.items()},
        series=[replace(series, y=series.y[rows]) for series in group.series],
    )


def _by_stretch(group: Group, size: int, points: int) -> Group:
    """Return one value for each stretch of steps, at its end."""
    if size <= points:
        return group
    parts = np.array_split(np.arange(size), points)
    ends = np.array([part[-1] for part in parts])
    combined = {"mean": _mean_known, "longest": _max_known}[group.thin]
    return replace(
        group,
        x={axis: values[ends] for axis, values in group.x.items()},
        series=[replace(each, y=np.array([combined(each.y[part]) for part in parts])) for each in group.series],
    )


def _mean_known(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


def _max_known(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else np.nan


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
