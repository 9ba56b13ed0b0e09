"""The folder of a corpus: `train/wav/ID.wav`, `train/txt/ID.txt`, the same for `val`, and two manifests.

It is made in a hidden folder and moved to its place when it is whole. Manifests are removed first and written last, so
that every file that a manifest names exists.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oktopk.train.data.audio import Samples, write_wav
from oktopk.train.data.manifest import write_manifest

PARTS = ("train", "val")
MANIFESTS = TRAIN_MANIFEST, VAL_MANIFEST = ("an4_train_manifest.csv", "an4_val_manifest.csv")
STAMP = "synthetic.json"  # the settings of synthetic speech; recordings have none
ENTRIES = (STAMP, *MANIFESTS, *PARTS)


@contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """Give an empty folder to fill; move its entries to `out` if the block ends well, else leave no trace of it.

    Of the entries of `out`, only another corpus and entries of the same names go.
    """
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    # Inside `out`, not beside it: `out` may be a mount, and a rename cannot leave its file system.
    scratch = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()  # not mkdtemp's own folder: that one is closed to other users
        yield fresh
        _move(fresh, out, scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if is_new and not any(out.iterdir()):
            out.rmdir()


def _move(fresh: Path, out: Path, old: Path) -> None:
    old.mkdir()
    names = sorted((path.name for path in fresh.iterdir()), key=lambda name: name in MANIFESTS)
    for name in dict.fromkeys((*ENTRIES, *names)):
        if (out / name).exists():
            (out / name).rename(old / name)
    for name in names:
        (fresh / name).rename(out / name)


def add_utterance(folder: Path, part: str, name: str, samples: Samples, text: str) -> None:
    """Write one recording and its transcription."""
    wav, txt = _pair(folder, part, name)
    for path in (wav, txt):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_wav(wav, samples)
    txt.write_text(text + "\n", encoding="utf-8")


def write_manifests(folder: Path, names: dict[str, list[str]]) -> None:
    """Write the manifests of the utterances, `names` by part."""
    for part, manifest in zip(PARTS, MANIFESTS, strict=True):
        write_manifest(folder / manifest, [_pair(folder, part, name) for name in names[part]])


def _pair(folder: Path, part: str, name: str) -> tuple[Path, Path]:
    return folder / part / "wav" / f"{name}.wav", folder / part / "txt" / f"{name}.txt"


def held(out: Path) -> list[str]:
    """Return the entries of a corpus that `out` has already."""
    return [name for name in ENTRIES if (out / name).exists()]
