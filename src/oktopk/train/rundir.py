"""`RunDir`: the folder of a run.

runs/NAME/
  config.json      every setting
  versions.json    versions of oktopk, torch, Python and the system
  metrics.jsonl    one record a line: the run, every step, every epoch, every event
  summary.json     the summary at the end
  logs/            a log of each worker
  tensorboard/     the same scalars
  checkpoints/     step-N/, and the files `last` and `best` that name one
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from oktopk import __version__
from oktopk.errors import OktopkError
from oktopk.train.config import Config


class RunError(OktopkError, ValueError):
    """A folder that cannot be written, or is not that of a run."""


class RunDir:
    """A run's folder and the paths in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"

    @staticmethod
    def create(runs: Path, name: str, config: Config) -> RunDir:
        """Make the folder `runs/name`; if it exists, `runs/name-2` and so on."""
        run = RunDir(_unused(runs, name))
        try:
            for folder in (run.logs, run.checkpoints):
                folder.mkdir(parents=True)
            write_text(run.config, config.to_json())
            write_text(run.path / "versions.json", json.dumps(_versions(), indent=1))
        except OSError as error:
            raise RunError(
                f"cannot write the run's folder {run.path}: {error.strerror}; --runs names another place"
            ) from error
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
        return Config.from_json(self.config.read_text(encoding="utf-8"), self.config)

    def change_config(self, config: Config) -> None:
        """Write the settings with which the run goes on."""
        write_text(self.config, config.to_json())

    def log(self, rank: int, line: str) -> None:
        """Append a line to a worker's log."""
        path = self.logs / f"rank{rank}.log"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old text or the new."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(text + "\n")
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


def _unused(runs: Path, name: str) -> Path:
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for path in map(runs.joinpath, names) if not path.exists())


def _versions() -> dict[str, Any]:
    return {
        "oktopk": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
