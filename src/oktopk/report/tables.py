"""The tables of a run: each is made once, and shown by the page, the terminal, CSV and JSON alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oktopk.telemetry.figures import finite, mean, phases_of, quotient, summary_of, total, whole_total
from oktopk.telemetry.format import format_bytes, format_value
from oktopk.telemetry.run import COMMUNICATION, Floats, Run
from oktopk.telemetry.schema import SPLIT, EpochRecord, TrainStep, catalogue


@dataclass(frozen=True)
class Column:
    """A column: its heading, and the unit of its figures."""

    name: str
    kind: str = "number"


@dataclass(frozen=True)
class Table:
    """A table: raw figures, None where one is not known.

    definition    the heading in docs/accounting.md under which its figures are defined
    best          rows that are best, by column
    """

    name: str
    title: str
    about: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    definition: str = "Measured figures"
    best: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Card:
    """A headline: a figure and a note to it."""

    name: str
    value: Any
    kind: str
    note: str = ""


def tables_of(run: Run) -> list[Table]:
    """Return all tables of a run."""
    makers = (
        settings_table, phase_table, bytes_table, time_table, rank_table, message_table, region_table, epoch_table,
        event_table,
    )  # fmt: skip
    return [make(run) for make in makers]


def settings_table(run: Run) -> Table:
    """Return the settings of the run."""
    names = (
        "recipe", "dnn", "dataset", "compressor", "density", "wire", "dense_steps", "max_epochs", "batch_size",
        "lr", "momentum", "sparse_momentum", "seed",
    )  # fmt: skip
    config = run.header.get("config", {})
    planned = {"parameters": "numel", "sent sparsely": "sparse_numel", "steps planned": "steps"}
    settings = {"started": run.header.get("started"), "workers": run.workers}
    settings |= {heading: run.header.get(name) for heading, name in planned.items()}
    settings |= {name: config[name] for name in names if name in config}
    rows = [(name, _plain(value)) for name, value in settings.items()]
    return Table("settings", "The run", "As it said when it started.", _columns(setting="text", value="text"), rows)


def phase_table(run: Run) -> Table:
    """Return the figures of dense and of sparse steps."""
    summary, rows = summary_of(run), []
    for phase, made in phases_of(run).items():
        delivered = made & ~run.is_skipped
        sent = summary["sent_bytes_per_step"][phase]
        rows.append(
            [
                phase,
                int(made.sum()),
                int((made & run.is_skipped).sum()),
                *(mean(run.column(name)[delivered].tolist()) for name in ("sparsity", "compression_ratio")),
                quotient(total(run.column("selected")[delivered]), total(run.column("wanted")[delivered])),
                whole_total(run.column("sent_bytes")[made]),
                sent,
                quotient(sent, mean(run.dense_bytes[made].tolist())),
                summary["seconds_per_step"][phase],
            ]
        )
    columns = [
        *_columns(phase="text", steps="count", skipped="count"), *_figures("sparsity", "compression_ratio"),
        Column("selected / k"), *_figures("sent_bytes"), Column("sent a step", "bytes"),
        Column("of a dense step", "share"), Column("seconds a step", "seconds"),
    ]  # fmt: skip
    about = "Sparsity and ratio are means over steps that delivered something; bytes and seconds are rank 0's."
    return Table("phases", "Dense and sparse steps", about, columns, rows, "Nominal figures (the literature's)")


def bytes_table(run: Run) -> Table:
    """Return the bytes that rank 0 sent, by phase of the algorithm, against dense and against the bound."""
    sent = whole_total(run.column("sent_bytes"))
    parts = {
        **run.bytes_by_part(),
        "all that was sent": run.column("sent_bytes"),
        "if every step were dense": run.dense_bytes,
        "the bound 6k(P-1)/P, sparse steps": run.bound_bytes,
    }
    rows = [[name, whole_total(part), quotient(total(part), sent), *_means(run, part)] for name, part in parts.items()]
    about = (
        "Measured on rank 0. Headers are those of the blocks of pairs, and their sizes where they travel; side is what "
        "travels dense; agree is what is not gradient."
    )
    columns = _columns(part="text", sent="bytes", share="share") + _per_step("bytes")
    return Table("bytes", "Bytes sent, by phase of the algorithm", about, columns, rows, "Words on the wire")


def time_table(run: Run) -> Table:
    """Return the parts of rank 0's time, on the training thread and on the exchange's."""
    whole = total(run.step_seconds)
    parts = [("training", SPLIT[name], part) for name, part in run.split_of().items()]
    parts += [("exchange", name, part) for name, part in run.phases_of().items()]
    rows = [[thread, name, total(part), quotient(total(part), whole), *_means(run, part)]
            for thread, name, part in parts]  # fmt: skip
    about = "The exchange works while backward still computes: only the wait is in the step's time."
    columns = [*_columns(thread="text", part="text", seconds="seconds"), Column("of a step", "share")]
    return Table("time", "Time, by what it was spent on", about, columns + _per_step("seconds"), rows, "Phases")


def rank_table(run: Run) -> Table:
    """Return the bytes of each rank and the parts of its time."""
    names = ("sent_bytes", "received_bytes", "messages", "selected")
    sums = [[whole_total(run.column(f"ranks.{rank}.{name}")) for name in names] for rank in range(run.num_ranks)]
    average, rows = mean(sent for sent, *_ in sums), []
    for rank, figures in enumerate(sums):
        communication, computation = (total(part) for part in run.communication(rank))
        both = None if communication is None or computation is None else communication + computation
        rows.append(
            [
                f"rank {rank}",
                *figures,
                quotient(figures[0], average),
                *(total(part) for part in run.split_of(rank).values()),
                communication,
                computation,
                quotient(communication, both),
            ]
        )
    columns = [
        Column("rank", "text"), *_figures(*names), Column("sent / mean", "times"),
        *(Column(name, "seconds") for name in (*SPLIT, "communication", "computation")),
        Column("communicating", "share"),
    ]  # fmt: skip
    about = (
        f"Communication is {', '.join(COMMUNICATION[:-1])} and {COMMUNICATION[-1]}; computation is forward, backward, "
        "update and what the exchange computes. The two overlap; their sum is what the share is of."
    )
    return Table("ranks", "By rank", about, columns, rows, "A training run")


def message_table(run: Run) -> Table:
    """Return the number and the sizes of the messages of each collective."""
    columns = _columns(phase="text", collective="text", calls="count", messages="count", total="bytes")
    columns += _columns(smallest="bytes", median="bytes", largest="bytes")
    rows = [
        [phase, collective, made.calls, made.count, made.sent_bytes,
         min(made.sizes, default=None), made.median, max(made.sizes, default=None)]
        for (phase, collective), made in run.messages.items()
    ]  # fmt: skip
    about = "Measured on rank 0, every message of every step; empty ones do not count."
    return Table("messages", "Messages, by collective", about, columns, rows)


def region_table(run: Run) -> Table:
    """Return how evenly the result was spread over the owners of its regions."""
    owned = [whole_total(run.column(f"nnz_by_owner.{owner}")) for owner in range(len(run.names("nnz_by_owner")))]
    whole, average = sum(count or 0 for count in owned), mean(owned)
    rows = [[f"rank {owner}", count, quotient(count, whole), quotient(count, average)]
            for owner, count in enumerate(owned)]  # fmt: skip
    columns = [*_columns(owner="text", delivered="count", share="share"), Column("delivered / mean", "times")]
    about = "Elements of the result in the region that each rank owns, over all sparse steps: 1 is an even load."
    return Table("regions", "Load of the regions' owners", about, columns, rows)


def epoch_table(run: Run) -> Table:
    """Return the figures of each epoch."""
    names = ("epoch", "step", "seconds", "sent_bytes", "lr", "train_loss", "val_loss", "wer", "cer")
    columns = [Column("seconds", "seconds") if name == "seconds" else _figure(name) for name in names]
    rows = [[epoch[name] for name in names] for epoch in run.epochs]
    about = (
        "Epochs count from 0. Seconds and bytes are rank 0's since the start; seconds are those of training, without "
        "validation."
    )
    return Table("epochs", "Epochs", about, columns, rows, "A training run")


def event_table(run: Run) -> Table:
    """Return the events, in order."""
    rows = [[event["step"], event["event"], event["message"]] for event in run.events]
    rows += [[step, "density", f"k changed from {old:,.0f} to {new:,.0f}"] for step, old, new in run.density_changes]
    rows.sort(key=lambda row: -1 if row[0] is None else row[0])
    columns = _columns(step="count", event="text", message="text")
    return Table("events", "Events", "What the run had to say.", columns, rows, "A training run")


def step_table(run: Run) -> Table:
    """Return every step with what is known of it; too long for a page or a terminal, so for CSV."""
    phase = ["sparse" if sparse else "dense" for sparse in run.is_sparse]
    figures: dict[str, Sequence[Any]] = {"step": _known(run.steps), "phase": phase}
    figures |= {name: _known(run.column(name)) for name in run.scalars() if name != "step"}
    for group in ("split", "seconds", "sent_by_phase", "nnz_by_owner"):
        figures |= {f"{group}.{name}": _known(run.column(f"{group}.{name}")) for name in run.names(group)}
    figures["dense_bytes"], figures["bound_bytes"] = _known(run.dense_bytes), _known(run.bound_bytes)
    columns = [Column(name, "text" if name == "phase" else "number") for name in figures]
    return Table("steps", "Steps", "As rank 0 recorded them.", columns, list(zip(*figures.values(), strict=True)))


def cards_of(run: Run) -> list[Card]:
    """Return the headlines of a run."""
    summary = summary_of(run)
    per_step = summary["seconds_per_step"]
    none_sparse = "" if summary["sparse_steps"] else "no step was sparse"
    best, dense = summary["best_wer"], format_value(summary["dense_bytes"] or None, "bytes")
    skipped = f", {summary['skipped_steps']} skipped" if summary["skipped_steps"] else ""
    return [
        Card("train loss", summary["train_loss"], "number", "mean of the last epoch"),
        Card("validation loss", summary["val_loss"], "number", "mean over utterances"),
        Card("WER", summary["wer"], "number", "" if best is None else f"best {best:.4g}, {_after(summary)}"),
        Card("steps", summary["steps"], "count",
             f"{summary['dense_steps']:,} dense, {summary['sparse_steps']:,} sparse{skipped}"),
        Card("sent, of dense", summary["sent_of_dense"], "share",
             f"{format_bytes(summary['sent_bytes'])} by rank 0; dense {dense}"),
        Card("compression ratio", summary["compression_ratio"], "times",
             none_sparse or f"sparsity {summary['sparsity'] or 0:.4g}, sparse steps"),
        Card("dense step", per_step["dense"], "seconds", "mean, on rank 0"),
        Card("sparse step", per_step["sparse"], "seconds", none_sparse or "mean, on rank 0"),
    ]  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a setting as JSON can hold it."""
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (int, str)) else str(value)


def _after(summary: dict[str, Any]) -> str:
    epochs = (summary["best_epoch"] or 0) + 1
    return f"after {epochs} epoch{'s' * (epochs > 1)}"


def _figure(name: str) -> Column:
    """Return the column of a figure of the catalogue."""
    figure = (catalogue(TrainStep) | catalogue(EpochRecord))[name]
    return Column(figure.heading or name, figure.unit)


def _figures(*names: str) -> list[Column]:
    return [_figure(name) for name in names]


def _columns(**kinds: str) -> list[Column]:
    return [Column(name, kind) for name, kind in kinds.items()]


def _per_step(kind: str) -> list[Column]:
    return [Column("a dense step", kind), Column("a sparse step", kind)]


def _means(run: Run, values: Floats) -> list[float | None]:
    return [mean(values[made].tolist()) for made in phases_of(run).values()]


def _known(values: Floats | NDArray[np.bool_]) -> list[float | int | None]:
    """Return the numbers as they were recorded: whole ones whole, unknown ones None."""
    return [None if value != value else int(value) if float(value).is_integer() else value for value in values.tolist()]
