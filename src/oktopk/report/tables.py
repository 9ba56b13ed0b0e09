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
from oktopk.telemetry.schema import SPLIT

TRAINING, EXCHANGE = "training", "exchange"
"""The two threads of a worker, whose times overlap."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, and the kind of its figures (see `shown`)."""

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
    """A headline: a figure, and what has to be said with it; `extra` are figures that stand in the note."""

    name: str
    value: Any
    kind: str
    note: str = ""


def tables_of(run: Run) -> list[Table]:
    """Return all tables of a run."""
    return [
        settings_table(run),
        phase_table(run),
        bytes_table(run),
        time_table(run),
        rank_table(run),
        message_table(run),
        region_table(run),
        epoch_table(run),
        event_table(run),
    ]


def settings_table(run: Run) -> Table:
    """Return what the run was."""
    names = (
        "recipe", "dnn", "dataset", "compressor", "density", "wire", "dense_steps", "max_epochs", "batch_size",
        "lr", "momentum", "sparse_momentum", "seed",
    )  # fmt: skip
    config = run.header.get("config", {})
    rows = [
        ("started", run.header.get("started")),
        ("workers", run.workers),
        ("parameters", run.header.get("numel")),
        ("sent sparsely", run.header.get("sparse_numel")),
        ("steps planned", run.header.get("steps")),
        *((name, config[name]) for name in names if name in config),
    ]
    known = [(name, _plain(value)) for name, value in rows]
    return Table("settings", "The run", "As it said when it started.", _columns(setting="text", value="text"), known)


def phase_table(run: Run) -> Table:
    """Return what dense and sparse steps came to."""
    summary = summary_of(run)
    columns = _columns(
        phase="text", steps="count", skipped="count", sparsity="number", ratio="times", sent="bytes",
    ) + _columns(**{"sent a step": "bytes", "of a dense step": "share", "seconds a step": "seconds"})  # fmt: skip
    columns.insert(5, Column("selected / k"))
    rows = []
    for phase, made in phases_of(run).items():
        kept = made & ~run.is_skipped
        sent = summary["sent_bytes_per_step"][phase]
        rows.append(
            [
                phase,
                int(made.sum()),
                int((made & run.is_skipped).sum()),
                mean(run.column("sparsity")[kept].tolist()),
                mean(run.column("compression_ratio")[kept].tolist()),
                quotient(total(run.column("selected")[kept]), total(run.column("wanted")[kept])),
                whole_total(run.column("sent_bytes")[made]),
                sent,
                quotient(sent, mean(run.dense_bytes[made].tolist())),
                summary["seconds_per_step"][phase],
            ]
        )
    about = "Sparsity and ratio are means over steps that delivered something; bytes and seconds are rank 0's."
    return Table("phases", "Dense and sparse steps", about, columns, rows, "Nominal figures (the literature's)")


def bytes_table(run: Run) -> Table:
    """Return what rank 0 sent, by phase of the algorithm, against dense and against the bound."""
    columns = _columns(part="text", sent="bytes", share="share") + _per_step("bytes")
    sent = whole_total(run.column("sent_bytes"))
    rows = [[name, whole_total(part), quotient(total(part), sent), *_means(run, part)]
            for name, part in run.bytes_by_part().items()]  # fmt: skip
    rows.append(["all that was sent", sent, None if sent is None else 1.0, *_means(run, run.column("sent_bytes"))])
    for name, part in (
        ("if every step were dense", run.dense_bytes),
        ("the bound 6k(P-1)/P, sparse steps", run.bound_bytes),
    ):
        rows.append([name, whole_total(part), quotient(total(part), sent), *_means(run, part)])
    about = (
        "Measured on rank 0. Headers are those of the blocks of pairs, and their sizes where they travel; side is what "
        "travels dense; agree is what is not gradient."
    )
    return Table("bytes", "Bytes sent, by phase of the algorithm", about, columns, rows, "Words on the wire")


def time_table(run: Run) -> Table:
    """Return where rank 0's time went, on the training thread and on the exchange's."""
    columns = [*_columns(thread="text", part="text", seconds="seconds"), Column("of a step", "share")]
    whole = total(run.step_seconds)
    parts = [(TRAINING, SPLIT[name], part) for name, part in run.split_of().items()]
    parts += [(EXCHANGE, name, part) for name, part in run.phases_of().items()]
    rows = [[thread, name, total(part), quotient(total(part), whole), *_means(run, part)]
            for thread, name, part in parts]  # fmt: skip
    about = "The exchange works while backward still computes: only the wait is in the step's time."
    return Table("time", "Time, by what it was spent on", about, columns + _per_step("seconds"), rows, "Phases")


