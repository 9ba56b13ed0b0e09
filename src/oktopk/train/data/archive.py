"""Files out of an archive or a folder, into memory.

An archive is somebody else's data: it is read member by member in one pass and never unpacked, so that no name in it is
ever a path on this machine.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from oktopk.train.data.errors import DataError
from oktopk.train.data.progress import measured

MOST_BYTES = 1 << 30
"""Ten times AN4: what claims more is something else, or a trap."""

Wanted = Callable[[str], bool]


def read_files(source: Path, wanted: Wanted) -> dict[str, bytes]:
    """Return the files of an archive or below a folder whose names are `wanted`, by their paths there."""
    if source.is_dir():
        return dict(_from_folder(source, wanted))
    if not source.is_file():
        raise DataError("missing", source, "there is no such archive or folder")
    try:
        return dict(_from_archive(source, wanted))
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError("unreadable", source, f"is no whole tar archive ({error}); is the download complete?") from None


def _from_folder(source: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    total_bytes = 0
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if wanted(name) and path.is_file():
            total_bytes = _counted(total_bytes + path.stat().st_size, source)
            yield name, path.read_bytes()


def _from_archive(source: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    """Yield in one pass: to go back in a compressed archive is to begin again."""
    total_bytes = 0
    with measured() as bar, source.open("rb") as file, tarfile.open(fileobj=file, mode="r|*") as archive:
        task = bar.add_task("reading", total=source.stat().st_size)
        for member in archive:
            _check_member(member, source)
            total_bytes = _counted(total_bytes + member.size, source)
            if member.isfile() and wanted(member.name):
                yield str(PurePosixPath(member.name)), _content(archive, member)
            bar.update(task, completed=file.tell())


def _counted(total_bytes: int, source: Path) -> int:
    if total_bytes > MOST_BYTES:
        raise DataError("bad corpus", source, f"holds more than {MOST_BYTES >> 20} MiB; this is not AN4")
    return total_bytes


def _check_member(member: tarfile.TarInfo, source: Path) -> None:
    path = PurePosixPath(member.name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in member.name:
        raise DataError("bad corpus", source, f"has a member {member.name!r} that leads outside; refused")
    if not (member.isfile() or member.isdir()):
        raise DataError("bad corpus", source, f"has a member {member.name!r} that is a link or a device; refused")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    return stream.read() if stream else b""
