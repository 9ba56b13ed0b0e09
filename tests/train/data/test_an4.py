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
from tests.train.data.corpus import LICENCE, TRAIN, VAL, audio, files, pack, samples_of, tree, unpack

REAL = Path(__file__).parents[3].parent / "shared" / "an4" / "an4_raw.bigendian.tar.xz"
NAMES = {part: [name.split("/")[1] for name in texts] for part, texts in (("train", TRAIN), ("val", VAL))}
AUDIO = {"big": "raw, big endian", "little": "raw, little endian", "sphere": "NIST sphere", "wav": "wav"}


def check_corpus(out: Path) -> None:
    """Texts and samples are those of the small corpus."""
    for manifest, texts, part in ((TRAIN_MANIFEST, TRAIN, "train"), (VAL_MANIFEST, VAL, "val")):
        assert check_manifest(out / manifest) == []
        assert {u.wav.stem: u.text for u in read_manifest(out / manifest)} == {
            name.split("/")[1]: text for name, text in texts.items()
        }
        for name in texts:
            np.testing.assert_array_equal(read_pcm(out / part / "wav" / f"{Path(name).name}.wav"), samples_of(name))


@pytest.mark.parametrize(
    ("form", "how"),
    [("big", "w:gz"), ("little", "w:xz"), ("sphere", "w"), ("wav", "folder"), ("big", "parent"), ("sphere", "w:gz")],
)
def test_every_form_gives_the_same_corpus_and_the_notices_and_is_counted(tmp_path: Path, form: str, how: str) -> None:
    out = tmp_path / "out"
    if how in ("folder", "parent"):
        folder = unpack(files(form), tmp_path / "in")
        imported = import_an4(folder if how == "folder" else folder.parent, out)
    else:
        imported = import_an4(pack(files(form), tmp_path / "a", mode=how), out)
    check_corpus(out)
    ours = {f"{part}/{k}/{n}.{k}" for part, names in NAMES.items() for n in names for k in ("wav", "txt")}
    assert set(tree(out)) == ours | set(MANIFESTS) | {"LICENSE", "README"}
    assert (out / "LICENSE").read_bytes() == LICENCE
    assert (out / TRAIN_MANIFEST).read_text().startswith("train/wav/")
    assert imported.audio == AUDIO[form]
    assert (imported.train.utterances, imported.train.speakers) == (3, 2)
    assert (imported.val.utterances, imported.val.speakers) == (1, 1)
    assert imported.train.minutes == pytest.approx(sum(len(samples_of(name)) for name in TRAIN) / 16_000 / 60)
    assert [w.split(",")[0] for w in imported.warnings] == ["train: 3 utterances", "val: 1 utterances"]


def prepared(folder: Path, **val: str) -> Path:
    """Write wav files and texts as other tools lay them out, with manifests of the author's own paths."""
    for part, texts in (("train", TRAIN), ("val", VAL)):
        rows = []
        for name, text in texts.items():
            wav, txt = (folder / part / "an4" / k / f"{Path(name).name}.{k}" for k in ("wav", "txt"))
            for path, data in ((wav, audio(name, "wav")[1]), (txt, text.encode())):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            rows.append(f"/home/author/{wav.relative_to(folder)},/home/author/{txt.relative_to(folder)}\n")
        (folder / f"an4_{part}_manifest.csv").write_text(val.get(part) or "".join(rows))
    return folder


@pytest.mark.parametrize("in_place", [False, True])
def test_a_folder_with_somebody_elses_paths_is_put_right(tmp_path: Path, in_place: bool) -> None:
    source = prepared(tmp_path / "in")
    assert check_manifest(source / TRAIN_MANIFEST)[0].kind == "missing"
    out = source if in_place else tmp_path / "out"
    imported = import_an4(source, out, force=in_place)
    assert (imported.audio, imported.train.speakers) == ("wav", 2)
    check_corpus(out)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("/x/gone.wav,/x/gone.txt", r"lists '/x/gone\.wav' but has no file"),
        (
            "/x/an406-fcaw-b.wav,/x/an406-fcaw-b.txt",
            r"could be copy/an406-fcaw-b\.wav or val/an4/wav/an406-fcaw-b\.wav",
        ),
        ("only-one-column", "lists 'only-one-column'"),
    ],
)
def test_paths_that_fit_nothing_or_two_files_are_refused(tmp_path: Path, row: str, said: str) -> None:
    source = prepared(tmp_path / "in", val=row)
    (source / "copy").mkdir()
    (source / "copy" / "an406-fcaw-b.wav").touch()
    with pytest.raises(DataError, match=said):
        import_an4(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../escaped.wav", tarfile.REGTYPE, ""),
        ("an4/wav/../../../escaped.wav", tarfile.REGTYPE, ""),
        ("..\\escaped.wav", tarfile.REGTYPE, ""),
        ("/tmp/escaped.wav", tarfile.REGTYPE, ""),
        ("C:/escaped.wav", tarfile.REGTYPE, ""),
        ("an4/wav/link.wav", tarfile.SYMTYPE, "/etc/passwd"),
        ("an4/wav/hard.wav", tarfile.LNKTYPE, "an4/LICENSE"),
        ("an4/wav/null.wav", tarfile.CHRTYPE, ""),
        ("an4/wav/pipe.wav", tarfile.FIFOTYPE, ""),
    ],
)
def test_an_archive_that_reaches_outside_is_refused_and_nothing_written(
    tmp_path: Path, name: str, kind: bytes, link: str
) -> None:
    trap = tarfile.TarInfo(name)
    trap.type, trap.linkname = kind, link
    packed = pack(files("big"), tmp_path / "a.tgz", trap)
    with pytest.raises(DataError, match="refused") as caught:
        import_an4(packed, tmp_path / "out")
    assert repr(name) in str(caught.value)
    assert list(tmp_path.iterdir()) == [packed]