def rank_table(run: Run) -> Table:
    """Return what each rank sent and where its time went."""
    columns = _columns(rank="text", sent="bytes", received="bytes", messages="count", selected="count")
    columns.append(Column("sent / mean", "times"))
    columns += [Column(name, "seconds") for name in SPLIT]
    columns += [*_columns(communication="seconds", computation="seconds"), Column("communicating", "share")]
    sent = [whole_total(run.column(f"ranks.{rank}.sent_bytes")) for rank in range(run.num_ranks)]
    rows = [_rank_row(run, rank, sent) for rank in range(run.num_ranks)]
    about = (
        f"Communication is {', '.join(COMMUNICATION[:-1])} and {COMMUNICATION[-1]}; computation is forward, backward, "
        "update and what the exchange computes. The two overlap; their sum is what the share is of."
    )
    return Table("ranks", "By rank", about, columns, rows, "A training run")


def _rank_row(run: Run, rank: int, sent: Sequence[int | None]) -> list[Any]:
    communication, computation = (total(part) for part in run.communication(rank))
    figures = {name: run.column(f"ranks.{rank}.{name}") for name in ("received_bytes", "messages", "selected")}
    return [
        f"rank {rank}",
        sent[rank],
        whole_total(figures["received_bytes"]),
        whole_total(figures["messages"]),
        whole_total(figures["selected"]),
        quotient(sent[rank], mean(sent)),
        *(total(part) for part in run.split_of(rank).values()),
        communication,
        computation,
        communication_share(communication, computation),
    ]


def communication_share(communication: float | None, computation: float | None) -> float | None:
    """Return communication / (communication + computation)."""
    if communication is None or computation is None:
        return None
    return quotient(communication, communication + computation)


def message_table(run: Run) -> Table:
    """Return how many messages of which size each collective sent."""
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
    rows = [[f"rank {owner}", count, quotient(count, total(np.array([n or 0.0 for n in owned]))),
             quotient(count, mean(owned))] for owner, count in enumerate(owned)]  # fmt: skip
    columns = [*_columns(owner="text", delivered="count", share="share"), Column("delivered / mean", "times")]
    about = "Elements of the result in the region that each rank owns, over all sparse steps: 1 is an even load."
    return Table("regions", "Load of the regions' owners", about, columns, rows)


def epoch_table(run: Run) -> Table:
    """Return what each epoch came to."""
    kinds = {"epoch": "count", "step": "count", "seconds": "seconds", "sent_bytes": "bytes", "lr": "number"}
    kinds |= dict.fromkeys(("train_loss", "val_loss", "wer", "cer"), "number")
    names = {"sent_bytes": "sent", "train_loss": "train loss", "val_loss": "val loss", "wer": "WER", "cer": "CER"}
    rows = [[epoch[name] for name in kinds] for epoch in run.epochs]
    columns = [Column(names.get(name, name), kind) for name, kind in kinds.items()]
    about = (
        "Epochs count from 0. Seconds and bytes are rank 0's since the start; seconds are those of training, without "
        "validation."
    )
    return Table("epochs", "Epochs", about, columns, rows, "A training run")


def event_table(run: Run) -> Table:
    """Return what happened, in order."""
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
    best = summary["best_wer"]
    skipped = f", {summary['skipped_steps']} skipped" if summary["skipped_steps"] else ""
    return [
        Card("train loss", summary["train_loss"], "number", "mean of the last epoch"),
        Card("validation loss", summary["val_loss"], "number", "mean over utterances"),
        Card("WER", summary["wer"], "number", "" if best is None else f"best {best:.4g}, {_after(summary)}"),
        Card("steps", summary["steps"], "count",
             f"{summary['dense_steps']:,} dense, {summary['sparse_steps']:,} sparse{skipped}"),
        Card(
            "sent, of dense",
            summary["sent_of_dense"],
            "share",
            f"{format_bytes(summary['sent_bytes'])} by rank 0; "
            f"dense {format_value(summary['dense_bytes'] or None, 'bytes')}",
        ),
        Card("compression ratio", summary["compression_ratio"], "times",
             none_sparse or f"sparsity {summary['sparsity'] or 0:.4g}, sparse steps"),
        Card("dense step", per_step["dense"], "seconds", "mean, on rank 0"),
        Card("sparse step", per_step["sparse"], "seconds", none_sparse or "mean, on rank 0"),
    ]  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a setting as JSON and people can have it."""
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, (int, str)) else str(value)


def _after(summary: dict[str, Any]) -> str:
    epochs = (summary["best_epoch"] or 0) + 1
    return f"after {epochs} epoch{'s' * (epochs > 1)}"


def _columns(**kinds: str) -> list[Column]:
    return [Column(name, kind) for name, kind in kinds.items()]


def _per_step(kind: str) -> list[Column]:
    return [Column("a dense step", kind), Column("a sparse step", kind)]


def _means(run: Run, values: Floats) -> list[float | None]:
    return [mean(values[made].tolist()) for made in phases_of(run).values()]


def _known(values: Floats | NDArray[np.bool_]) -> list[float | int | None]:
    """Return the numbers as they were recorded: whole ones whole, unknown ones None."""
    return [None if value != value else int(value) if float(value).is_integer() else value for value in values.tolist()]
