import tarfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from oktopk.train.data import manifest
from oktopk.train.data.an4 import import_an4
from oktopk.train.data.audio import read_pcm
from oktopk.train.data.errors import DataError
from oktopk.train.data.manifest import MANIFESTS, STAMP, TRAIN_MANIFEST, check_manifest, read_manifest
from tests.train.data.corpus import LICENCE, PARTS, audio, files, pack, samples_of, tree, unpack

AUDIO = {"big": "raw, big endian", "little": "raw, little endian", "sphere": "NIST sphere", "wav": "wav"}


def check_corpus(out):
    """Texts and samples are those of the small corpus."""
    for part, texts in PARTS.items():
        listed = out / f"an4_{part}_manifest.csv"
        assert check_manifest(listed) == []
        assert {u.wav.stem: u.text for u in read_manifest(listed)} == {Path(n).name: text for n, text in texts.items()}
        for name in texts:
            np.testing.assert_array_equal(read_pcm(out / part / "wav" / f"{Path(name).name}.wav"), samples_of(name))


FORMS = [("big", "w:gz"), ("little", "w:xz"), ("sphere", "w"), ("wav", "."), ("big", ".."), ("sphere", "w:gz")]


@pytest.mark.parametrize(("form", "how"), FORMS)
def test_every_form_gives_the_same_corpus_and_the_notices_and_is_counted(tmp_path, form, how):
    """In an archive, in the folder an4, and in the folder around it."""
    out, made = tmp_path / "out", files(form)
    source = unpack(made, tmp_path / "in") / how if how[0] == "." else pack(made, tmp_path / "a", mode=how)
    seconds = {part: [len(samples_of(name)) / 16_000 for name in texts] for part, texts in PARTS.items()}
    assert import_an4(source, out) == (seconds, AUDIO[form])
    check_corpus(out)
    names = [(part, Path(name).name) for part, texts in PARTS.items() for name in texts]
    ours = {f"{part}/{kind}/{name}.{kind}" for part, name in names for kind in ("wav", "txt")}
    assert set(tree(out)) == ours | set(MANIFESTS) | {"LICENSE", "README"}
    assert (out / "LICENSE").read_bytes() == LICENCE
    assert (out / TRAIN_MANIFEST).read_text().startswith("train/wav/")


def prepared(folder, val=""):
    """Write wav files and texts as other tools lay them out, with manifests of the author's own paths."""
    made = {}
    for part, texts in PARTS.items():
        rows = []
        for name, text in texts.items():
            wav, txt = (f"{part}/an4/{kind}/{Path(name).name}.{kind}" for kind in ("wav", "txt"))
            made |= {wav: audio(name, "wav")[1], txt: text.encode()}
            rows.append(f"/home/author/{wav},/home/author/{txt}\n")
        made[f"an4_{part}_manifest.csv"] = ((val if part == "val" else "") or "".join(rows)).encode()
    return unpack(made, folder).parent


def test_a_folder_with_somebody_elses_paths_is_put_right_elsewhere_and_in_place(tmp_path):
    source = prepared(tmp_path / "in")
    assert check_manifest(source / TRAIN_MANIFEST)[0][1].kind == "missing"
    for out in (tmp_path / "out", source):
        assert import_an4(source, out, force=out == source)[1] == "wav"
        check_corpus(out)


def test_paths_that_fit_nothing_or_two_files_are_refused(tmp_path):
    for row, said in {
        "/x/gone.wav,/x/gone.txt": r"lists '/x/gone\.wav' but has no file",
        "/x/an406-fcaw-b.wav,/x/an406-fcaw-b.txt": r"could be copy/an406-fcaw-b\.wav or val/an4/wav/an406-fcaw-b",
        "only-one-column": "lists 'only-one-column'",
    }.items():
        source = unpack({"copy/an406-fcaw-b.wav": b""}, prepared(tmp_path / "in", val=row)).parent
        with pytest.raises(DataError, match=said):
            import_an4(source, tmp_path / "out")


OUTSIDE = ("../x.wav", "an4/wav/../../../x.wav", "..\\x.wav", "/tmp/x.wav", "C:/x.wav")
TRAPS = [("an4/x.wav", kind) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)]


