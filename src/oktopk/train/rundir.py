"""The folder of a run, as docs/train.md lists it, and the writer of its records."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from oktopk import __version__
from oktopk.errors import OktopkError, SettingError
from oktopk.telemetry.figures import summary_of
from oktopk.telemetry.reader import Record, read_records
from oktopk.telemetry.run import Run
from oktopk.telemetry.schema import AnyRecord, TrainStep, to_json
from oktopk.telemetry.sinks import JsonlSink, TensorBoardSink
from oktopk.train.config import Config, make_config


class RunError(OktopkError, ValueError):
    """A folder that cannot be written, or is not that of a run."""


class RunDir:
    """A run's folder and the paths in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"

    @staticmethod
    def create(runs: Path, name: str, config: Config) -> RunDir:
        """Make the folder `runs/name`; if it exists, `runs/name-2` and so on."""
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        run = RunDir(next(path for path in map(runs.joinpath, names) if not path.exists()))
        try:
            for folder in (run.logs, run.checkpoints):
                folder.mkdir(parents=True)
        except OSError as error:
            message = f"cannot write the run's folder {run.path}: {error.strerror}; --runs names another place"
            raise RunError(message) from error
        run.write_config(config)
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        versions = {"oktopk": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        about = {**versions, "platform": platform.platform(), "gpu": gpu}
        write_text(run.path / "versions.json", json.dumps(about, indent=1) + "\n")
        return run

    @staticmethod
    def open(path: str | Path) -> RunDir:
        """Return an existing run's folder."""
        run = RunDir(path)
        if not run.config.is_file():
            raise RunError(f"{path} is not the folder of a run: it has no config.json")
        return run

    def load_config(self) -> Config:
        """Return the settings of the run."""
        try:
            values = json.loads(self.config.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("wanted an object with a value for each setting")
            return make_config(values)
        except ValueError as error:  # of JSON, or of a setting
            raise SettingError(f"{self.config} is no config of a run: {error}") from error

    def write_config(self, config: Config) -> None:
        """Write the settings with which the run begins or goes on, one a line."""
        write_text(self.config, json.dumps(vars(config), indent=1, allow_nan=False) + "\n")


def check_creatable(path: Path) -> None:
    """Raise the error that `RunDir.create` would, without a trace in the file system."""
    folder = next(each for each in path.absolute().parents if each.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".oktopk-", dir=folder)).rmdir()  # the only sure test: root may write anywhere
    except OSError as error:
        message = f"cannot write the run's folder {path}: {error.strerror}; --runs names another place"
        raise RunError(message) from error


class RunLogger:
    """Writes metrics.jsonl and TensorBoard's scalars on rank 0 through the library's sinks, and every rank's log.

    A record is flushed before the next step, so that a kill loses none. A sink that fails is an error here.
    """

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run, self.rank = run, rank
        self._sinks: dict[Path, JsonlSink | TensorBoardSink] = {}
        self._next_step = 0
        self._open(purge_step=None)

    def _open(self, purge_step: int | None) -> None:
        if self.rank != 0:
            return
        with writing(self.run.metrics):
            self._sinks[self.run.metrics] = JsonlSink(self.run.metrics)
        with writing(self.run.tensorboard):
            self._sinks[self.run.tensorboard] = TensorBoardSink(self.run.tensorboard, prefix="", purge_step=purge_step)

    def start(self, **values: Any) -> None:
        """Write the settings of the run, and forget a start that was killed before its first checkpoint."""
        self.go_on_from(0, 0)
        self.write({"kind": "run", **values})

    def go_on_from(self, step: int, epoch: int) -> None:
        """Forget the steps from `step` and the epochs from `epoch`, which a resumed run is about to make again."""
        self._next_step = step
        if self.rank == 0:
            self.close()
            forget_from(self.run.metrics, step, epoch)
            self._open(purge_step=step)

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

    def ended(self, event: str, why: str) -> None:
        """Write why the run ended early into the log and as the last record, if that can still be written."""
        self.log(why)
        with suppress(RunError, ValueError):  # a full disk, or a file that was closed: the error itself is raised
            self.write({"kind": "event", "event": event, "step": self._next_step, "message": why})

    def log(self, line: str) -> None:
        """Append a line to this worker's log."""
        path = self.run.logs / f"rank{self.rank}.log"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def finish(self) -> Record:
        """Write the summary of all records; return it."""
        self.close()
        summary = summary_of(Run(read_records(self.run.metrics)))
        if self.rank == 0:
            write_text(self.run.path / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
        return summary

    def close(self) -> None:
        """Take no more; a full disk was reported by the write that met it."""
        for sink in self._sinks.values():
            with suppress(OSError):
                sink.close()


def forget_from(path: Path, step: int, epoch: int) -> None:
    """Drop the records that a run will make again from `step` on, amid `epoch`, and a last line that was cut off."""

    kept = [record for record in read_records(path) if is_before(record, step, epoch)]
    write_text(path, "".join(f"{to_json(record)}\n" for record in kept))


def is_before(record: Record, step: int, epoch: int) -> bool:
    """Whether a record is from before a step, which is amid an epoch."""
    if record["kind"] == "epoch":
        return bool(record["epoch"] < epoch)
    return bool(record.get("step", 0) < step)  # the run's own record stays unless the run begins again


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old text or the new."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in the error: the system does not say for which one the disk had no room."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; make room, or choose another place: --runs") from error
