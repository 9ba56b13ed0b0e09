import pickle
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data import manifest as module
from oktopk.train.data.errors import DataError
from oktopk.train.data.manifest import check_manifest, read_manifest, write_manifest
from tests.train.data.corpus import FAULTS, manifest_of, spoilt, tone, utterance


@given(st.lists(st.integers(10, 60), min_size=1, max_size=6))
def test_utterances_are_read_from_short_to_long_as_they_were_written(tmp_path, hundredths):
    found = read_manifest(manifest_of(tmp_path, [h / 100 for h in hundredths]))
    assert [round(100 * u.duration_s) for u in found] == sorted(hundredths)
    assert {u.wav.name for u in found} == {f"u{i}.wav" for i in range(len(hundredths))}
    assert {u.text for u in found} == {"YES"}


def test_a_folder_can_be_moved_another_tool_has_written_it_and_only_headers_are_read(tmp_path, monkeypatch):
    """Of the other tool: absolute paths, Windows line ends, blank lines, no order, a byte order mark."""
    assert manifest_of(tmp_path / "here", [0.5, 0.2]).read_text() == "u1.wav,u1.txt\nu0.wav,u0.txt\n"
    shutil.move(tmp_path / "here", tmp_path / "there")
    pairs = [utterance(tmp_path, name, tone(s)) for name, s in (("long", 0.4), ("a,comma", 0.2))]
    rows = f'{pairs[0][0]},{pairs[0][1]}\r\n\r\n"a,comma.wav","a,comma.txt"\r\n'
    (tmp_path / "m.csv").write_bytes(rows.encode("utf-8-sig"))
    assert check_manifest(tmp_path / "m.csv") == []
    monkeypatch.setattr(module, "read_pcm", None)
    assert [u.wav.parent for u in read_manifest(tmp_path / "there" / "m.csv")] == [tmp_path / "there"] * 2
    assert [u.wav.name for u in read_manifest(tmp_path / "m.csv")] == ["a,comma.wav", "long.wav"]


def test_the_shortest_recording_that_ctc_can_align(tmp_path):
    """AAB needs A, blank, A, B: 4 frames of the net, 7 or 8 of the spectrogram, 960 samples."""
    for num_samples, problems in ((960, 0), (959, 1)):
        write_manifest(tmp_path / "m.csv", [utterance(tmp_path, "u", np.ones(num_samples, np.int16), "AAB")])
        assert [error.kind for _, error in check_manifest(tmp_path / "m.csv")] == ["too short"] * problems
    with pytest.raises(DataError, match=r"u\.wav: 0\.06 s give 3 frames and 'AAB' needs 4"):
        read_manifest(tmp_path / "m.csv")


def test_checking_names_every_fault_and_reading_the_first(tmp_path):
    good, named = manifest_of(tmp_path, [0.5]).read_text(), {fault: spoilt(tmp_path, fault) for fault in FAULTS}
    rows = {fault: f"{path.stem}.wav,{path.stem}.txt\n" for fault, path in named.items()}
    manifest = tmp_path / "m.csv"
    for fault, path in named.items():
        manifest.write_text(good + rows[fault] + "not-there.wav,not-there.txt\n")
        with pytest.raises(DataError) as caught:
            read_manifest(manifest)
        assert (caught.value.kind, caught.value.path) == (fault, path)
    manifest.write_text(good + "".join(rows.values()) + "a.wav,a.txt\n")
    *found, no_wav, no_txt = check_manifest(manifest)
    assert [(line, error.kind, error.path) for line, error in found] == [
        (line, fault, path) for line, (fault, path) in enumerate(named.items(), 2)
    ]
    assert all(repr(c) in str(found[FAULTS.index("bad text")][1]) for c in "É1")
    assert (no_wav[1].path.name, no_txt[1].path.name) == ("a.wav", "a.txt"), "both can have a fault"
    manifest.write_text(good)
    for content, said in ((b" \n", "empty"), (b"\xff\xfe\x00", "decode")):
        (tmp_path / "u0.txt").write_bytes(content)
        with pytest.raises(DataError, match=rf"u0\.txt: .*{said}"):
            read_manifest(manifest)


def test_a_manifest_that_is_none_is_refused_by_name_and_the_error_survives_the_way_between_processes(tmp_path):
    path = tmp_path / "m.csv"
    for content, said in (
        (None, r"m\.csv: .*oktopk data an4"),
        (b"\n \n", "no lines"),
        (b"a.wav\n", "line 1 is 'a.wav', wanted: wav,txt"),
        (b"a.wav,\n", "wanted: wav,txt"),
        (b"RIFF\xff\xff\xff", "no text of lines"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=said) as caught:
            read_manifest(path)
        assert [(line, error.path) for line, error in check_manifest(path)] == [(0, path)]
        back = pickle.loads(pickle.dumps(caught.value))
        assert (str(back), back.kind, back.path) == (str(caught.value), caught.value.kind, path)