@pytest.mark.parametrize(("name", "kind"), [*TRAPS, *((name, tarfile.REGTYPE) for name in OUTSIDE)])
def test_an_archive_that_reaches_outside_is_refused_and_nothing_written(tmp_path, name, kind):
    trap = tarfile.TarInfo(name)
    trap.type, trap.linkname = kind, "an4/LICENSE"
    packed = pack(files("big"), tmp_path / "a.tgz", trap)
    with pytest.raises(DataError, match="refused") as caught:
        import_an4(packed, tmp_path / "out")
    assert repr(name) in str(caught.value)
    assert list(tmp_path.iterdir()) == [packed]


def without(name):
    return {key: data for key, data in files("big").items() if name not in key}


def with_list(suffix, content):
    return files("big") | {f"an4/etc/an4_test.{suffix}": content}


def renamed(name, text="YES", times=1):
    """Return a corpus whose validation list names one utterance so, and has this text for it."""
    return without("an406-fcaw-b") | {
        "an4/etc/an4_test.fileids": f"x/{name}\n".encode() * times,
        "an4/etc/an4_test.transcription": f"{text} ({name})\n".encode(),
        f"an4/wav/x/{name}.raw": audio("fcaw/an406-fcaw-b", "big")[1],
    }


FIRST = "an4/wav/an4_clstk/fash/an251-fash-b.raw"
SPHERE, FIRST_SPHERE = files("sphere"), FIRST.replace(".raw", ".sph")
SIZES = (b"  -1024", b"      0", b"   abcd", b"9999999")  # below 0, libsndfile's callback raised
HEADERS = [SPHERE[FIRST_SPHERE].replace(b"   1024", size, 1) for size in SIZES]
FAULTY = [
    *((SPHERE | {FIRST_SPHERE: header}, "a bad NIST header") for header in HEADERS),
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
    (renamed("an1", times=20_001), "has 20001 lines, more than 20000"),
]


@pytest.mark.parametrize(("made", "said"), FAULTY, ids=[said for _, said in FAULTY])
def test_a_faulty_corpus_is_refused_in_one_line_and_nothing_written(tmp_path, made, said):
    with pytest.raises(DataError, match=said) as caught:
        import_an4(pack(made, tmp_path / "a.tgz"), tmp_path / "out")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_is_no_whole_archive_and_no_corpus_is_refused_and_a_folder_not_even_read(tmp_path, monkeypatch):
    whole = pack(files("big"), tmp_path / "a.tgz").read_bytes()
    for data in (whole[: len(whole) // 2], b"not an archive at all"):
        (tmp_path / "a.tgz").write_bytes(data)
        with pytest.raises(DataError, match="download"):
            import_an4(tmp_path / "a.tgz", tmp_path / "out")
    with pytest.raises(DataError, match="no such archive"):
        import_an4(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "diary.txt").write_text("private")
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(DataError, match=r"has no etc/an4_train\.fileids and no an4_train_manifest\.csv"):
        import_an4(tmp_path, tmp_path / "out")


def test_a_corpus_is_replaced_only_by_force_and_nothing_beside_it(tmp_path, monkeypatch):
    out, packed = tmp_path / "out", pack(files("big"), tmp_path / "a.tgz")
    import_an4(packed, out)
    before = tree(out)
    mine = {"notes.md": b"mine", STAMP: b"{}", "train/wav/stale.wav": b""}
    unpack(mine, out)
    with pytest.raises(DataError, match=f"has .*{TRAIN_MANIFEST}.* already; --force"):
        import_an4(packed, out)
    with monkeypatch.context() as patch:  # a disk that is full
        patch.setattr(manifest, "write_manifest", Mock(side_effect=OSError("no space left")))
        for folder in (out, tmp_path / "new"):
            with pytest.raises(OSError, match="no space"):
                import_an4(packed, folder, force=True)
    assert tree(out) == before | mine
    assert not (tmp_path / "new").exists()
    import_an4(packed, out, force=True)
    assert tree(out) == before | {"notes.md": b"mine"}
