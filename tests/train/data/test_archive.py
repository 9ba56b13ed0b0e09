import gzip
import tarfile
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data import archive
from oktopk.train.data.archive import read_files
from oktopk.train.data.errors import DataError
from tests.train.data.corpus import pack


def header(name, size, kind=tarfile.REGTYPE):
    """Return a member's header alone: what it announces need not come."""
    made = tarfile.TarInfo(name)
    made.size, made.type = size, kind
    return made.tobuf(tarfile.GNU_FORMAT)


def pax(records, member):
    """Return a pax header of these records, and the member that they are about."""
    return header("x", len(records), tarfile.XHDTYPE) + records.ljust(-(-len(records) // 512) * 512, b"\0") + member


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header("x", 40 << 20, tarfile.XHDTYPE) + bytes(40 << 20), r"a header of 41943040 bytes, more than 64 KiB"),
        (header("x", 100_000, tarfile.XGLTYPE) + bytes(200_000), r"a header of 100352 bytes, more than 64 KiB"),
        (header("x", -1024, tarfile.GNUTYPE_LONGNAME) + bytes(2000), "a header of -1024 bytes|is no whole tar archive"),
        (header("big.wav", 65 << 20), r"a file 'big\.wav' of 68157440 bytes, more than 64 MiB"),
        (header("big.wav", 9 << 30), r"a file 'big\.wav' of 9663676416 bytes, more than 64 MiB"),
        (header("big.wav", -1), r"a file 'big\.wav' of -1 bytes|is no whole tar archive"),
        (pax(b"19 size=9999999999\n", header("big.wav", 5)), r"'big\.wav' of 9999999999 bytes"),
        (pax(b"14 size=-1024\n", header("a.wav", 5)), r"'a\.wav' of -1024 bytes|is no whole tar archive"),
        (pax(b"0 a=b\n", header("a.wav", 0)), "is no whole tar archive"),
        (pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n", header("a", 512) + b"9" * 512), "has a sparse file;"),
        (header("a.wav", 0, tarfile.GNUTYPE_SPARSE), r"'a\.wav' that is .*sparse; refused"),
        (b"".join(header("z.bin", 4 << 20) + bytes(4 << 20) for _ in range(3)), "holds more than 10 MiB"),
        (header("x", 0) * 2_001, "holds more than 2000 files"),
        (header("x", 0, tarfile.XHDTYPE) * 2_001, "is no whole tar archive"),  # each is about the next: a recursion
        (header("a.wav", 600) + bytes(512), "unexpected end of data"),
        (header("a.wav", 512) + bytes(512), "is no whole tar archive"),  # it ends between two members
        (header("a.wav", 0) + header("b.wav", 0)[:300], "is no whole tar archive"),
        (header("a.wav", 0) + header("b.wav", 0).replace(b"b", b"c"), "is no whole tar archive"),
    ],
)
def test_a_trap_is_refused_before_its_bytes_are_read(tmp_path, monkeypatch, content, said):
    monkeypatch.setattr(archive, "MOST_BYTES", 10 << 20)
    monkeypatch.setattr(archive, "MOST_MEMBERS", 2_000)
    (tmp_path / "a.tgz").write_bytes(gzip.compress(content, 1))
    tracemalloc.start()
    with pytest.raises(DataError, match=said):
        read_files(tmp_path / "a.tgz", lambda name: not name.endswith(".bin"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_wrong_checksum_at_the_end_is_told(tmp_path):
    whole, path = gzip.compress(header("a.wav", 0) + bytes(1024)), tmp_path / "a.tgz"
    path.write_bytes(whole)
    assert read_files(path, lambda _: True) == {"a.wav": b""}
    path.write_bytes(whole[:-8] + bytes(4) + whole[-4:])
    with pytest.raises(DataError, match=r"is no whole tar archive .*CRC"):
        read_files(path, lambda _: True)


@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_archive_is_read_or_refused(tmp_path, changes):
    renamed, empty = pax(b"16 path=b/c.wav\n", header("a.wav", 600)), header("d.wav", 0)
    content = bytearray(renamed + bytes(1024) + empty + bytes(1024))
    for at, value in changes:
        content[at % len(content)] = value
    for start in range(0, len(content), 512):  # a header with a wrong checksum is refused at once
        block = content[start : start + 512]
        if block.strip(b"\0"):
            block[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    with suppress(DataError):
        (tmp_path / "a.tgz").write_bytes(gzip.compress(content, 1))
        assert all(len(data) <= 1 << 20 for data in read_files(tmp_path / "a.tgz", lambda _: True).values())


@pytest.mark.parametrize(("how", "form"), [("w", "USTAR"), ("w:gz", "GNU"), ("w:bz2", "PAX"), ("w:xz", "PAX")])
def test_what_tarfile_writes_is_read(tmp_path, how, form):
    """Long names, names outside of ASCII, empty files, folders; also of sizes about those of a block."""
    sizes = {"short.wav": 0, "a/" + 60 * "b/" + "deep.wav": 511, "a/one.wav": 512, "a/two.wav": 513}
    sizes |= {} if form == "USTAR" else {"a/" + 250 * "c" + ".wav": 1025, "a/é.wav": 3}
    made = {name: name.encode()[:1] * size for name, size in sizes.items()}
    folder = tarfile.TarInfo("a")
    folder.type = tarfile.DIRTYPE
    pack(made, tmp_path / "a", folder, mode=how, form=getattr(tarfile, f"{form}_FORMAT"))
    assert read_files(tmp_path / "a", lambda _: True) == made
    assert list(read_files(tmp_path / "a", lambda name: "two" in name)) == ["a/two.wav"]


def test_a_folder_has_the_same_limits(tmp_path, monkeypatch):
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(bytes(10))
    for limit, said in (("MOST_MEMBERS", "more than 1 files"), ("MOST_FILE_BYTES", r"'a\.wav' of 10 bytes")):
        with monkeypatch.context() as patch:
            patch.setattr(archive, limit, 1)
            with pytest.raises(DataError, match=said):
                read_files(tmp_path, lambda _: True)
