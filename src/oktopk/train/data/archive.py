"""Read files from an archive or a folder into memory.

An archive is somebody else's data. It is read member by member in one pass and never unpacked, so that no name in it
becomes a path on this machine. Every size is checked before the bytes are read. `tarfile` itself would read a header of
gigabytes into memory, so only its parser of single header blocks is used.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NoReturn, cast

from oktopk.train.data.errors import DataError, shortened

MOST_BYTES = 1 << 30  # of all files, unpacked: ten times AN4
MOST_FILE_BYTES = 64 << 20  # half an hour of speech; AN4's longest recording has seconds
MOST_MEMBERS = 20_000  # headers of an archive or files of a folder; AN4 has some 1,300
MOST_HEADER_BYTES = 64 << 10  # of a long name or pax records; no file system takes a path of more than 4 KiB

LONG_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
PAX_HEADERS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE)

Wanted = Callable[[str], bool]


def read_files(source: Path, wanted: Wanted) -> dict[str, bytes]:
    """Return the files of an archive or below a folder whose names are `wanted`, by their paths there."""
    if source.is_dir():
        return dict(_from_folder(source, wanted))
    if not source.is_file():
        raise DataError("missing", source, "there is no such archive or folder")
    try:
        return dict(_from_archive(source, wanted))
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's; those of gzip and bz2 have no errno
            raise
        raise DataError("unreadable", source, f"is no whole tar archive ({error}); is the download complete?") from None


def _from_folder(source: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    limits = _Limits(source)
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if wanted(name) and path.is_file():
            limits.count(1, limits.checked_size(name, path.stat().st_size))
            yield name, path.read_bytes()


def _from_archive(source: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """Yield in one pass, because going back in a compressed archive means unpacking it again."""
    with source.open("rb") as file:
        archive = _Archive(_unpacked(file), _Limits(source))
        for member in archive:
            if member.isfile() and wanted(member.name):
                yield str(PurePosixPath(member.name)), archive.content(member)


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """Return the tar archive in a file that may be compressed; it is unpacked only as far as it is read."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.open(file))
    if start.startswith(b"BZh"):
        return bz2.open(file)
    if start.startswith((b"\xfd7zXZ", b"\x5d\x00\x00\x80")):
        return lzma.open(file)
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

    def checked_size(self, name: str, num_bytes: int) -> int:
        if not 0 <= num_bytes <= MOST_FILE_BYTES:
            most = f"more than {MOST_FILE_BYTES >> 20} MiB; this is not AN4"
            self.refuse(f"has a file {shortened(name)} of {num_bytes} bytes, {most}")
        return num_bytes

    def checked_member(self, member: tarfile.TarInfo) -> tarfile.TarInfo:
        path, name = PurePosixPath(member.name.replace("\\", "/")), shortened(member.name)
        if path.is_absolute() or ".." in path.parts or ":" in member.name:
            self.refuse(f"has a member {name} that leads outside; refused")
        if not (member.isfile() or member.isdir()) or member.type == tarfile.GNUTYPE_SPARSE:
            self.refuse(f"has a member {name} that is a link, a device or sparse; refused")
        return member


class _Archive:
    """The members of a tar archive, in turn; the content of one can be read until the next is asked for."""

    def __init__(self, file: IO[bytes], limits: _Limits) -> None:
        self._file, self._limits = file, limits
        self._unread = 0  # bytes of the present member, with the zeros that fill its last block

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        name, records = "", dict[str, str]()
        for header in self._headers():
            if header.type in LONG_NAMES:
                long = self._extension(header).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
                name = long if header.type == tarfile.GNUTYPE_LONGNAME else name
            elif header.type in PAX_HEADERS:
                found = self._records(self._extension(header))
                records = records if header.type == tarfile.XGLTYPE else found  # global records name no file
            else:
                header.name = (records.get("path") or name or header.name).removesuffix("/")
                header.size = self._limits.checked_size(header.name, _number(records.get("size"), header.size))
                self._unread = _in_blocks(header.size) if header.isfile() else 0
                yield self._limits.checked_member(header)
                name, records = "", {}

    def content(self, member: tarfile.TarInfo) -> bytes:
        """Return the bytes of the present member."""
        data = self._read(member.size)
        self._unread -= member.size
        return data

    def _headers(self) -> Iterator[tarfile.TarInfo]:
        """Yield every header, also those that describe the next one, up to a block of zeros or the end."""
        first = True
        while True:
            while self._unread:
                self._unread -= len(self._read(min(self._unread, 1 << 20)))
            block = self._file.read(tarfile.BLOCKSIZE)
            if not first and not block.strip(b"\0"):
                return
            first = False
            self._limits.count(1, 0)
            yield tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")

    def _extension(self, header: tarfile.TarInfo) -> bytes:
        if not 0 <= header.size <= MOST_HEADER_BYTES:
            most = f"more than {MOST_HEADER_BYTES >> 10} KiB; this is not AN4"
            self._limits.refuse(f"has a header of {header.size} bytes, {most}")
        self._unread = _in_blocks(header.size) - header.size
        return self._read(header.size)

    def _records(self, data: bytes) -> dict[str, str]:
        """Return the records `LENGTH KEY=VALUE` of a pax header, which may rename and resize the next member."""
        records = {}
        while data.strip(b"\0"):
            length = _number(data[:20].split(b" ", 1)[0].decode("ascii", "replace"), 0)
            key, equals, value = data[:length].partition(b" ")[2].removesuffix(b"\n").partition(b"=")
            if not (equals and 0 < length <= len(data)):
                raise tarfile.ReadError("bad pax header")
            if key.startswith(b"GNU.sparse."):
                self._limits.refuse("has a sparse file; refused: pack it again without --sparse")
            records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
            data = data[length:]
        return records

    def _read(self, num_bytes: int) -> bytes:
        self._limits.count(0, num_bytes)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise tarfile.ReadError("unexpected end of data")
        return data


def _number(text: str | None, otherwise: int) -> int:
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise tarfile.ReadError("bad number in a pax header")
    return int(text)


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
