"""The charts of a run and of several: their series and axes. Data only; `page.js` draws them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oktopk.telemetry.figures import total
from oktopk.telemetry.run import COMMUNICATION, Floats, Run, quotients, sum_known
from oktopk.telemetry.schema import SPLIT, add_by_name, mean

AXES = STEP, SECONDS, BYTES = "step", "seconds", "bytes"
STRETCHES = "Means over stretches of steps; the longest step of each can be switched on."
MOST_STRETCHES = 150
"""Points of a stack, because more of them are narrower than a pixel."""

STRETCH: dict[str, Callable[[Floats], float | None]] = {"mean": mean, "longest": np.fmax.reduce}
"""Functions that make one value of a stretch of steps, by `Group.thin`."""

OFTEN = 0.2
"""Share of steps with a value from which on a line is drawn, because dots further apart say where they are."""

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
    """Series over the same places."""

    x: Mapping[str, Floats]  # by axis
    series: Sequence[Series]
    rank: int | None = None  # the rank that must be chosen to show the group; None: it is always shown
    thin: str = "extremes"  # these remain of each stretch of a long group, or one value: a key of `STRETCH`


@dataclass(frozen=True)
class Chart:
    """A chart, as the page gets it."""

    name: str
    title: str
    about: str
    y_title: str  # with the unit
    groups: Sequence[Group]
    axes: Sequence[str] = (STEP,)
    kind: str = "number"  # or "bytes", "seconds": ticks are written with their unit
    log: bool = False  # whether y is logarithmic; then the reader may choose
    from_zero: bool = True  # whether y begins at zero, if it is not logarithmic
    wide: bool = False
    marks: Sequence[tuple[Mapping[str, float], str]] = ()  # steps at which something happened: a line across
    zoom: float | None = None  # highest y of a closer look at the sparse steps, which the reader can choose
    labels: Sequence[str] = ()  # names of the places of bars, with `x_title` as the name of their axis
    x_title: str = ""
    definition: str = "Measured figures"  # the heading in docs/accounting.md that defines the figures


def charts_of(run: Run) -> dict[str, list[Chart]]:
    """Return the charts of a run that have something to show, by section of the page."""
    sections = {
        "Learning": _learning(run),
        "Compression": _compression(run),
        "Traffic": _traffic(run),
        "Time": _time(run),
        "Balance": _balance(run),
    }
    return {name: _known(charts) for name, charts in sections.items()}


def _known(charts: Sequence[Chart]) -> list[Chart]:
    """Return the charts that have something to show, with the series that do."""
    known = [replace(chart, groups=[each for each in map(_with_data, chart.groups) if each.series]) for chart in charts]
    return [chart for chart in known if chart.groups]


def _with_data(group: Group) -> Group:
    return replace(group, series=[series for series in group.series if np.isfinite(series.y).any()])


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the runs over each other."""

    def by_epoch(name: str) -> list[Group]:
        return [_over_epochs(run, {run.name: (name, f"run{i}")}, "line") for i, run in enumerate(runs)]

    def by_step(values: Sequence[Floats], thin: str = "extremes") -> list[Group]:
        return [Group(_steps(run), [Series(run.name, values[i], f"run{i}")], thin=thin) for i, run in enumerate(runs)]

    defined: dict[str, Any] = {"axes": (SECONDS, BYTES, STEP), "definition": TRAINING}
    return _known([
        Chart("all-wer", "WER", "Word errors in the validation set: how soon, and after how many bytes.",
              "WER (errors a word)", by_epoch("wer"), **defined),
        Chart("all-bits", "Bits a byte", "Of the validation set: how soon, and after how many bytes.",
              "bits a byte", by_epoch("bits_per_byte"), **defined),
        Chart("all-val-loss", "Validation loss", "The mean over the validation set.",
              _loss_unit(runs[0]), by_epoch("val_loss"), **defined),
        Chart("all-train-loss", "Training loss", "The mean of each epoch's steps.",
              _loss_unit(runs[0]), by_epoch("train_loss"), **defined),
        Chart("all-loss", "Loss", "As the scripts logged it.", "loss",
              by_step([run.logged("loss") for run in runs]), **defined),
        Chart("all-sent", "Bytes sent", "By rank 0 since the start, measured.", "bytes sent (B)",
              by_step([_steps(run)[BYTES] for run in runs]), (STEP, SECONDS), "bytes"),
        Chart("all-seconds", "Time of a step", "On rank 0, means over stretches of steps.", "time a step (s)",
              by_step([run.step_seconds for run in runs], "mean"), (STEP, BYTES), "seconds", definition=TRAINING),
        Chart("all-bytes-a-step", "Bytes of a step", "Sent by rank 0, measured.", "bytes a step (B)",
              by_step([run.column("sent_bytes") for run in runs]), (STEP, SECONDS), "bytes", log=True),
    ])  # fmt: skip


