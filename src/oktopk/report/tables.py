"""The tables of a run, and of several side by side: page, terminal, CSV and JSON show the same ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oktopk.telemetry.figures import finite, middle, quotient, summary_of, total, whole_total
from oktopk.telemetry.format import format_bytes, format_value
from oktopk.telemetry.run import COMMUNICATION, Floats, Run
from oktopk.telemetry.schema import SPLIT, EpochRecord, TrainStep, catalogue, mean

SETTINGS = (
    "recipe", "dnn", "dataset", "compressor", "density", "wire", "dense_steps", "local_steps", "outer", "max_epochs",
    "batch_size", "optimizer", "lr", "momentum", "sparse_momentum", "seed", "model", "algorithm", "clip",
    "density_schedule", "on_nonfinite",
)  # fmt: skip
"""Settings of a run that its table shows, where the run has them."""

COLUMNS: Sequence[tuple[str, str, str, Callable[..., Any] | None]] = (
    ("run", "text", "run", None),
    ("exchange", "text", "exchange", None),
    ("workers", "count", "workers", None),
    ("steps", "count", "steps", None),
    ("train loss", "number", "train_loss", min),
    ("val loss", "number", "val_loss", min),
    ("best WER", "number", "best_error", min),
    ("sent", "bytes", "sent_bytes", min),
    ("bytes, against the first", "fewer", "sent_bytes", max),
    ("seconds a step", "seconds", "step_seconds", min),
    ("speed, against the first", "faster", "step_seconds", max),
    ("seconds", "seconds", "seconds", min),
    ("seconds to goal", "seconds", "goal_seconds", min),
    ("goal, against the first", "sooner", "goal_seconds", max),
    ("bytes to goal", "bytes", "goal_bytes", min),
    ("bytes to goal, against the first", "fewer", "goal_bytes", max),
)
"""Heading, unit and figure of each column, and the function that finds the best in it."""

RATIOS = ("faster", "fewer", "sooner")


@dataclass(frozen=True)
class Table:
    """A table of raw figures."""

    name: str
    title: str
    about: str
    columns: Mapping[str, str]  # units by heading
    rows: Sequence[Sequence[Any]]  # None where a figure is not known
    definition: str = "Measured figures"  # the heading in docs/accounting.md that defines the figures
    best: Sequence[tuple[int, int]] = ()  # places (row, column) of the best figures


@dataclass(frozen=True)
class Card:
    """A headline: a figure and a note to it."""

    name: str
    value: Any
    kind: str
    note: str = ""


def tables_of(run: Run) -> list[Table]:
    """Return all tables of a run."""
    of_rank_0 = [_settings(run), _phases(run), _bytes(run), _time(run)]
    return [*of_rank_0, _ranks(run), _messages(run), _regions(run), _epochs(run), _events(run)]


def _settings(run: Run) -> Table:
    config = run.header.get("config", {})
    planned = {"parameters": "numel", "sent sparsely": "sparse_numel", "steps planned": "steps"}
    settings = {"started": run.header.get("started"), "workers": run.workers}
    settings |= {heading: run.header.get(name) for heading, name in planned.items()}
    settings |= {name: config[name] for name in SETTINGS if name in config}
    rows = [(name, _plain(value)) for name, value in settings.items() if value not in (None, [])]
    return Table("settings", "The run", "As it said when it started.", {"setting": "text", "value": "text"}, rows)


def _plain(value: Any) -> Any:
    """Return a setting as JSON can hold it."""
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (int, str)) else str(value)


def _figures(*names: str) -> dict[str, str]:
    """Return the columns of figures of the catalogue."""
    figures = catalogue(TrainStep) | catalogue(EpochRecord)
    return {figures[name].heading or name: figures[name].unit for name in names}


def _phases(run: Run) -> Table:
    rows = []
    for phase, made in run.masks.items():
        delivered, all_sent = made & ~run.is_skipped, run.column("sent_bytes")[made]
        means = [mean(run.column(name)[delivered]) for name in ("sparsity", "compression_ratio")]
        of_k = quotient(total(run.column("selected")[delivered]), total(run.column("wanted")[delivered]))
        sent, dense, seconds = mean(all_sent), mean(run.dense_bytes[made]), middle(run.step_seconds[made])
        counts = [int(made.sum()), int((made & run.is_skipped).sum())]
        rows.append([phase, *counts, *means, of_k, whole_total(all_sent), sent, quotient(sent, dense), seconds])
    columns = {"phase": "text", "steps": "count", "skipped": "count", **_figures("sparsity", "compression_ratio")}
    columns |= {"selected / k": "number", **_figures("sent_bytes"), "sent a step": "bytes"}
    columns |= {"of a dense step": "share", "seconds a step": "seconds"}
    about = (
        "Sparsity and ratio are means over steps that delivered something; bytes and the median seconds are rank 0's."
    )
    return Table("phases", "Dense and sparse steps", about, columns, rows, "Nominal figures (the literature's)")


def _bytes(run: Run) -> Table:
    sent = whole_total(run.column("sent_bytes"))
    parts = {
        **run.bytes_by_part(),
        "all that was sent": run.column("sent_bytes"),
        "if every step were dense": run.dense_bytes,
    } | ({f"the bound {run.bound_words}k(P-1)/P, sparse steps": run.bound_bytes} if run.bound_words else {})
    rows = [[name, whole_total(part), quotient(total(part), sent), *_means(run, part)] for name, part in parts.items()]
    about = "Measured on rank 0. Headers are those of blocks of pairs; dense_tail travels dense; agree is no gradient."
    columns = {"part": "text", "sent": "bytes", "share": "share", "a dense step": "bytes", "a sparse step": "bytes"}
    return Table("bytes", "Bytes sent, by phase of the algorithm", about, columns, rows, "Words on the wire")


def _means(run: Run, values: Floats) -> list[float | None]:
    """Return the means over dense and over sparse steps."""
    return [mean(values[run.masks[phase]]) for phase in ("dense", "sparse")]


def _time(run: Run) -> Table:
    whole = total(run.step_seconds)
    parts = [("training", SPLIT[name], part) for name, part in run.split_of().items()]
    parts += [("exchange", name, part) for name, part in run.phases_of().items()]
    rows = [
        [thread, name, total(part), quotient(total(part), whole), *_means(run, part)]
        for thread, name, part in parts if total(part) is not None
    ]  # fmt: skip
    about = "The exchange works while backward still computes: only the wait is in the step's time."
    columns = {"thread": "text", "part": "text", "seconds": "seconds", "of a step": "share"}
    columns |= {"a dense step": "seconds", "a sparse step": "seconds"}
    return Table("time", "Time, by what it was spent on", about, columns, rows, "Phases")


def _ranks(run: Run) -> Table:
    names = ("sent_bytes", "received_bytes", "messages", "selected")
    sums = [[whole_total(run.column(f"ranks.{rank}.{name}")) for name in names] for rank in range(run.num_ranks)]
    average, rows = mean(sent for sent, *_ in sums), []
    for rank, figures in enumerate(sums):
        communication, computation = (total(part) for part in run.communication(rank))
        both = None if communication is None or computation is None else communication + computation
        seconds = [*map(total, run.split_of(rank).values()), communication, computation]
        rows.append([f"rank {rank}", *figures, quotient(figures[0], average), *seconds, quotient(communication, both)])
    columns = {"rank": "text", **_figures(*names), "sent / mean": "times"}
    columns |= dict.fromkeys((*SPLIT, "communication", "computation"), "seconds") | {"communicating": "share"}
    about = (
        f"Communication is the seconds in {', '.join(COMMUNICATION)}. Computation overlaps it; the share is of both."
    )
    return Table("ranks", "By rank", about, columns, rows, "A training run")


def _messages(run: Run) -> Table:
    rows = [
        [phase, collective, made.calls, made.sizes.total(), made.sent_bytes,
         min(made.sizes, default=None), made.median, max(made.sizes, default=None)]
        for (phase, collective), made in run.messages.items()
    ]  # fmt: skip
    columns = {"phase": "text", "collective": "text", "calls": "count", "messages": "count"}
    columns |= dict.fromkeys(("total", "smallest", "median", "largest"), "bytes")
    about = "Measured on rank 0, every message of every step; empty ones do not count."
    return Table("messages", "Messages, by collective", about, columns, rows)


def _regions(run: Run) -> Table:
    owned = [whole_total(run.column(f"nnz_by_owner.{owner}")) for owner in range(len(run.names("nnz_by_owner")))]
    whole, average = sum(count or 0 for count in owned), mean(owned)
    rows = [[f"rank {i}", count, quotient(count, whole), quotient(count, average)] for i, count in enumerate(owned)]
    columns = {"owner": "text", "delivered": "count", "share": "share", "delivered / mean": "times"}
    about = "Elements of the result in the region that each rank owns, over all sparse steps: 1 is an even load."
    return Table("regions", "Load of the regions' owners", about, columns, rows)


def _epochs(run: Run) -> Table:
    errors = ("wer", "cer") if run.error == "wer" else (run.error,)
    names = ("epoch", "step", "seconds", "sent_bytes", "lr", "train_loss", "val_loss", *errors)
    rows = [[(epoch["epoch"] or 0) + 1, *(epoch[name] for name in names[1:])] for epoch in run.epochs]
    about = "Bytes and seconds are rank 0's since the start, without validation."
    return Table("epochs", "Epochs", about, _figures(*names), rows, "A training run")


def _events(run: Run) -> Table:
    rows = [[event["step"], event["event"], event["message"]] for event in run.events]
    sparse = run.is_sparse & ~np.isnan(run.column("wanted"))
    steps, wanted = run.steps[sparse], run.column("wanted")[sparse]
    for i in np.flatnonzero(np.diff(wanted)) + 1:
        rows.append([int(steps[i]), "density", f"k changed from {wanted[i - 1]:,.0f} to {wanted[i]:,.0f}"])
    rows.sort(key=lambda row: -1 if row[0] is None else row[0])
    columns = {"step": "count", "event": "text", "message": "text"}
    return Table("events", "Events", "What the run had to say.", columns, rows, "A training run")


def step_table(run: Run) -> Table:
    """Return every step with its known figures; too long for a page or a terminal, so for CSV."""
    figures: dict[str, list[Any]] = {"step": _known(run.steps), "phase": run.phases}
    for name, figure in catalogue(TrainStep).items():
        values = run.column(name)
        if figure.unit not in ("text", "object") and np.isfinite(values).any():
            figures.setdefault(name, _known(values))
    figures |= {f"log.{name}": _known(run.logged(name)) for name in run.logged_names}
    for group in ("split", "seconds", "sent_by_phase", "nnz_by_owner"):
        figures |= {f"{group}.{name}": _known(run.column(f"{group}.{name}")) for name in run.names(group)}
    figures["dense_bytes"], figures["bound_bytes"] = _known(run.dense_bytes), _known(run.bound_bytes)
    columns = dict.fromkeys(figures, "number") | {"phase": "text"}
    return Table("steps", "Steps", "As rank 0 recorded them.", columns, list(zip(*figures.values(), strict=True)))


def _known(values: Floats) -> list[float | int | None]:
    """Return the numbers as they were recorded: whole ones whole, unknown ones None."""
    return [None if value != value else int(value) if float(value).is_integer() else value for value in values.tolist()]


def error_heading(run: Run) -> str:
    """Return the name of the figure that says how good the net is: WER, or bits a byte."""
    return catalogue(EpochRecord)[run.error].heading


def cards_of(run: Run) -> list[Card]:
    """Return the headlines of a run: the figures that it has."""
    return [card for card in _cards(run) if card.value is not None]


def _cards(run: Run) -> list[Card]:
    summary = summary_of(run)
    per_step, epochs = summary["seconds_per_step"], (summary["best_epoch"] or 0) + 1
    is_speech = run.error == "wer"
    none_sparse = "" if summary["sparse_steps"] else "no step was sparse"
    best, dense = summary[f"best_{run.error}"], format_value(summary["dense_bytes"] or None, "bytes")
    best_note = "" if best is None else f"best {best:.4g}, after {epochs} epoch{'s' * (epochs > 1)}"
    skipped = f", {summary['skipped_steps']} skipped" if summary["skipped_steps"] else ""
    losses = _known(run.loss[~np.isnan(run.loss)]) if "loss" in run.logged_names else []
    return [
        Card("loss", losses[-1] if losses else None, "number", "the last that was logged"),
        Card("train loss", summary["train_loss"], "number", "mean of the last epoch"),
        Card("validation loss", summary["val_loss"], "number", f"mean over {'utterances' if is_speech else 'bytes'}"),
        Card(error_heading(run), summary[run.error], "number", best_note),
        Card("steps", summary["steps"], "count",
             ", ".join(f"{made.sum():,} {phase}" for phase, made in run.masks.items()) + skipped),
        Card("sent, of dense", summary["sent_of_dense"], "share",
             f"{format_bytes(summary['sent_bytes'])} by rank 0; dense {dense}"),
        Card("compression ratio", summary["compression_ratio"], "times",
             none_sparse or f"sparsity {summary['sparsity'] or 0:.4g}, sparse steps"),
        Card("dense step", per_step["dense"], "seconds", "median, on rank 0"),
        Card("sparse step", per_step["sparse"], "seconds", none_sparse or "median, on rank 0"),
        Card("sparse step, predicted", middle(run.column("predicted_seconds")), "seconds", "from the dense steps"),
    ]  # fmt: skip


def comparison_table(runs: Sequence[Run]) -> Table:
    """Return a row for each run; ratios are against the first."""
    goal = common_goal(runs)
    first, *_ = figures = [_compared(run, goal) for run in runs]
    error = error_heading(runs[0])
    named = "goal" if goal is None else f"{error} {goal:.4g}"
    columns = {heading.replace("goal", named).replace("WER", error): unit for heading, unit, *_ in COLUMNS}
    cells = [
        [quotient(first[name], each[name]) if unit in RATIOS else each[name] for _, unit, name, _ in COLUMNS]
        for each in figures
    ]
    about = f"Ratios are against the first run, {runs[0].name}. Bytes and seconds are rank 0's."
    if goal is not None:
        about += f" The goal is the lowest {error} that every run reached: {goal:.4g}."
    return Table("comparison", "The runs side by side", about, columns, cells, "A training run", _best(cells))


def common_goal(runs: Sequence[Run]) -> float | None:
    """Return the lowest error that every run reached; None if one was never validated, or they learn other things."""
    best = [summary_of(run)[f"best_{runs[0].error}"] for run in runs]
    return None if any(error is None for error in best) else max(best)


def _compared(run: Run, goal: float | None) -> dict[str, Any]:
    config = run.header.get("config", {})
    name, density = config.get("compressor"), config.get("density")
    at = f" {density:g}" if isinstance(density, float) and name != "dense" else ""
    validated = (epoch for epoch in run.epochs if goal is not None and epoch[run.error] is not None)
    reached = next((epoch for epoch in validated if epoch[run.error] <= goal), {})
    seconds, summary = total(run.step_seconds), summary_of(run)
    return summary | {
        "best_error": summary[f"best_{run.error}"],
        "run": run.name,
        "exchange": None if name is None else f"{name}{at}",
        "workers": run.workers,
        "step_seconds": quotient(seconds, run.num_steps),
        "seconds": seconds,
        "goal_seconds": reached.get("seconds"),
        "goal_bytes": reached.get("sent_bytes"),
    }


def _best(cells: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """Return the places (row, column) of the best figures, where the runs differ at all."""
    found = []
    for column, (*_, better) in enumerate(COLUMNS):
        known = [row[column] for row in cells if row[column] is not None]
        if better is not None and len(set(known)) > 1:
            best = better(known)
            found += [(i, column) for i, row in enumerate(cells) if row[column] == best]
    return found
