"""`RunLogger`: writes the records of a run on rank 0, and the log of every rank.

Every line of metrics.jsonl is an object with a `kind`:

    run      at the start: settings, workers, plan
    step     a `TrainStep`
    epoch    an `EpochRecord`
    event    something that happened: event, step, message
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oktopk.telemetry.figures import summarise
from oktopk.telemetry.reader import Record, read_records
from oktopk.telemetry.schema import AnyRecord, TrainStep, to_json
from oktopk.telemetry.sinks import JsonlSink, TensorBoardSink
from oktopk.train.rundir import RunDir, RunError, write_text, writing


class RunLogger:
    """Writes metrics.jsonl and TensorBoard's scalars through the library's sinks, and a log for each worker.

    A record is flushed before the next step, so that a kill loses none. A sink that fails is an error here.
    """

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run, self.rank = run, rank
        self._sinks: dict[Path, JsonlSink | TensorBoardSink] = {}
        self._next_step = 0
        if rank == 0:
            self._open(purge_step=None)

    def _open(self, purge_step: int | None) -> None:
        with writing(self.run.metrics):
            self._sinks[self.run.metrics] = JsonlSink(self.run.metrics)
        with writing(self.run.tensorboard):
            self._sinks[self.run.tensorboard] = TensorBoardSink(self.run.tensorboard, prefix="", purge_step=purge_step)

    def go_on_from(self, step: int, epoch: int) -> None:
        """Forget the steps from `step` and the epochs from `epoch`, which a resumed run is about to make again."""
        self._next_step = step
        if self.rank == 0:
            self.close()
            forget_from(self.run.metrics, step, epoch)
            self._open(purge_step=step)

    def start(self, **values: Any) -> None:
        """Write the settings of the run, and forget a start that was killed before its first checkpoint."""
        if self.rank == 0:
            self.close()
            self.run.metrics.unlink()
            self._open(purge_step=0)
        self.write({"kind": "run", **values})

    def write(self, record: AnyRecord) -> None:
        """Write a record."""
        for path, sink in self._sinks.items():
            with writing(path):
                sink.write(record)
        if isinstance(record, TrainStep):
            self._next_step = record.step + 1

    def event(self, event: str, step: int, message: str) -> None:
        """Write that something happened."""
        self.write({"kind": "event", "event": event, "step": step, "message": message})
        self.log(f"{event}: {message}")

    def failed(self, why: str) -> None:
        """Write the error that ended the run into the log and as the last record, if that can still be written."""
        self.log(why)
        with suppress(RunError, ValueError):  # a full disk, or a file that was closed: the error itself is raised
            self.write({"kind": "event", "event": "failed", "step": self._next_step, "message": why})

    def log(self, line: str) -> None:
        """Write a line into this worker's log."""
        self.run.log(self.rank, line)

    def finish(self) -> Record:
        """Write the summary of all records; return it."""
        self.close()
        summary = summarise(read_records(self.run.metrics))
        if self.rank == 0:
            write_text(self.run.summary, json.dumps(summary, indent=1, allow_nan=False))
        return summary

    def close(self) -> None:
        """Take no more; a full disk was reported by the write that met it."""
        for sink in self._sinks.values():
            with suppress(OSError):
                sink.close()


def forget_from(path: Path, step: int, epoch: int) -> None:
    """Drop the records of steps and epochs that a resumed run will make again, and a last line that was cut off."""
    write_text(path, "\n".join(to_json(record) for record in read_records(path) if not _is_after(record, step, epoch)))


def _is_after(record: Mapping[str, Any], step: int, epoch: int) -> bool:
    if record["kind"] == "epoch":
        return bool(record["epoch"] >= epoch)
    return "step" in record and bool(record["step"] >= step)
