"""The folder of a corpus, and its manifests: the lists of utterances.

The folder has `train/wav/ID.wav`, `train/txt/ID.txt`, the same for `val`, and two manifests. A line of a manifest is
`wav,txt`, two paths relative to the manifest's folder, or absolute. Relative paths let a folder be moved.
"""

import csv
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.console import Console
from rich.progress import track

from oktopk.train.data.audio import RATE_HZ, Samples, num_samples, read_pcm, write_wav
from oktopk.train.data.errors import DataError
from oktopk.train.data.features import HOP_SAMPLES, output_frames
from oktopk.train.data.labels import LabelError, ctc_frames, encode

PARTS = ("train", "val")
MANIFESTS = TRAIN_MANIFEST, VAL_MANIFEST = ("an4_train_manifest.csv", "an4_val_manifest.csv")
STAMP = "synthetic.json"  # the settings of synthetic speech; recordings have none
ENTRIES = (STAMP, *MANIFESTS, *PARTS)

T = TypeVar("T")


@dataclass(frozen=True)
class Utterance:
    """A recording and its transcription."""

    wav: Path
    text: str
    duration_s: float


def read_manifest(path: str | Path) -> list[Utterance]:
    """Return the utterances from short to long, or raise a `DataError` that names the first file with a fault.

    Every fault that would stop the training in the middle of an epoch is found here, from the recordings' headers.
    """
    found = []
    for row in _rows(Path(path)):
        samples, text = num_samples(row.wav), _text(row.txt)
        _check_length(row.wav, samples, text)
        found.append(Utterance(row.wav, text, samples / RATE_HZ))
    return sorted(found, key=lambda utterance: utterance.duration_s)


def check_manifest(path: str | Path) -> list[tuple[int, DataError]]:
    """Return all faults with their lines, 0 for the manifest itself; read the recordings to their ends."""
    try:
        rows = _rows(Path(path))
    except DataError as error:
        return [(0, error)]
    return [(row.line, error) for row in rows for error in _errors(row)]


class _Row(NamedTuple):
    line: int
    wav: Path
    txt: Path


def _rows(path: Path) -> list[_Row]:
    if not path.is_file():
        raise DataError("missing", path, "there is no such manifest; make one with: oktopk data an4, or synth-an4")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets put a mark in front
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [column.strip() for column in columns]) for columns in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError("bad manifest", path, f"is no text of lines wav,txt ({error})") from None
    rows = []
    for line, columns in lines:
        if columns in ([], [""]):
            continue
        if len(columns) != 2 or not all(columns):
            raise DataError("bad manifest", path, f"line {line} is {','.join(columns)!r}, wanted: wav,txt")
        rows.append(_Row(line, path.parent / columns[0], path.parent / columns[1]))
    if not rows:
        raise DataError("empty", path, "the manifest has no lines; make it again with: oktopk data an4, or synth-an4")
    return rows


def _errors(row: _Row) -> Iterator[DataError]:
    """Yield the faults of the recording, of its text, and, if both are good, of the two together."""
    samples = None
    try:
        samples = len(read_pcm(row.wav))
    except DataError as error:
        yield error
    try:
        text = _text(row.txt)
        if samples is not None:
            _check_length(row.wav, samples, text)
    except DataError as error:
        yield error


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
    needed, frames = ctc_frames(encode(text)), output_frames(1 + samples // HOP_SAMPLES)
    if frames < needed:
        found = f"{samples / RATE_HZ:.2f} s give {frames} frames and {text!r} needs {needed}"
        raise DataError("too short", wav, f"{found}; leave the utterance out of the manifest, or correct its text")


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Give an empty folder to fill; if the block ends well, move its entries to `out` with their manifests.

    Else leave no trace of it. Of the entries of `out`, only another corpus and entries of the same names go.
    """
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    # Inside `out`, not beside it: `out` may be a mount, and a rename cannot leave its file system.
    scratch = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()  # not mkdtemp's own folder: that one is closed to other users
        yield fresh
        for part, manifest in zip(PARTS, MANIFESTS, strict=True):
            wavs = (fresh / part / "wav").iterdir()
            write_manifest(fresh / manifest, [(wav, fresh / part / "txt" / f"{wav.stem}.txt") for wav in wavs])
        _move(fresh, out, scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_new and not any(out.iterdir()):
            out.rmdir()


def _move(fresh: Path, out: Path, old: Path) -> None:
    """Remove manifests first and write them last, so that every file that a manifest names exists."""
    old.mkdir()
    names = sorted((path.name for path in fresh.iterdir()), key=lambda name: name in MANIFESTS)
    for name in dict.fromkeys((*ENTRIES, *names)):
        if (out / name).exists():
            (out / name).rename(old / name)
    for name in names:
        (fresh / name).rename(out / name)


def add_utterance(folder: Path, part: str, name: str, samples: Samples, text: str) -> None:
    """Write one recording and its transcription."""
    wav, txt = folder / part / "wav" / f"{name}.wav", folder / part / "txt" / f"{name}.txt"
    for path in (wav, txt):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_wav(wav, samples)
    txt.write_text(text + "\n", encoding="utf-8")


def write_manifest(path: Path, pairs: Iterable[tuple[Path, Path]]) -> None:
    """Write `(wav, txt)` pairs from short to long, relative to the manifest's folder."""
    names = [[each.relative_to(path.parent).as_posix() for each in pair] for pair in pairs]
    rows = sorted((num_samples(path.parent / wav), wav, txt) for wav, txt in names)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(row[1:] for row in rows)


def held(out: Path) -> list[str]:
    """Return the entries of a corpus that `out` has already."""
    return [name for name in ENTRIES if (out / name).exists()]


def tracked(items: Iterable[T], description: str, total: int | None = None) -> Iterable[T]:
    """Return the items, counted by a bar on stderr as they are used, where that is a terminal."""
    console = Console(stderr=True)
    return track(items, description, total, console=console, disable=not console.is_terminal, transient=True)