def _loss_unit(run: Run) -> str:
    return f"loss (nats {'an utterance' if run.error == 'wer' else 'a byte'})"


def floats(values: Iterable[float | None]) -> Floats:
    """Return the values, NaN where one is not known."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _steps(run: Run, chosen: NDArray[np.bool_] | slice = slice(None)) -> dict[str, Floats]:
    """Return the places of the chosen steps on each axis; seconds and bytes are those at a step's end."""
    so_far = {SECONDS: np.nancumsum(run.step_seconds), BYTES: np.nancumsum(run.column("sent_bytes"))}
    return {axis: places[chosen] for axis, places in {STEP: run.steps, **so_far}.items()}


def _over_epochs(run: Run, curves: Mapping[str, tuple[str, str]], style: str = "dots") -> Group:
    """Return curves over epochs: figure and colour by name."""

    def column(name: str) -> Floats:
        return floats(epoch[name] for epoch in run.epochs)

    x = {STEP: column("step"), SECONDS: column("seconds"), BYTES: column("sent_bytes")}
    return Group(x, [Series(name, column(figure), color, style) for name, (figure, color) in curves.items()])


def _marks(run: Run) -> list[tuple[dict[str, float], str]]:
    """Return the first sparse step and the resumed ones, at their beginning: axes have a step's end."""
    found = [(step, "first sparse step") for step in run.steps[run.is_sparse][:1]]
    found += [(event["step"], "resumed") for event in run.events if event["event"] == "resume"]
    before, marks = {axis: np.append(0.0, ends) for axis, ends in _steps(run).items()}, []
    for step, name in ((step, name) for step, name in found if step is not None):
        row = np.searchsorted(run.steps, step)
        marks.append(({axis: float(ends[row]) for axis, ends in before.items()} | {STEP: float(step)}, name))
    return marks


def _learning(run: Run) -> list[Chart]:
    loss, known = run.loss, ~np.isnan(run.column("residual_norm"))
    recorded = "The mean over workers.", _loss_unit(run)
    is_logged = "loss" in run.logged_names
    about, unit = ("As the script logged it.", "loss") if is_logged else recorded
    each_step = Series("loss", loss, "blue") if is_logged else Series("training, each step", loss, "muted", "faint")
    losses = {"training, mean of an epoch": ("train_loss", "blue"), "validation": ("val_loss", "orange")}
    errors = {"WER": ("wer", "orange"), "CER": ("cer", "green")}
    norms = [Group(_steps(run), [Series("gradient delivered", run.column("grad_norm"), "muted", "faint")])]
    for rank in range(run.num_ranks):
        residual = Series(f"residual of rank {rank}", run.column(f"ranks.{rank}.residual_norm")[known], f"rank{rank}")
        norms.append(Group(_steps(run, known), [residual]))
    defined: dict[str, Any] = {"marks": _marks(run), "definition": TRAINING}
    return [
        Chart("loss", "Loss", about, unit, [Group(_steps(run), [each_step]), _over_epochs(run, losses)],
              AXES, log=not (loss <= 0).any(), wide=True, **defined),
        Chart("errors", "Word and character errors", "Of the validation set; WER may pass 1.",
              "errors a word, a character", [_over_epochs(run, errors)], AXES, **defined),
        Chart("bits", "Bits a byte", "Of the validation set.", "bits a byte",
              [_over_epochs(run, {"bits a byte": ("bits_per_byte", "orange")})], AXES, **defined),
        Chart("norms", "Residual against gradient",
              "What a step delivered, and what a rank still holds back after it, looked at every tenth sparse step.",
              "norm (gradient's unit)", norms, log=True, **defined),
        *(_logged(run, i, name, defined) for i, name in enumerate(run.logged_names) if name != "loss"),
    ]  # fmt: skip


