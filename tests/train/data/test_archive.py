"""Archives that are traps: each ends in one line that names the limit, before the bytes are read."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from oktopk.train.data import archive
from oktopk.train.data.archive import read_files
from oktopk.train.data.errors import DataError

GIB = 1 << 30


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a member's header alone: what it announces need not come."""
    made = tarfile.TarInfo(name)
    made.size, made.type = size, kind
    return made.tobuf(tarfile.GNU_FORMAT)


def write(path: Path, *parts: bytes) -> Path:
    path.write_bytes(gzip.compress(b"".join(parts), 1))
    return path


def read(path: Path) -> dict[str, bytes]:
    return read_files(path, lambda _: True)


@pytest.mark.parametrize(
    ("kind", "size"),
    [(tarfile.XHDTYPE, 6 * GIB), (tarfile.XGLTYPE, 100_000), (tarfile.GNUTYPE_LONGNAME, -1024), (tarfile.XHDTYPE, -1)],
)
def test_a_header_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path, kind: bytes, size: int) -> None:
    trap = write(tmp_path / "a.tgz", header("x", size, kind), bytes(200_000))
    with pytest.raises(DataError, match=rf"has a header of {size} bytes, more than 64 KiB"):
        read(trap)


def test_a_header_that_is_there_in_full_takes_no_memory(tmp_path: Path) -> None:
    size = 40 << 20
    trap = write(tmp_path / "a.tgz", header("x", size, tarfile.XHDTYPE), bytes(size))
    tracemalloc.start()
    with pytest.raises(DataError, match="has a header of"):
        read(trap)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("size", [65 << 20, 9 * GIB, -1])
def test_a_member_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path, size: int) -> None:
    with pytest.raises(DataError, match=rf"has a file 'big\.wav' of {size} bytes, more than 64 MiB"):
        read(write(tmp_path / "a.tgz", header("big.wav", size)))


def with_records(path: Path, records: bytes, member: bytes) -> Path:
    """Write a pax header of these records, and the member that they are about."""
    padded = records.ljust(-(-len(records) // 512) * 512, b"\0")
    return write(path, header("x", len(records), tarfile.XHDTYPE), padded, member)


def test_a_pax_record_that_makes_a_member_larger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'big\.wav' of 9999999999 bytes"):
        read(with_records(tmp_path / "a.tgz", b"19 size=9999999999\n", header("big.wav", 5)))


@pytest.mark.parametrize("record", [b"7 size=", b"0 a=b\n", b"99 a=b\n", b"x a=b\n", b"11 size=-5\n", b"9" * 5000])
def test_a_bad_pax_record_is_refused(tmp_path: Path, record: bytes) -> None:
    with pytest.raises(DataError, match="is no whole tar archive"):
        read(with_records(tmp_path / "a.tgz", record, header("a.wav", 0)))


def test_a_compressed_bomb_ends_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 10 << 20)
    member = gzip.compress(header("zeros.bin", 4 << 20) + bytes(4 << 20), 1)
    trap = tmp_path / "a.tgz"
    trap.write_bytes(member * 3)
    with pytest.raises(DataError, match="holds more than 10 MiB"):
        read_files(trap, lambda name: name.endswith(".wav"))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE], ids=bytes.decode)
def test_too_many_members_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    """A chain of pax headers ended in a RecursionError."""
    monkeypatch.setattr(archive, "MOST_MEMBERS", 2_000)
    trap = write(tmp_path / "a.tgz", header("x", 0, kind) * 2_001)
    with pytest.raises(DataError, match="holds more than 2000 files"):
        read(trap)


def test_sparse_files_are_refused(tmp_path: Path) -> None:
    """A map of pieces can be as long as it likes, and has been read without end."""
    with pytest.raises(DataError, match=r"'a\.wav' that is .*sparse; refused"):
        read(write(tmp_path / "gnu.tgz", header("a.wav", 0, tarfile.GNUTYPE_SPARSE)))
    records = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    with pytest.raises(DataError, match="has a sparse file; refused"):
        read(with_records(tmp_path / "pax.tgz", records, header("a.wav", 512) + b"9" * 512))


@pytest.mark.parametrize(
    ("how", "form"),
    [
        ("w", tarfile.USTAR_FORMAT),
        ("w:gz", tarfile.GNU_FORMAT),
        ("w:bz2", tarfile.PAX_FORMAT),
        ("w:xz", tarfile.PAX_FORMAT),
    ],
)
def test_what_tarfile_writes_is_read(tmp_path: Path, how: str, form: int) -> None:
    """Long names, names outside of ASCII, empty files, folders; also of sizes about those of a block."""
    names = {"short.wav": 0, "a/" + 60 * "b/" + "deep.wav": 511, "a/one.wav": 512, "a/two.wav": 513}
    names |= {} if form == tarfile.USTAR_FORMAT else {"a/" + 250 * "c" + ".wav": 1025, "a/é.wav": 3}
    with tarfile.open(tmp_path / "a", how, format=form) as packed:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        packed.addfile(folder)
        for name, size in names.items():
            member = tarfile.TarInfo(name)
            member.size = size
            packed.addfile(member, io.BytesIO(name.encode()[:1] * size))
    assert read(tmp_path / "a") == {name: name.encode()[:1] * size for name, size in names.items()}
    assert list(read_files(tmp_path / "a", lambda name: "two" in name)) == ["a/two.wav"]


def test_a_folder_has_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(bytes(10))
    for limit, said in (("MOST_MEMBERS", "more than 1 files"), ("MOST_FILE_BYTES", r"'a\.wav' of 10 bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(archive, limit, 1)
            with pytest.raises(DataError, match=said):
                read(tmp_path)
