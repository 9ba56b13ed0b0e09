"""Manifests: the list of utterances. A line is `wav,txt`, two paths relative to the manifest's folder, or absolute.

Relative paths let a folder be moved. Every fault that would stop the training later, in a worker and in the middle of
an epoch, is found here and named.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oktopk.train.data.audio import RATE_HZ, num_samples, read_audio
from oktopk.train.data.errors import DataError, Kind
from oktopk.train.data.features import HOP_SAMPLES
from oktopk.train.data.labels import LabelError, ctc_frames, encode

TIME_STRIDE = 2  # the net's first convolution halves the frames


@dataclass(frozen=True)
class Utterance:
    """A recording and its transcription."""

    wav: Path
    text: str
    duration_s: float


@dataclass(frozen=True)
class Problem:
    """A fault of one file; `line` is that of the manifest, 0 for the manifest itself."""

    kind: Kind
    path: Path
    line: int
    message: str


def read_manifest(path: str | Path) -> list[Utterance]:
    """Return the utterances from short to long, or raise a `DataError` that names the first file with a fault.

    Reads the headers of the recordings only.
    """
    found = []
    for row in _rows(Path(path)):
        samples, text = _num_samples(row, num_samples), _text(row.txt)
        _check_length(row.wav, samples, text)
        found.append(Utterance(row.wav, text, samples / RATE_HZ))
    return sorted(found, key=lambda utterance: utterance.duration_s)


def check_manifest(path: str | Path) -> list[Problem]:
    """Return all faults of a manifest and its files; reads the recordings to their ends."""
    try:
        rows = list(_rows(Path(path)))
    except DataError as error:
        return [Problem(error.kind, error.path, 0, error.message)]
    return [Problem(error.kind, error.path, row.line, error.message) for row in rows for error in _errors(row)]


def write_manifest(path: str | Path, pairs: Iterable[tuple[Path, Path]]) -> None:
    """Write `(wav, txt)` pairs from short to long, relative to the manifest's folder, all at once or not at all."""
    path = Path(path)
    rows = sorted((num_samples(wav), *(_relative(each, path.parent) for each in (wav, txt))) for wav, txt in pairs)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(row[1:] for row in rows)
    unfinished.replace(path)


def output_frames(num_samples: int) -> int:
    """Return the number of frames that the net gives for a recording.

    >>> output_frames(16_000)
    51
    """
    return -(-(1 + num_samples // HOP_SAMPLES) // TIME_STRIDE)


@dataclass(frozen=True)
class _Row:
    line: int
    wav: Path
    txt: Path


def _rows(path: Path) -> Iterator[_Row]:
    if not path.is_file():
        raise DataError("missing", path, "there is no such manifest; make one with: oktopk data an4, or synth-an4")
    line = 0
    for line, columns in _columns(path):
        if len(columns) != 2 or not all(columns):
            raise DataError("bad manifest", path, f"line {line} is {','.join(columns)!r}, wanted: wav,txt")
        yield _Row(line, path.parent / columns[0], path.parent / columns[1])
    if not line:
        raise DataError("empty", path, "the manifest has no lines; make it again with: oktopk data an4, or synth-an4")


def _columns(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines that are not blank; `utf-8-sig` because spreadsheets put a mark in front."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            stripped = ((rows.line_num, [c.strip() for c in columns]) for columns in rows)
            yield from ((line, columns) for line, columns in stripped if columns not in ([], [""]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError("bad manifest", path, f"is no text of lines wav,txt ({error})") from None


def _errors(row: _Row) -> Iterator[DataError]:
    """Yield the faults of the recording, of its text, and, if both are good, of the two together."""
    samples = None
    try:
        samples = _num_samples(row, lambda path: len(read_audio(path)))
    except DataError as error:
        yield error
    try:
        text = _text(row.txt)
        if samples is not None:
            _check_length(row.wav, samples, text)
    except DataError as error:
        yield error


def _num_samples(row: _Row, samples_of: Callable[[Path], int]) -> int:
    if not row.wav.is_file():
        raise DataError(
            "missing",
            row.wav,
            f"there is no such file, wanted in line {row.line} of the manifest. Paths are relative to the manifest's "
            "folder; those of another machine are put right by: oktopk data an4 FOLDER --out DIR",
        )
    return samples_of(row.wav)


def _text(path: Path) -> str:
    if not path.is_file():
        raise DataError("missing", path, "there is no such transcription")
    try:
        text = path.read_text(encoding="utf-8").strip()
        encode(text)
    except (LabelError, UnicodeDecodeError) as error:
        raise DataError("bad text", path, str(error)) from None
    if not text:
        raise DataError("bad text", path, "the transcription is empty; leave the utterance out of the manifest")
    return text


def _check_length(wav: Path, samples: int, text: str) -> None:
    needed, frames = ctc_frames(encode(text)), output_frames(samples)
    if frames < needed:
        raise DataError(
            "too short",
            wav,
            f"{samples / RATE_HZ:.2f} s give {frames} frames and {text!r} needs {needed}: the recording or its text "
            "is of another utterance; leave it out of the manifest",
        )


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()