def _logged(run: Run, i: int, name: str, defined: dict[str, Any]) -> Chart:
    values = run.logged(name)
    known = ~np.isnan(values)
    style = "line" if known.mean() > OFTEN else "dots"
    curve = Group(_steps(run, known), [Series(name, values[known], "blue", style)])
    return Chart(f"logged-{i}", name, "As the script logged it.", name, [curve], AXES, from_zero=False, **defined)


def _compression(run: Run) -> list[Chart]:
    defined: dict[str, Any] = {"marks": _marks(run), "definition": NOMINAL}

    def curves(values: Mapping[str, Floats], chosen: NDArray[np.bool_] | slice = slice(None)) -> list[Group]:
        series = [Series(name, y[chosen], ("blue", "orange")[i]) for i, (name, y) in enumerate(values.items())]
        return [Group(_steps(run, chosen), series)]

    names = {"selected by rank 0 / k": "selected", "delivered / k": "nnz"}
    of_k = {heading: quotients(run.column(name), run.column("wanted")) for heading, name in names.items()}
    thresholds = {"local": run.column("threshold"), "global": run.column("global_threshold")}
    return [
        Chart("sparsity", "Sparsity", "1 - nnz / numel: 0 in dense steps.", "share of zeros",
              curves({"sparsity": run.column("sparsity")}), **defined),
        Chart("ratio", "Compression ratio", "numel / nnz: 1 in dense steps.", "ratio (times)",
              curves({"compression ratio": run.column("compression_ratio")}), **defined),
        Chart("selected", "Selected and delivered, of k", "k is what the density asks for: 1 is just that.",
              "elements / k", curves(of_k), from_zero=False, **defined),
        Chart("thresholds", "Thresholds",
              "What an element must reach to be sent, and to be delivered. A sweep delivers small ones, too.", "score",
              curves(thresholds, run.is_sparse), log=True),
    ]  # fmt: skip


def _traffic(run: Run) -> list[Chart]:
    order = ("exchange", "gather", "dense_tail", "headers", "agree")
    parts = run.bytes_by_part()
    named = [name for name in order if name in parts] + [name for name in parts if name not in order]
    stack = [Series(name, parts[name], name, "area") for name in named]
    dense = Series("dense would send", run.dense_bytes, "muted", "dash")
    bound = [Series(f"bound {run.bound_words}k(P-1)/P", run.bound_bytes, "red", "dash")] if run.bound_words else []
    sparse = run.bound_bytes if bound else run.column("sent_bytes")[run.is_sparse]
    highest = float(np.nanmax(sparse, initial=0.0))
    bins = [size.bit_length() for made in run.messages.values() for size in made.sizes]  # bin i ends below 2^i
    span = range(min(bins, default=0), max(bins, default=-1) + 1)
    messages = []
    for i, ((phase, collective), made) in enumerate(run.messages.items()):
        counts = add_by_name({size.bit_length(): count} for size, count in made.sizes.items())
        color = phase if phase in COMMUNICATION else f"run{i}"
        bars = Series(f"{phase}: {collective}", floats(counts.get(place, 0) for place in span), color, "bar")
        messages.append(Group({STEP: floats(span)}, [bars]))
    return [
        Chart("bytes", "Bytes of each step, by phase", "Sent by rank 0, measured; headers are apart from their blocks.",
              "bytes a step (B)", [Group(_steps(run), stack), Group(_steps(run), [dense, *bound])], kind="bytes",
              wide=True, marks=_marks(run), zoom=1.3 * highest or None, definition="Words on the wire"),
        Chart("messages", "Message sizes", "Messages that rank 0 sent, by collective; a bar is a power of two.",
              "messages (count)", messages, log=True, wide=True, labels=[_bin_label(i) for i in span],
              x_title="message size (at least)"),
    ]  # fmt: skip


