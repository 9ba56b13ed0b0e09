"""Reading `metrics.jsonl`, also while it is being written, or when it is cut off, empty or of another version."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oktopk.errors import SettingError

Record = dict[str, Any]
METRICS = "metrics.jsonl"


def metrics_of(run: Path, *, is_awaited: bool = False) -> Path:
    """Return the file with a run's records, given its folder or the file itself; an awaited file may not exist yet."""
    path = run / METRICS if run.is_dir() or not (run.suffix or run.is_file()) else run
    if not path.is_file() and not (is_awaited and path.parent.is_dir()):
        raise SettingError(f"wanted a run's folder or its {METRICS}, and {path} is not there: runs are in runs/NAME")
    return path


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records that are whole; a line that was cut off is left out. A file that is not there has none."""
    yield from MetricsReader(path).new() if path.exists() else ()


class MetricsReader:
    """Reads a file's records, and those that were added since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().parent.name if path.name == METRICS else path.stem  # of the run
        self._forget()

    def _forget(self) -> None:
        self.bad_lines: list[int] = []  # numbers of lines that are no records
        self.is_cut = False  # whether the file ends amid a line: the rest may still come
        self._num_lines, self._offset, self._inode = 0, 0, -1

    @property
    def silent_s(self) -> float:
        """Seconds since the file was last written."""
        return time.time() - self.path.stat().st_mtime

    def has_begun_again(self) -> bool:
        """Whether the file is another than the one that was read, as after a resume; then all is read again."""
        found = self.path.stat()
        anew = self._inode >= 0 and (found.st_ino != self._inode or found.st_size < self._offset)
        if anew:
            self._forget()
        return anew

    def new(self) -> Iterator[Record]:
        """Yield the records that have come since the last call."""
        self.is_cut, self._inode = False, self.path.stat().st_ino
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                record = _parse(line)
                if record is None and not line.endswith(b"\n"):
                    self.is_cut = True
                    return
                self._offset += len(line)
                self._num_lines += line.endswith(b"\n")
                if record is not None:
                    yield record
                elif line.strip():
                    self.bad_lines.append(self._num_lines)


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("kind"), str):
        return record
    return {"kind": "step", **record} if {"step", "phase", "numel"} <= record.keys() else None  # a `JsonlSink` wrote it
