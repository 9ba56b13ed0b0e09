"""Labelled images in the idx format of MNIST and its kin, as one packed file that can be carried.

An idx file is big endian: 0, 0, 8 (unsigned bytes), the number of dimensions, each length as four bytes, the bytes.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from oktopk.errors import SettingError

UNSIGNED_BYTES = 8
MAX_BYTES = 1 << 30
MIN_SIDE = 8
GZIP_MAGIC = b"\x1f\x8b"
PARTS = ("train", "t10k")


@dataclass(frozen=True)
class Images:
    """uint8 [images, height, width] and int64 [images], `num_train` of them to train on, then those to test with."""

    pixels: Tensor
    labels: Tensor
    num_train: int

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.labels.shape != self.pixels.shape[:1]:
            shapes = f"{list(self.pixels.shape)} and {list(self.labels.shape)}"
            raise SettingError(f"wanted [images, height, width] and a label for each image, not {shapes}")
        if min(self.pixels.shape[1:]) < MIN_SIDE:
            raise SettingError(f"wanted images of {MIN_SIDE} x {MIN_SIDE} or larger, not {list(self.pixels.shape[1:])}")
        if not 0 < self.num_train < len(self.labels):
            raise SettingError(f"wanted images to train on and others to test with: {len(self.labels)} in all")
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= self.num_classes:
            raise SettingError(f"a label to test with is none of the {self.num_classes} that are trained on")

    @property
    def num_classes(self) -> int:
        """Labels are below this."""
        return int(self.labels[: self.num_train].max()) + 1

    def save(self, path: Path) -> None:
        """Write one file, half as large as the pixels: each less the one above it, deflated."""
        gaps = np.diff(self.pixels.numpy(), axis=1, prepend=np.uint8(0))
        deflate = zlib.compressobj(level=9, strategy=zlib.Z_RLE)  # repeats are of zeros
        packed = torch.frombuffer(bytearray(deflate.compress(gaps.tobytes()) + deflate.flush()), dtype=torch.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        labels = self.labels.to(torch.uint8)
        saved = {"packed": packed, "shape": list(self.pixels.shape), "labels": labels, "train": self.num_train}
        torch.save(saved, path)

    @staticmethod
    def load(path: Path) -> Images:
        """Read what `save` wrote; the same pixels."""
        saved = torch.load(path, weights_only=True)
        if not {"packed", "shape", "labels", "train"} <= saved.keys():
            raise SettingError(f"{path} is no packed file of images; `--pack` writes one from --data-dir")
        size = _checked_size(path, saved["shape"])
        raw = zlib.decompressobj().decompress(saved["packed"].numpy().tobytes(), size)
        if len(raw) != size:
            raise SettingError(f"{path}: wanted {size:,} pixels, found {len(raw):,}")
        gaps = np.frombuffer(raw, np.uint8).reshape(saved["shape"])
        return Images(torch.from_numpy(np.cumsum(gaps, axis=1, dtype=np.uint8)), saved["labels"].long(), saved["train"])

    @staticmethod
    def read(folder: Path) -> Images:
        """Read the four files of a folder: train and t10k, images-idx3-ubyte and labels-idx1-ubyte, gzipped or not."""
        pixels = [read_idx(_find(folder, f"{part}-images-idx3-ubyte"), dimensions=3) for part in PARTS]
        labels = [read_idx(_find(folder, f"{part}-labels-idx1-ubyte"), dimensions=1) for part in PARTS]
        for part, images, named in zip(PARTS, pixels, labels, strict=True):
            if len(images) != len(named):
                raise SettingError(f"{folder}: {part} has {len(images):,} images and {len(named):,} labels")
        if pixels[0].shape[1:] != pixels[1].shape[1:]:
            raise SettingError(f"{folder}: images to train on and to test with are of different sizes")
        return Images(torch.cat(pixels), torch.cat(labels).long(), len(pixels[0]))


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Return the unsigned bytes of an idx file, which may be gzipped; what is no such file is refused."""
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    try:
        with gzip.open(path) if zipped else path.open("rb") as file:
            return _read(path, file, dimensions)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SettingError(f"{path} is damaged: {error}") from error


def _read(path: Path, file: BinaryIO | gzip.GzipFile, dimensions: int) -> Tensor:
    head = file.read(4)
    if head != bytes((0, 0, UNSIGNED_BYTES, dimensions)):
        raise SettingError(f"{path} is no idx file of bytes in {dimensions} dimensions: it begins with {head.hex(' ')}")
    shape = np.frombuffer(file.read(4 * dimensions).ljust(4 * dimensions, b"\0"), ">u4").tolist()
    size = _checked_size(path, shape)
    raw = file.read(size + 1)
    if len(raw) != size:
        found = "more" if len(raw) > size else f"{len(raw):,}"
        raise SettingError(f"{path} says {' x '.join(map(str, shape))}: wanted {size:,} bytes, found {found}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(shape)


def _checked_size(path: Path, shape: list[int]) -> int:
    size = prod(shape)
    if not 0 < size <= MAX_BYTES:
        raise SettingError(f"{path} says {' x '.join(map(str, shape))}: wanted 1 to {MAX_BYTES:,} bytes")
    return size


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise SettingError(f"{folder} has neither {name} nor {name}.gz")