def without(name: str) -> dict[str, bytes]:
    return {key: data for key, data in files("big").items() if name not in key}


def with_list(suffix: str, content: bytes) -> dict[str, bytes]:
    return files("big") | {f"an4/etc/an4_test.{suffix}": content}


def renamed(name: str, text: str = "YES") -> dict[str, bytes]:
    """Return a corpus whose validation list names one utterance so, and has this text for it."""
    return without("an406-fcaw-b") | {
        "an4/etc/an4_test.fileids": f"x/{name}\n".encode(),
        "an4/etc/an4_test.transcription": f"{text} ({name})\n".encode(),
        f"an4/wav/x/{name}.raw": audio("fcaw/an406-fcaw-b", "big")[1],
    }


FIRST = "an4/wav/an4_clstk/fash/an251-fash-b.raw"
FAULTY = [
    (without("an4_train.fileids"), "no etc/an4_train.fileids"),
    (without("an4_test.transcription"), "no etc/an4_test.transcription"),
    (without("cen1-mgah-b"), "lists wav/an4_clstk/mgah/cen1-mgah-b but has no such file"),
    (with_list("fileids", b"\n"), "names no utterance"),
    (with_list("fileids", b"an4test_clstk/fcaw/an406-fcaw-b\n" * 2), "twice"),
    *((with_list("fileids", b"x/" + name), "can be no file name") for name in (b"..", b"a b", b".hidden", b"a\\..\\b")),
    (with_list("transcription", b"no brackets\n"), "'no brackets'"),
    # A pattern with many stars once tried every way to divide these spaces.
    (with_list("transcription", b"A" + b" " * 9_000 + b"B\n"), r"wanted: <s> TEXT </s> \(ID\)"),
    (with_list("transcription", b"A (another)\n"), "no transcription of an406-fcaw-b"),
    (with_list("transcription", b"A1 (an406-fcaw-b)\n"), "an406-fcaw-b: .*'1'"),
    (files("big") | {FIRST: b"odd"}, "an251-fash-b.raw: .*odd number"),
    (files("big") | {FIRST: b""}, "an251-fash-b.raw: has no bytes"),
    (renamed("a" * 300), r"names an utterance 'a{80}'\.\.\. \(300 characters\), which can be no file name"),
    (renamed("an1", "A " * 2000), "the transcription of an1 has 3999 characters, more than 2000"),
    (renamed("an1", "A" * 20_000), "a line of 20006 characters, more than 10000"),
    (renamed("an1") | {"an4/etc/an4_test.fileids": b"x/an1\n" * 20_001}, "has 20001 lines, more than 20000"),
]


@pytest.mark.parametrize(("made", "said"), FAULTY, ids=[said for _, said in FAULTY])
def test_a_faulty_corpus_is_refused_in_one_line_and_nothing_written(
    tmp_path: Path, made: dict[str, bytes], said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        import_an4(pack(made, tmp_path / "a.tgz"), tmp_path / "out")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_archive_that_is_too_large_cut_off_or_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(files("big"), tmp_path / "a.tgz")
    with monkeypatch.context() as patch:
        patch.setattr(archive, "MOST_BYTES", 10_000)
        with pytest.raises(DataError, match="not AN4"):
            import_an4(packed, tmp_path / "out")
    for data in (packed.read_bytes()[: packed.stat().st_size // 2], b"not an archive at all"):
        packed.write_bytes(data)
        with pytest.raises(DataError, match="download"):
            import_an4(packed, tmp_path / "out")
    with pytest.raises(DataError, match="no such archive"):
        import_an4(tmp_path / "nowhere", tmp_path / "out")


def test_a_folder_that_is_no_corpus_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "diary.txt").write_text("private")
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(DataError, match=r"has no etc/an4_train\.fileids and no an4_train_manifest\.csv"):
        import_an4(tmp_path, tmp_path / "out")


def test_a_corpus_is_replaced_only_by_force_and_nothing_beside_it(tmp_path: Path) -> None:
    out, packed = tmp_path / "out", pack(files("big"), tmp_path / "a.tgz")
    import_an4(packed, out)
    before = tree(out)
    (out / "notes.md").write_text("mine")
    (out / STAMP).write_text("{}")
    (out / "train" / "wav" / "stale.wav").touch()
    with pytest.raises(DataError, match=f"has .*{TRAIN_MANIFEST}.* already; --force"):
        import_an4(packed, out)
    assert (out / "train" / "wav" / "stale.wav").exists()
    import_an4(packed, out, force=True)
    assert tree(out) == before | {"notes.md": b"mine"}


def test_an_import_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, packed = tmp_path / "out", pack(files("big"), tmp_path / "a.tgz")
    import_an4(packed, out)
    before = tree(out)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(an4, "write_manifests", full)
    for folder in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="no space"):
            import_an4(packed, folder, force=True)
    assert tree(out) == before
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
