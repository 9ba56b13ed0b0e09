from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from oktopk.train.data import an4, archive
from oktopk.train.data.an4 import import_an4
from oktopk.train.data.audio import read_pcm
from oktopk.train.data.errors import DataError
from oktopk.train.data.folder import MANIFESTS, STAMP, TRAIN_MANIFEST, VAL_MANIFEST
from oktopk.train.data.manifest import check_manifest, read_manifest
from tests.train.data.corpus import FORMS, LICENCE, TRAIN, VAL, audio, files, pack, samples_of, unpack

REAL = Path(__file__).parents[3].parent / "shared" / "an4" / "an4_raw.bigendian.tar.xz"


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def texts_of(manifest: Path) -> dict[str, str]:
    return {u.wav.stem: u.text for u in read_manifest(manifest)}


def short(texts: dict[str, str]) -> dict[str, str]:
    return {name.split("/")[1]: text for name, text in texts.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["tar.gz", "tar.xz", "tar", "folder", "parent"])
def test_every_form_gives_the_same_corpus(tmp_path: Path, form: str, how: str) -> None:
    out = tmp_path / "out"
    if how in ("folder", "parent"):
        folder = unpack(files(form), tmp_path / "in")
        imported = import_an4(folder if how == "folder" else folder.parent, out)
    else:
        mode = {"tar.gz": "w:gz", "tar.xz": "w:xz", "tar": "w"}[how]
        imported = import_an4(pack(files(form), tmp_path / f"a.{how}", mode=mode), out)
    assert texts_of(out / TRAIN_MANIFEST) == short(TRAIN)
    assert texts_of(out / VAL_MANIFEST) == short(VAL)
    for part, texts in (("train", TRAIN), ("val", VAL)):
        for name in texts:
            np.testing.assert_array_equal(read_pcm(out / part / "wav" / f"{Path(name).name}.wav"), samples_of(name))
    assert imported.audio == {"big": "raw, big endian", "little": "raw, little endian", "sphere": "NIST sphere"}.get(
        form, "wav"
    )
    assert all(check_manifest(out / manifest) == [] for manifest in MANIFESTS)


def test_what_is_imported_is_counted(tmp_path: Path) -> None:
    imported = import_an4(pack(files("big"), tmp_path / "a.tgz"), tmp_path / "out")
    assert (imported.train.utterances, imported.train.speakers) == (3, 2)
    assert (imported.val.utterances, imported.val.speakers) == (1, 1)
    assert imported.train.minutes == pytest.approx(sum(len(samples_of(name)) for name in TRAIN) / 16_000 / 60)
    assert [w.split(",")[0] for w in imported.warnings] == ["train: 3 utterances", "val: 1 utterances"]


def test_only_our_files_and_the_notices_are_written(tmp_path: Path) -> None:
    import_an4(pack(files("big"), tmp_path / "a.tgz"), tmp_path / "out")
    ours = {
        f"{p}/{kind}/{Path(n).name}.{kind}"
        for p, t in (("train", TRAIN), ("val", VAL))
        for n in t
        for kind in ("wav", "txt")
    }
    assert set(tree(tmp_path / "out")) == ours | set(MANIFESTS) | {"LICENSE", "README"}
    assert (tmp_path / "out" / "LICENSE").read_bytes() == LICENCE
    assert (tmp_path / "out" / TRAIN_MANIFEST).read_text().startswith("train/wav/")


AUTHOR = "/home/author/an4_dataset"


def prepared(folder: Path, rows: dict[str, list[str]]) -> Path:
    """Write wav files and texts as other tools lay them out, with manifests of the author's own paths."""
    for part, texts in (("train", TRAIN), ("val", VAL)):
        for name, text in texts.items():
            for kind in ("wav", "txt"):
                (folder / part / "an4" / kind).mkdir(parents=True, exist_ok=True)
            stem = folder / part / "an4"
            (stem / "wav" / f"{Path(name).name}.wav").write_bytes(audio(name, "wav")[1])
            (stem / "txt" / f"{Path(name).name}.txt").write_text(text)
        (folder / f"an4_{part}_manifest.csv").write_text("".join(f"{row}\n" for row in rows[part]))
    return folder


