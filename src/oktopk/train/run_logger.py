"""`RunLogger`: writes a run's records, on rank 0; every rank has its own log."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from oktopk.report.reader import Record, read_records
from oktopk.report.summary import summarise
from oktopk.train.records import MetricsFile, forget_from
from oktopk.train.rundir import RunDir, RunError, write_text
from oktopk.train.tensorboard import Board


class RunLogger:
    """Where everything that is measured goes: metrics.jsonl, TensorBoard and the logs of the workers."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run, self.rank = run, rank
        self._metrics: MetricsFile | None = None
        self._board: Board | None = None
        self._next_step = 0
        if rank == 0:
            self._open(purge_step=None)

    def _open(self, purge_step: int | None) -> None:
        self._metrics = MetricsFile(self.run.metrics)
        self._board = Board(self.run.tensorboard, purge_step)

    def go_on_from(self, step: int, epoch: int) -> None:
        """Forget the steps from `step` and the epochs from `epoch`, which a resumed run is about to do again."""
        self._next_step = step
        if self._metrics is not None:
            self.close()
            forget_from(self.run.metrics, step, epoch)
            self._open(purge_step=step)

    def start(self, **values: Any) -> None:
        """Write what the run is, and forget a start that was killed before its first checkpoint."""
        if self._metrics is not None:
            self.close()
            self.run.metrics.unlink()
            self._open(purge_step=0)
        self._write("run", **values)

    def step(self, **values: Any) -> Record:
        """Write a step, and return its record."""
        record = self._write("step", **values)
        self._next_step = record["step"] + 1
        if self._board is not None:
            self._board.step(record)
        return record

    def epoch(self, **values: Any) -> Record:
        """Write an epoch, and return its record."""
        record = self._write("epoch", **values)
        if self._board is not None:
            self._board.epoch(record)
        return record

    def event(self, event: str, step: int, message: str) -> None:
        """Write that something happened."""
        self._write("event", event=event, step=step, message=message)
        self.log(f"{event}: {message}")

    def failed(self, why: str) -> None:
        """Write, in the log and as the last record, what ended the run; if not even that can be written, go on."""
        self.log(why)
        with suppress(RunError, ValueError):  # a full disk, or a file that was closed: the error itself is raised
            self._write("event", event="failed", step=self._next_step, message=why)

    def log(self, line: str) -> None:
        """Write a line into this worker's log."""
        self.run.log(self.rank, line)

    def finish(self) -> Record:
        """Write the summary of all that was written; return it."""
        self.close()
        summary = summarise(read_records(self.run.metrics))
        if self.rank == 0:
            write_text(self.run.summary, json.dumps(summary, indent=1, allow_nan=False))
        return summary

    def close(self) -> None:
        """Take no more."""
        if self._metrics is not None:
            self._metrics.close()
        if self._board is not None:
            self._board.close()

    def _write(self, kind: str, **values: Any) -> Record:
        if self._metrics is not None:
            return self._metrics.write(kind, **values)
        return {"kind": kind, **values}
