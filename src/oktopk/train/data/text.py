"""Text to learn from, as bytes: two files to train on and to validate with, and the windows of a run in them.

The windows of a step are a function of (seed, epoch, step, rank), so that a resumed run sees those of one that never
stopped. A pass over the text uses every window once over all ranks, in an order of its own.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oktopk.errors import SettingError, within
from oktopk.train.data.errors import DataError
from oktopk.train.data.loader import seeded

FILES = TRAIN, VAL = ("text_train.bin", "text_val.bin")
VAL_PART = 0.03
"""Part of the bytes to validate with, in whole files."""
ORDER_SEED = 0
UNUSUAL = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Folders of the standard library that are not there in every installation, or are not its own."""
_OFFSET, _ORDER = 3, 4  # purposes of a generator: the same (seed, pass) must not give both the same numbers


def make_text(files: Sequence[Path], out: Path, force: bool = False) -> tuple[int, int]:
    """Write the bytes of all files, shuffled, into `out`; return how many to train on and to validate with.

    Files with a zero byte are no text and are left out, and so are empty ones.
    """
    there = [name for name in FILES if (out / name).exists()]
    if there and not force:
        raise DataError("bad corpus", out / there[0], "there is text already; --force replaces it")
    order = np.random.default_rng(ORDER_SEED).permutation(len(files))
    texts = [text for text in (_read(files[i]) for i in order) if text and b"\0" not in text]
    if not texts:
        raise DataError("empty", out, f"none of the {len(files)} files is a text: name others")
    ends = np.cumsum([len(text) for text in texts])
    cut = int((1 - VAL_PART) * ends[-1])
    if len(texts) > 1:  # at the end of a file, with one or more on either side
        cut = int(ends[min(int(np.searchsorted(ends, cut)), len(texts) - 2)])
    whole = b"".join(texts)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in zip(FILES, (whole[:cut], whole[cut:]), strict=True):
        unfinished = out / f".{name}.{os.getpid()}"
        unfinished.write_bytes(part)
        unfinished.replace(out / name)
    return cut, len(whole) - cut


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError("unreadable", path, f"cannot be read: {error.strerror}") from None


def files_of(sources: Sequence[Path]) -> list[Path]:
    """Return the files, and those below the folders, in an order that is the same wherever the folders lie."""
    files: list[Path] = []
    for source in sources:
        if not source.exists():
            raise DataError("missing", source, "there is no such file or folder")
        below = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
        files += sorted(below, key=lambda path: path.relative_to(source).as_posix())
    return files


def standard_library() -> list[Path]:
    """Return the sources of this Python's standard library (PSF licence), about 11 MB that are on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path for path in files_of([root])
        if path.suffix == ".py" and not UNUSUAL.intersection(path.relative_to(root).parts)
    ]  # fmt: skip


def standard_library_name() -> str:
    """Return a name for that text, of Python's version."""
    return f"python-{platform.python_version()}"


@dataclass(frozen=True)
class TextBatch:
    """Some windows: bytes [B, context + 1], each to be guessed from those before it."""

    texts: Tensor

    @property
    def utterances(self) -> int:
        """The number of windows."""
        return self.texts.shape[0]

    @property
    def characters(self) -> int:
        """The number of bytes to guess."""
        return self.texts.shape[0] * (self.texts.shape[1] - 1)

    def to(self, device: torch.device | str) -> TextBatch:
        """Return the batch on a device."""
        return TextBatch(self.texts.to(device))


class Windows:
    """The windows of one rank, in batches.

    For training an epoch is the next `samples` windows of an endless sequence of passes over the text. Each pass has
    an offset and an order of its own. For `evaluation` it is `samples` windows evenly over the text, or all.
    """

    def __init__(
        self,
        content: Tensor,
        *,
        context: int,
        samples: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        evaluation: bool = False,
    ) -> None:
        self.content, self.context, self.batch_size = content, context, batch_size
        self.rank, self.world_size, self.seed, self.evaluation = rank, world_size, seed, evaluation
        # A pass begins at an offset below the context, and the last byte is only guessed.
        self.windows = max(0, (len(content) - (1 if evaluation else context)) // context)
        self.samples = min(samples, self.windows) if evaluation else samples
        each = 1 if evaluation else batch_size
        if min(self.windows, self.samples) < each * world_size:
            part = "the validation" if evaluation else "a step"
            raise SettingError(
                f"{part} takes {each} windows of {context} bytes on each of {world_size} workers, and an epoch has "
                f"{self.samples:,} of the text's {self.windows:,}: use a smaller batch size, fewer workers or more text"
            )

    def __len__(self) -> int:
        """Return the steps of an epoch on this rank."""
        return len(self.starts(0)) if self.evaluation else self.samples // (self.batch_size * self.world_size)

    def starts(self, epoch: int) -> list[Tensor]:
        """Return the places at which the windows of each step begin."""
        if self.evaluation:
            chosen = torch.arange(self.rank, self.samples, self.world_size)
            return list(torch.split(chosen * self.windows // self.samples * self.context, self.batch_size))
        size = self.batch_size * self.world_size
        mine = torch.arange(len(self) * size).view(-1, size)[:, self.rank * self.batch_size :][:, : self.batch_size]
        return list(self._starts(epoch * self.samples + mine))

    def _starts(self, numbers: Tensor) -> Tensor:
        """Return the places of the windows with these numbers in the sequence of passes."""
        found = torch.empty_like(numbers)
        for number in range(int(numbers[0, 0]) // self.windows, int(numbers[-1, -1]) // self.windows + 1):
            order = torch.randperm(self.windows, generator=seeded(_ORDER, self.seed, number))
            offset = torch.randint(self.context, (), generator=seeded(_OFFSET, self.seed, number))
            is_here = numbers // self.windows == number
            found[is_here] = offset + self.context * order[numbers[is_here] % self.windows]
        return found

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[TextBatch]:
        """Return the batches of an epoch from `start_step` on."""
        within("start_step", start_step, 0, len(self))
        return (self._at(each) for each in self.starts(epoch)[start_step:])

    def order(self, epoch: int) -> range:  # noqa: ARG002 - the sequence of passes is in random order itself
        """Return the numbers of an epoch's windows."""
        return range(self.samples)

    def batch(self, epoch: int, samples: Sequence[int]) -> TextBatch:
        """Return these windows of an epoch, whose numbers rise."""
        return self._at(self._starts(epoch * self.samples + torch.tensor([samples]))[0])

    def _at(self, starts: Tensor) -> TextBatch:
        return TextBatch(self.content[starts[:, None] + torch.arange(self.context + 1)].long())


def read_text(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and to validate with; they stay on the disk until they are used."""
    for name in FILES:
        if not (folder / name).is_file():
            raise DataError("missing", folder / name, "oktopk data text FOLDER --out DIR makes it")
    train, val = (torch.from_numpy(np.memmap(folder / name, np.uint8, mode="c")) for name in FILES)
    return train, val