def _bin_label(i: int) -> str:
    power = max(i - 1, 0)
    unit = min(power // 10, 3)
    return f"{1 << power - 10 * unit} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _time(run: Run) -> list[Chart]:
    split, phases, shares = list[Group](), list[Group](), list[Group]()
    for rank in range(run.num_ranks) or [None]:  # a record without ranks is of one
        split += _stack(run, [Series(SPLIT[name], y, name, "area") for name, y in run.split_of(rank).items()], rank)
        phases += _stack(run, [Series(name, y, name, "area") for name, y in run.phases_of(rank).items()], rank)
        communication, computation = run.communication(rank)
        share = quotients(100 * communication, communication + computation)
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


def _balance(run: Run) -> list[Chart]:
    ranks, known, names = range(run.num_ranks), run.is_sparse, run.names("nnz_by_owner")
    bars = [
        Series(name, floats(total(run.column(f"ranks.{rank}.{name}_bytes")) for rank in ranks), color, "bar")
        for name, color in (("sent", "blue"), ("received", "orange"))
    ]
    owned = np.array([run.column(f"nnz_by_owner.{owner}")[known] for owner in range(len(names))])
    average = owned.mean(axis=0) if len(names) else np.empty(0)
    loads = [quotients(y, average) for y in owned]
    series = [Series(f"region of rank {owner}", y, f"rank{owner}", "faint") for owner, y in enumerate(loads)]
    members = run.column("world_size")
    come_and_go = [Series("members", members, "blue")] if len({*members[~np.isnan(members)]}) > 1 else []
    return [
        Chart("members", "Members", "That made each step together: they came and went.", "members",
              [Group(_steps(run), come_and_go)], (STEP, SECONDS), wide=True, definition=TRAINING),
        Chart("ranks", "Bytes by rank", "All steps together, as each rank measured them.", "bytes (B)",
              [Group({STEP: floats(ranks)}, bars)], kind="bytes", labels=[str(rank) for rank in ranks], x_title="rank"),
        Chart("owners", "Load of the regions' owners", "Elements delivered from each region, over the mean: 1 is even.",
              "delivered / mean", [Group(_steps(run, known), series)], from_zero=False),
    ]  # fmt: skip


def thinned(chart: Chart, points: int) -> Chart:
    """Return the chart with at most about `points` places in each group, on its own axes; see `Group.thin`."""
    groups = []
    for group in chart.groups:
        rows, ys = _thinned(group, points, [at[STEP] for at, _ in chart.marks])
        series = [replace(each, y=y) for each, y in zip(group.series, ys, strict=True)]
        groups.append(replace(group, x={axis: group.x[axis][rows] for axis in chart.axes}, series=series))
    return replace(chart, groups=groups)


def _thinned(group: Group, points: int, marked: Sequence[float]) -> tuple[NDArray[np.int64], list[Floats]]:
    """Return the places of a group that stay, and the values of its series there."""
    ys = [series.y for series in group.series]
    size = len(group.x[STEP])
    points = min(points, MOST_STRETCHES) if group.thin in STRETCH else points
    if size <= points or not ys:
        return np.arange(size), ys
    if group.thin in STRETCH:  # one value for each stretch of steps, at its end
        parts = np.array_split(np.arange(size), points)
        return np.array([part[-1] for part in parts]), [
            floats(STRETCH[group.thin](y[part]) for part in parts) for y in ys
        ]
    kept = set(extremes(ys, points).tolist())
    for row in np.searchsorted(group.x[STEP], marked).tolist():  # where something changes: both sides of it
        kept |= {max(row - 1, 0), min(row, size - 1)}
    rows = np.array(sorted(kept))
    return rows, [y[rows] for y in ys]


def extremes(columns: Sequence[Floats], points: int) -> NDArray[np.int64]:
    """Return at most about `points` rows: the first, the last, and the extremes of each column in equal bins."""
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
