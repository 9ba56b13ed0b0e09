"""Read files from an archive or a folder into memory.

An archive is somebody else's data. It is read member by member in one pass and never unpacked, so that no name in it
becomes a path on this machine. Every size is checked before the bytes are read.
"""

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn, cast

from oktopk.train.data.errors import DataError, shortened

MOST_BYTES = 1 << 30  # of all files, unpacked: ten times AN4
MOST_FILE_BYTES = 64 << 20  # half an hour of speech; AN4's longest recording has seconds
MOST_MEMBERS = 20_000  # headers of an archive or files of a folder; AN4 has some 1,300
MOST_HEADER_BYTES = 64 << 10  # of a long name or pax records; no file system takes a path of more than 4 KiB

OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open, b"]\0\0\x80": lzma.open}
"""How to read a compressed file, by its first bytes."""

# `tarfile` leaks the last three from headers that make no sense.
DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError, LookupError, RecursionError)


def read_files(source: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Return the files of an archive or below a folder whose names are `wanted`, by their paths there."""
    if source.is_dir():
        return dict(_from_folder(source, wanted))
    if not source.is_file():
        raise DataError("missing", source, "there is no such archive or folder")
    try:
        return dict(_from_archive(source, wanted))
    except DAMAGE as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # an errno is the disk's; the errors of gzip and bz2 have none
        raise DataError("unreadable", source, f"is no whole tar archive ({error}); is the download complete?") from None


def _from_folder(source: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    limits = _Limits(source)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if wanted(name) and path.is_file():
            size = path.stat().st_size
            limits.check_size(name, size)
            limits.count(1, size)
            yield name, path.read_bytes()


def _from_archive(source: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Yield in one pass, because going back in a compressed archive means unpacking it again."""
    limits = _Limits(source)
    with source.open("rb") as file:
        unpacked = _unpacked(file)
        stream = _Stream(unpacked, limits)
        for member in tarfile.TarFile(fileobj=cast(Any, stream)):
            limits.check_member(member)
            if member.isfile() and wanted(member.name):
                yield str(PurePosixPath(member.name)), stream.content(member.size)
        if not stream.is_at_end:  # `tarfile` itself takes a header that is damaged or cut off for the end
            raise tarfile.ReadError("a header is damaged or missing")
        while rest := unpacked.read(1 << 20):  # to the end, where gzip, bz2 and xz compare their checksums
            limits.count(0, len(rest))


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """Return the tar archive in a file that may be compressed; it is unpacked only as far as it is read."""
    start = file.read(6)
    file.seek(0)
    for magic, opener in OPENERS.items():
        if start.startswith(magic):
            return cast(IO[bytes], opener(file))
    return file


class _Limits:
    """Files and bytes of one source so far; a `DataError` when there are too many."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._num_files = self._total_bytes = 0

    def refuse(self, message: str) -> NoReturn:
        raise DataError("bad corpus", self._source, message)

    def count(self, num_files: int, num_bytes: int) -> None:
        self._num_files += num_files
        self._total_bytes += num_bytes
        if self._num_files > MOST_MEMBERS:
            self.refuse(f"holds more than {MOST_MEMBERS} files; this is not AN4")
        if self._total_bytes > MOST_BYTES:
            self.refuse(f"holds more than {MOST_BYTES >> 20} MiB; this is not AN4")

    def check_size(self, name: str, num_bytes: int) -> None:
        if not 0 <= num_bytes <= MOST_FILE_BYTES:
            most = f"more than {MOST_FILE_BYTES >> 20} MiB; this is not AN4"
            self.refuse(f"has a file {shortened(name)} of {num_bytes} bytes, {most}")

    def check_member(self, member: tarfile.TarInfo) -> None:
        self.check_size(member.name, member.size)
        path, name = PurePosixPath(member.name.replace("\\", "/")), shortened(member.name)
        if path.is_absolute() or ".." in path.parts or ":" in member.name:
            self.refuse(f"has a member {name} that leads outside; refused")
        if not (member.isfile() or member.isdir()) or member.issparse():
            self.refuse(f"has a member {name} that is a link, a device or sparse; refused")


class _Stream:
    """A tar archive as `tarfile` reads it: forwards, and headers within the limits; else it fills the memory."""

    def __init__(self, file: IO[bytes], limits: _Limits) -> None:
        self._file, self._limits, self._at = file, limits, 0
        self.is_at_end = False  # whether the latest block was one of zeros, with which every whole archive ends

    def tell(self) -> int:
        return self._at

    def seek(self, target: int) -> None:
        if target < self._at:
            raise tarfile.ReadError("a member ends before it begins")
        while self._at < target:
            self.content(min(target - self._at, 1 << 20))

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes of a header, none at the end of the file."""
        if not 0 <= num_bytes <= MOST_HEADER_BYTES:
            most = f"more than {MOST_HEADER_BYTES >> 10} KiB; this is not AN4"
            self._limits.refuse(f"has a header of {num_bytes} bytes, {most}")
        self._limits.count(num_bytes == tarfile.BLOCKSIZE, num_bytes)
        data = self._file.read(num_bytes)
        if b"GNU.sparse." in data:  # `tarfile` reads the map of a sparse file without end
            self._limits.refuse("has a sparse file; refused: pack it again without --sparse")
        self._at += len(data)
        self.is_at_end = data == bytes(tarfile.BLOCKSIZE)
        return data

    def content(self, num_bytes: int) -> bytes:
        """Return the next bytes of a member."""
        self._limits.count(0, num_bytes)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise tarfile.ReadError("unexpected end of data")
        self._at += num_bytes
        return data
