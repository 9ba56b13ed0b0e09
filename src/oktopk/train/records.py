"""`metrics.jsonl`: the records of a run, and the figures that follow from them. There is no other definition of any.

Every line is an object with a `kind`:

    run      at the start: settings, workers, plan
    step     a step: the fields of `StepRecord` as rank 0 measured them, and
             epoch, loss (mean over workers), lr, grad_norm, residual_norm, utterances (of all workers),
             split (seconds of the step on rank 0: data, compute, wait, update) and ranks (the same figures by worker)
    epoch    after an epoch: train_loss, and val_loss, wer, cer if it was validated
    event    something that happened: event, step, message
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from oktopk.telemetry import PHASES
from oktopk.train.rundir import write_text, writing

Record = dict[str, Any]
VERSION = 1
SPLIT = ("data", "compute", "wait", "update")
RANK_FIGURES = (
    "loss", "utterances", "characters", "sent_bytes", "received_bytes", "selected", *SPLIT, "messages", "residual_norm",
)  # fmt: skip


class MetricsFile:
    """Appends records; each is on the disk's queue before the next step starts, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> Record:
        """Append a record and return it; what is not finite is refused: a figure is known or it is null."""
        record = {"kind": kind, **values}
        with writing(self._path):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        return record

    def close(self) -> None:
        """Take no more; what the disk had no room for was told by `write`."""
        with suppress(OSError):
            self._file.close()


def by_rank_of(row: Sequence[float]) -> Record:
    """Return what a worker measured in a step, as `ranks` has it, of the numbers in the order of `RANK_FIGURES`."""
    names = ("seconds", "sent_by_phase")
    count, phases = len(RANK_FIGURES), len(PHASES)
    assert len(row) == count + len(names) * phases
    figures: Record = {name: finite(value) for name, value in zip(RANK_FIGURES, row, strict=False)}
    for i, name in enumerate(names):
        part = row[count + i * phases : count + (i + 1) * phases]
        figures[name] = {phase: value for phase, value in zip(PHASES, part, strict=True) if value}
    return figures


def forget_from(path: Path, step: int, epoch: int) -> None:
    """Drop the records of steps and epochs that a resumed run will make again, and a last line that was cut off."""
    kept = [record for record in read_records(path) if not _is_after(record, step, epoch)]
    write_text(path, "\n".join(json.dumps(record, allow_nan=False) for record in kept))


def _is_after(record: Record, step: int, epoch: int) -> bool:
    if record["kind"] == "epoch":
        return bool(record["epoch"] >= epoch)
    return "step" in record and bool(record["step"] >= step)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records that are whole; a line that was cut off is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut off by a kill
            if isinstance(record, dict) and "kind" in record:
                yield record


def finite(value: float | None) -> float | None:
    """Return the value, or None where there is none: nobody prints NaN as a result."""
    return value if value is not None and math.isfinite(value) else None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None, never NaN, if nothing is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def summarise(records: Iterable[Record]) -> Record:
    """Return the figures of a run; None where there is nothing to tell."""
    records = list(records)
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    phases = {phase: [step for step in steps if step["phase"] == phase] for phase in ("dense", "sparse")}
    validated = [epoch for epoch in epochs if epoch.get("wer") is not None]
    best = min(validated, key=lambda epoch: float(epoch["wer"]), default=None)
    last = validated[-1] if validated else {}
    run = next((record for record in records if record["kind"] == "run"), {})
    sent, dense = sum(step["sent_bytes"] for step in steps), int(run.get("dense_bytes", 0)) * len(steps)
    return {
        "steps": len(steps),
        "dense_steps": len(phases["dense"]),
        "sparse_steps": len(phases["sparse"]),
        "skipped_steps": sum(bool(step["skipped"]) for step in steps),
        "epochs": len(epochs),
        "first_loss": epochs[0]["train_loss"] if epochs else None,
        "train_loss": epochs[-1]["train_loss"] if epochs else None,
        "val_loss": last.get("val_loss"),
        "wer": last.get("wer"),
        "cer": last.get("cer"),
        "best_wer": best["wer"] if best else None,
        "best_epoch": best["epoch"] if best else None,
        "sparsity": mean(step["sparsity"] for step in phases["sparse"] if not step["skipped"]),
        "compression_ratio": mean(step["compression_ratio"] for step in phases["sparse"] if not step["skipped"]),
        "sent_bytes": sent,
        "dense_bytes": dense,
        "sent_of_dense": sent / dense if dense else None,
        "sent_bytes_per_step": {phase: mean(step["sent_bytes"] for step in made) for phase, made in phases.items()},
        "seconds": {name: math.fsum(step["split"][name] for step in steps) for name in SPLIT},
        "seconds_per_step": {
            phase: mean(math.fsum(step["split"].values()) for step in made) for phase, made in phases.items()
        },
    }
