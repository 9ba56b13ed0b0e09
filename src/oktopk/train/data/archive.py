"""Files out of an archive or a folder, into memory.

An archive is somebody else's data: it is read member by member in one pass and never unpacked, so that no name in it is
ever a path on this machine. Everything in it has a limit, which is looked at before the bytes are read: `tarfile`
itself would take a header of gigabytes into memory, so only its parser of single header blocks is used.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from oktopk.train.data.errors import DataError, shortened
from oktopk.train.data.progress import measured

MOST_BYTES = 1 << 30
"""Unpacked, all together: ten times AN4, because what claims more is something else, or a trap."""

MOST_FILE_BYTES = 64 << 20
"""Of one file: half an hour of speech, where AN4's longest recording has seconds."""

MOST_MEMBERS = 20_000
"""Headers of an archive or files of a folder: AN4 has some 1,300."""

MOST_HEADER_BYTES = 64 << 10
"""Of a header with a long name or pax records: no file system takes a path of more than 4 KiB."""

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
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; gzip and bz2 raise it without one
            raise
        raise DataError("unreadable", source, f"is no whole tar archive ({error}); is the download complete?") from None


def _from_folder(source: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    num_files = total_bytes = 0
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if wanted(name) and path.is_file():
            num_files += 1
            total_bytes += _checked_size(name, path.stat().st_size, source)
            _check_total(num_files, total_bytes, source)
            yield name, path.read_bytes()


def _from_archive(source: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """Yield in one pass: to go back in a compressed archive is to begin again."""
    with measured() as bar, source.open("rb") as file:
        task = bar.add_task("reading", total=source.stat().st_size)
        archive = _Archive(_unpacked(file), source)
        for member in archive:
            _check_member(member, source)
            if member.isfile() and wanted(member.name):
                yield str(PurePosixPath(member.name)), archive.content(member)
            bar.update(task, completed=file.tell())


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    """Return the tar archive in a file that may be compressed. Each of these unpacks as far as it is asked to."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.open(file))
    if start.startswith(b"BZh"):
        return bz2.open(file)
    if start.startswith((b"\xfd7zXZ", b"\x5d\x00\x00\x80")):
        return lzma.open(file)
    return file


class _Archive:
    """The members of a tar archive, in turn; the content of one can be read until the next is asked for."""

    def __init__(self, file: IO[bytes], source: Path) -> None:
        self._file, self._source = file, source
        self._total_bytes = 0
        self._unread = 0  # of the present member, with the zeros that fill its last block

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        name, records = "", dict[str, str]()
        for header in self._headers():
            if header.type in LONG_NAMES:
                long = self._extension(header).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
                name = long if header.type == tarfile.GNUTYPE_LONGNAME else name
            elif header.type in PAX_HEADERS:
                found = _records(self._extension(header), self._source)
                records = records if header.type == tarfile.XGLTYPE else found  # global ones name no file
            else:
                header.name = (records.get("path") or name or header.name).removesuffix("/")
                header.size = _checked_size(header.name, _number(records.get("size"), header.size), self._source)
                self._unread = _in_blocks(header.size) if header.isfile() else 0
                yield header
                name, records = "", {}

    def content(self, member: tarfile.TarInfo) -> bytes:
        """Return what the present member holds."""
        data = self._read(member.size)
        self._unread -= member.size
        return data

    def _headers(self) -> Iterator[tarfile.TarInfo]:
        """Yield every header, also those that are about the next one; a block of zeros or the end is the end."""
        num_headers = 0
        while True:
            self._skip()
            block = self._file.read(tarfile.BLOCKSIZE)
            if num_headers and not block.strip(b"\0"):
                return
            num_headers += 1
            _check_total(num_headers, self._total_bytes, self._source)
            yield tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")

    def _extension(self, header: tarfile.TarInfo) -> bytes:
        if not 0 <= header.size <= MOST_HEADER_BYTES:
            raise DataError(
                "bad corpus",
                self._source,
                f"has a header of {header.size} bytes, more than {MOST_HEADER_BYTES >> 10} KiB; this is not AN4",
            )
        self._unread = _in_blocks(header.size) - header.size
        return self._read(header.size)

    def _skip(self) -> None:
        while self._unread:
            self._unread -= len(self._read(min(self._unread, 1 << 20)))

    def _read(self, num_bytes: int) -> bytes:
        self._total_bytes += num_bytes
        _check_total(0, self._total_bytes, self._source)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise tarfile.ReadError("unexpected end of data")
        return data


def _records(data: bytes, source: Path) -> dict[str, str]:
    """Return the records `LENGTH KEY=VALUE` of a pax header, which may rename and resize the next member."""
    records = {}
    while data.strip(b"\0"):
        length = _number(data[:20].split(b" ", 1)[0].decode("ascii", "replace"), 0)
        record = data[:length].partition(b" ")[2]
        key, equals, value = record.removesuffix(b"\n").partition(b"=")
        if not (equals and 0 < length <= len(data)):
            raise tarfile.ReadError("bad pax header")
        if key.startswith(b"GNU.sparse."):
            raise DataError("bad corpus", source, "has a sparse file; refused: pack it again without --sparse")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return records


def _number(text: str | None, otherwise: int) -> int:
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise tarfile.ReadError("bad number in a pax header")
    return int(text)


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _checked_size(name: str, num_bytes: int, source: Path) -> int:
    if not 0 <= num_bytes <= MOST_FILE_BYTES:
        raise DataError(
            "bad corpus",
            source,
            f"has a file {shortened(name)} of {num_bytes} bytes, more than {MOST_FILE_BYTES >> 20} MiB; this is not "
            "AN4",
        )
    return num_bytes


def _check_total(num_members: int, total_bytes: int, source: Path) -> None:
    if num_members > MOST_MEMBERS:
        raise DataError("bad corpus", source, f"holds more than {MOST_MEMBERS} files; this is not AN4")
    if total_bytes > MOST_BYTES:
        raise DataError("bad corpus", source, f"holds more than {MOST_BYTES >> 20} MiB; this is not AN4")


def _check_member(member: tarfile.TarInfo, source: Path) -> None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in member.name:
        raise DataError("bad corpus", source, f"has a member {shortened(member.name)} that leads outside; refused")
    if not (member.isfile() or member.isdir()) or member.type == tarfile.GNUTYPE_SPARSE:
        raise DataError(
            "bad corpus", source, f"has a member {shortened(member.name)} that is a link, a device or sparse; refused"
        )
