"""`metrics.jsonl`: the records of a run. What follows from them, `oktopk.report` says, and nobody else.

Every line is an object with a `kind`:

    run      at the start: settings, workers, plan
    step     a step: the fields of `StepRecord` as rank 0 measured them, and
             epoch, loss (mean over workers), lr, momentum, grad_norm, residual_norm, utterances (of all workers),
             split (seconds of the step on rank 0: data, compute, wait, update) and ranks (the same figures by worker)
    epoch    after an epoch: train_loss, and val_loss, wer, cer if it was validated
    event    something that happened: event, step, message
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from oktopk.report.reader import Record, read_records
from oktopk.report.run import SPLIT
from oktopk.report.summary import finite
from oktopk.telemetry import PHASES
from oktopk.train.rundir import write_text, writing

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