def authors_rows() -> dict[str, list[str]]:
    def rows(part: str, texts: dict[str, str]) -> list[str]:
        stems = (Path(name).name for name in texts)
        return [f"{AUTHOR}/{part}/an4/wav/{s}.wav,{AUTHOR}/{part}/an4/txt/{s}.txt" for s in stems]

    return {"train": rows("train", TRAIN), "val": rows("val", VAL)}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_folder_with_somebody_elses_paths_is_put_right(tmp_path: Path, in_place: bool) -> None:
    source = prepared(tmp_path / "in", authors_rows())
    assert check_manifest(source / TRAIN_MANIFEST)[0].kind == "missing"
    out = source if in_place else tmp_path / "out"
    imported = import_an4(source, out, force=in_place)
    assert (imported.audio, imported.train.speakers) == ("wav", 2)
    assert texts_of(out / TRAIN_MANIFEST) == short(TRAIN)
    assert texts_of(out / VAL_MANIFEST) == short(VAL)
    for name in TRAIN:
        np.testing.assert_array_equal(read_pcm(out / "train" / "wav" / f"{Path(name).name}.wav"), samples_of(name))


def test_paths_that_fit_nothing_or_two_files_are_refused(tmp_path: Path) -> None:
    rows = authors_rows()
    source = prepared(tmp_path / "in", rows | {"val": ["/x/gone.wav,/x/gone.txt"]})
    with pytest.raises(DataError, match=r"lists '/x/gone\.wav' but has no file"):
        import_an4(source, tmp_path / "out")
    source = prepared(tmp_path / "in", rows | {"val": ["/x/an406-fcaw-b.wav,/x/an406-fcaw-b.txt"]})
    (source / "copy").mkdir()
    (source / "copy" / "an406-fcaw-b.wav").touch()
    with pytest.raises(DataError, match=r"could be copy/an406-fcaw-b\.wav or val/an4/wav/an406-fcaw-b\.wav"):
        import_an4(source, tmp_path / "out")
    source = prepared(tmp_path / "in", rows | {"val": ["only-one-column"]})
    with pytest.raises(DataError, match="lists 'only-one-column'"):
        import_an4(source, tmp_path / "out")


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    "trap",
    [
        member("../escaped.wav"),
        member("an4/wav/../../../escaped.wav"),
        member("..\\escaped.wav"),
        member("/tmp/escaped.wav"),
        member("C:/escaped.wav"),
        member("an4/wav/link.wav", tarfile.SYMTYPE, "/etc/passwd"),
        member("an4/wav/hard.wav", tarfile.LNKTYPE, "an4/LICENSE"),
        member("an4/wav/null.wav", tarfile.CHRTYPE),
        member("an4/wav/pipe.wav", tarfile.FIFOTYPE),
    ],
    ids=lambda trap: f"{trap.name}-{trap.type.decode()}",
)
def test_an_archive_that_reaches_outside_is_refused_and_nothing_written(tmp_path: Path, trap: tarfile.TarInfo) -> None:
    archive = pack(files("big"), tmp_path / "a.tgz", trap)
    with pytest.raises(DataError, match="refused") as caught:
        import_an4(archive, tmp_path / "out")
    assert repr(trap.name) in str(caught.value)
    assert list(tmp_path.iterdir()) == [archive]


