"""Errors of the data part, besides the `LabelError` of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from oktopk.errors import OktopkError

Kind = Literal[
    "missing", "empty", "unreadable", "wrong rate", "stereo", "bad text", "too short", "bad manifest", "bad corpus"
]


class DataError(OktopkError, ValueError):
    """Data that cannot be trained on: the `kind` of fault, the `path` of the file, and a message with the remedy."""

    def __init__(self, kind: Kind, path: str | Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.kind, self.path, self.message = kind, Path(path), message

    def __reduce__(self) -> tuple[type[DataError], tuple[Kind, Path, str]]:
        return DataError, (self.kind, self.path, self.message)


class SpeechError(OktopkError, RuntimeError):
    """The speech engine is not installed, or failed."""


def shortened(text: str, most: int = 80) -> str:
    """Return a text of the data for a message: quoted, on one line, and cut after `most` characters."""
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text)} characters)"
