from __future__ import annotations

import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data import manifest as module
from oktopk.train.data.errors import DataError
from oktopk.train.data.manifest import check_manifest, output_frames, read_manifest, write_manifest
from tests.train.data.corpus import FAULTS, manifest_of, spoilt, tone, utterance


@given(st.lists(st.integers(10, 60), min_size=1, max_size=6))
def test_utterances_are_read_from_short_to_long_as_they_were_written(tmp_path: Path, hundredths: list[int]) -> None:
    found = read_manifest(manifest_of(tmp_path, [h / 100 for h in hundredths]))
    assert [round(100 * u.duration_s) for u in found] == sorted(hundredths)
    assert {u.wav.name for u in found} == {f"u{i}.wav" for i in range(len(hundredths))}
    assert {u.text for u in found} == {"YES"}


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    assert manifest_of(tmp_path / "here", [0.5, 0.2]).read_text() == "u1.wav,u1.txt\nu0.wav,u0.txt\n"
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert [u.wav.parent for u in read_manifest(tmp_path / "there" / "m.csv")] == [tmp_path / "there"] * 2


def test_a_manifest_of_another_tool_is_understood(tmp_path: Path) -> None:
    """Absolute paths, Windows line ends, blank lines, no order, a byte order mark."""
    pairs = [utterance(tmp_path, name, tone(s)) for name, s in (("long", 0.4), ("a,comma", 0.2))]
    rows = f'{pairs[0][0]},{pairs[0][1]}\r\n\r\n"a,comma.wav","a,comma.txt"\r\n'
    (tmp_path / "m.csv").write_bytes(rows.encode("utf-8-sig"))
    assert [u.wav.name for u in read_manifest(tmp_path / "m.csv")] == ["a,comma.wav", "long.wav"]
    assert check_manifest(tmp_path / "m.csv") == []


@given(st.integers(200, 7000))
def test_frames_are_those_of_the_spectrogram_and_the_convolution(num_samples: int) -> None:
    """Against torch: a centred spectrogram of hop 160, then a convolution of width 11, padding 5 and stride 2."""
    ones = torch.ones(num_samples)
    frames = torch.stft(ones, 320, 160, window=torch.ones(320), center=True, return_complex=True).shape[1]
    after = torch.nn.functional.conv1d(torch.ones(1, 1, frames), torch.ones(1, 1, 11), stride=2, padding=5).shape[2]
    assert output_frames(num_samples) == after


def test_the_shortest_recording_that_ctc_can_align(tmp_path: Path) -> None:
    """AAB needs A, blank, A, B: 4 frames of the net, 7 or 8 of the spectrogram, 960 samples."""
    for num_samples, problems in ((960, 0), (959, 1)):
        write_manifest(tmp_path / "m.csv", [utterance(tmp_path, "u", np.ones(num_samples, np.int16), "AAB")])
        assert [p.kind for p in check_manifest(tmp_path / "m.csv")] == ["too short"] * problems
    with pytest.raises(DataError, match=r"u\.wav: 0\.06 s give 3 frames and 'AAB' needs 4"):
        read_manifest(tmp_path / "m.csv")


@pytest.mark.parametrize("fault", FAULTS)
def test_reading_names_the_first_file_that_will_not_do(tmp_path: Path, fault: str) -> None:
    manifest, named = manifest_of(tmp_path, [0.5]), spoilt(tmp_path, fault)
    with manifest.open("a") as file:
        file.write(f"{named.stem}.wav,{named.stem}.txt\nnot-there.wav,not-there.txt\n")
    with pytest.raises(DataError) as caught:
        read_manifest(manifest)
    assert (caught.value.kind, caught.value.path) == (fault, named)


def test_checking_names_every_one_of_them(tmp_path: Path) -> None:
    manifest, named = manifest_of(tmp_path, [0.5]), [spoilt(tmp_path, fault) for fault in FAULTS]
    with manifest.open("a") as file:
        file.writelines(f"{path.stem}.wav,{path.stem}.txt\n" for path in named)
        file.write("a.wav,a.txt\n")
    *found, no_wav, no_txt = check_manifest(manifest)
    wanted = [(fault, path, 2 + i) for i, (fault, path) in enumerate(zip(FAULTS, named, strict=True))]
    assert [(p.kind, p.path, p.line) for p in found] == wanted
    assert all(repr(c) in found[FAULTS.index("bad text")].message for c in "É1")
    assert (no_wav.path.name, no_txt.path.name) == ("a.wav", "a.txt"), "both can have a fault"


def test_a_text_may_not_be_empty_or_bytes(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, [0.5])
    for content, said in ((b" \n", "empty"), (b"\xff\xfe\x00", "decode")):
        (tmp_path / "u0.txt").write_bytes(content)
        with pytest.raises(DataError, match=rf"u0\.txt: .*{said}"):
            read_manifest(manifest)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n \n", "no lines"),
        (b"a.wav\n", "line 1 is 'a.wav', wanted: wav,txt"),
        (b"a.wav,\n", "wanted: wav,txt"),
        (b"RIFF\xff\xff\xff", "no text of lines"),
        (None, r"m\.csv: .*oktopk data an4"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "m.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_manifest(path)
    assert caught.value.path == path
    assert [(p.path, p.line) for p in check_manifest(path)] == [(path, 0)]


def test_a_bad_recording_or_a_full_disk_leaves_the_old_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(tmp_path, [0.5])
    before = manifest.read_bytes()
    with pytest.raises(DataError):
        write_manifest(manifest, [(spoilt(tmp_path, "stereo"), tmp_path / "u0.txt")])
    assert manifest.read_bytes() == before

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(module.csv, "writer", full)
    with pytest.raises(OSError, match="no space"):
        write_manifest(manifest, [(tmp_path / "u0.wav", tmp_path / "u0.txt")])
    assert manifest.read_bytes() == before


def test_headers_of_a_whole_corpus_are_read_in_a_second(tmp_path: Path) -> None:
    wav, _ = utterance(tmp_path, "u", tone(0.2))
    for i in range(948):
        (tmp_path / f"{i}.wav").hardlink_to(wav)
    (tmp_path / "m.csv").write_text("".join(f"{i}.wav,u.txt\n" for i in range(948)))
    began = time.process_time()
    assert len(read_manifest(tmp_path / "m.csv")) == 948
    assert time.process_time() - began < 1


def test_a_data_error_survives_the_way_between_processes(tmp_path: Path) -> None:
    error = DataError("stereo", tmp_path / "a.wav", "two channels")
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.kind, back.path, back.message) == (str(error), "stereo", tmp_path / "a.wav", "two channels")