@pytest.mark.parametrize("name", ["an4_clstk/x/..", "an4_clstk/x/a b", "an4_clstk/x/.hidden", "an4_clstk/x/a\\..\\b"])
def test_a_list_cannot_name_a_file_outside(tmp_path: Path, name: str) -> None:
    made = files("big") | {"an4/etc/an4_train.fileids": f"{name}\n".encode()}
    with pytest.raises(DataError, match="can be no file name"):
        import_an4(pack(made, tmp_path / "a.tgz"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_archive_that_is_far_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 10_000)
    with pytest.raises(DataError, match="not AN4"):
        import_an4(pack(files("big"), tmp_path / "a.tgz"), tmp_path / "out")


def without(name: str) -> dict[str, bytes]:
    return {key: data for key, data in files("big").items() if name not in key}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (without("an4_train.fileids"), "no etc/an4_train.fileids"),
        (without("an4_test.transcription"), "no etc/an4_test.transcription"),
        (without("cen1-mgah-b"), "lists wav/an4_clstk/mgah/cen1-mgah-b but has no such file"),
        (files("big") | {"an4/etc/an4_test.fileids": b"\n"}, "names no utterance"),
        (files("big") | {"an4/etc/an4_test.transcription": b"no brackets\n"}, "'no brackets'"),
        (files("big") | {"an4/etc/an4_test.transcription": b"A (another)\n"}, "no transcription of an406-fcaw-b"),
        (files("big") | {"an4/etc/an4_test.transcription": b"A1 (an406-fcaw-b)\n"}, "an406-fcaw-b: .*'1'"),
        (files("big") | {"an4/etc/an4_test.fileids": b"an4test_clstk/fcaw/an406-fcaw-b\n" * 2}, "twice"),
        (files("big") | {"an4/wav/an4_clstk/fash/an251-fash-b.raw": b"odd"}, "an251-fash-b.raw: .*odd number"),
        (files("big") | {"an4/wav/an4_clstk/fash/an251-fash-b.raw": b""}, "an251-fash-b.raw: has no bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_corpus_that_is_not_whole_is_refused_and_nothing_written(
    tmp_path: Path, made: dict[str, bytes], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        import_an4(pack(made, tmp_path / "a.tgz"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def renamed(name: str, text: str = "YES") -> dict[str, bytes]:
    """Return a corpus whose validation list names one utterance so, and has this text for it."""
    return without("an406-fcaw-b") | {
        "an4/etc/an4_test.fileids": f"x/{name}\n".encode(),
        "an4/etc/an4_test.transcription": f"{text} ({name})\n".encode(),
        f"an4/wav/x/{name}.raw": audio("fcaw/an406-fcaw-b", "big")[1],
    }


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (renamed("a" * 300), r"names an utterance 'a{80}'\.\.\. \(300 characters\), which can be no file name"),
        (renamed("an1", "A " * 2000), "the transcription of an1 has 3999 characters, more than 2000"),
        (renamed("an1", "A" * 20_000), "a line of 20006 characters, more than 10000"),
        (renamed("an1") | {"an4/etc/an4_test.fileids": b"x/an1\n" * 20_001}, "has 20001 lines, more than 20000"),
    ],
    ids=["id", "text", "line", "lines"],
)
def test_what_is_too_long_is_named_in_one_line_and_nothing_written(
    tmp_path: Path, made: dict[str, bytes], said: str
) -> None:
    """An id of 300 characters ended in a traceback, a text of any length was taken."""
    with pytest.raises(DataError, match=said) as caught:
        import_an4(pack(made, tmp_path / "a.tgz"), tmp_path / "out")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_long_line_without_brackets_takes_no_time(tmp_path: Path) -> None:
    """A pattern with many stars tried every way to divide the spaces."""
    line = b"A" + b" " * 9_000 + b"B\n"
    with pytest.raises(DataError, match=r"wanted: <s> TEXT </s> \(ID\)"):
        import_an4(pack(files("big") | {"an4/etc/an4_test.transcription": line}, tmp_path / "a.tgz"), tmp_path / "out")


def test_half_a_download_is_refused(tmp_path: Path) -> None:
    archive = pack(files("big"), tmp_path / "a.tgz")
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(DataError, match="download"):
        import_an4(archive, tmp_path / "out")
    archive.write_bytes(b"not an archive at all")
    with pytest.raises(DataError, match="download"):
        import_an4(archive, tmp_path / "out")
    with pytest.raises(DataError, match="no such archive"):
        import_an4(tmp_path / "nowhere", tmp_path / "out")


def test_a_folder_that_is_no_corpus_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "diary.txt").write_text("private")
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(DataError, match=r"has no etc/an4_train\.fileids and no an4_train_manifest\.csv"):
        import_an4(tmp_path, tmp_path / "out")


def test_a_corpus_is_replaced_only_by_force_and_nothing_beside_it(tmp_path: Path) -> None:
    out, archive = tmp_path / "out", pack(files("big"), tmp_path / "a.tgz")
    import_an4(archive, out)
    before = tree(out)
    (out / "notes.md").write_text("mine")
    (out / STAMP).write_text("{}")
    (out / "train" / "wav" / "stale.wav").touch()
    with pytest.raises(DataError, match=f"has .*{TRAIN_MANIFEST}.* already; --force"):
        import_an4(archive, out)
    assert (out / "train" / "wav" / "stale.wav").exists()
    import_an4(archive, out, force=True)
    assert tree(out) == before | {"notes.md": b"mine"}


def test_an_import_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, archive = tmp_path / "out", pack(files("big"), tmp_path / "a.tgz")
    import_an4(archive, out)
    before = tree(out)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(an4, "write_manifests", full)
    with pytest.raises(OSError, match="no space"):
        import_an4(archive, out, force=True)
    assert tree(out) == before
    with pytest.raises(OSError, match="no space"):
        import_an4(archive, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_real_corpus(tmp_path: Path) -> None:
    if not REAL.exists():
        pytest.skip(f"the AN4 archive is not at {REAL}")
    imported = import_an4(REAL, tmp_path / "an4")
    assert (imported.train.utterances, imported.train.speakers, round(imported.train.minutes, 1)) == (948, 74, 42.4)
    assert (imported.val.utterances, imported.val.speakers, f"{imported.val.minutes:.1f}") == (130, 10, "6.0")
    assert (imported.audio, imported.warnings) == ("raw, big endian", ())
    assert all(check_manifest(tmp_path / "an4" / manifest) == [] for manifest in MANIFESTS)
    assert (tmp_path / "an4" / "LICENSE").exists()
