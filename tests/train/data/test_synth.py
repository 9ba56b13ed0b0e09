from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import SettingError
from oktopk.train.data import synth
from oktopk.train.data.audio import read_audio
from oktopk.train.data.errors import DataError, SpeechError
from oktopk.train.data.folder import MANIFESTS, STAMP, TRAIN_MANIFEST, VAL_MANIFEST
from oktopk.train.data.grammar import COMMANDS, DIGITS, KINDS, VERBS, below_hundred, ordinal, say
from oktopk.train.data.labels import encode
from oktopk.train.data.manifest import check_manifest, read_manifest
from oktopk.train.data.resample import resample
from oktopk.train.data.synth import VARIANTS, make_speech, speakers_of
from tests.train.data.corpus import tree

FEW = {"utterances": 20, "val_utterances": 9}


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty utterances and nine, made once."""
    return make_speech(tmp_path_factory.mktemp("speech") / "out", **FEW, jobs=2).out


def test_the_same_seed_gives_the_same_bytes_with_any_number_of_jobs_and_in_any_memory(
    tmp_path: Path, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc fills what it allocates with this pattern in the children; elsewhere this is a plain repetition."""
    monkeypatch.setenv("MALLOC_PERTURB_", "165")
    assert not make_speech(tmp_path / "again", **FEW, jobs=1).cached
    assert tree(tmp_path / "again") == tree(speech)


def test_another_seed_gives_other_speech(tmp_path: Path, speech: Path) -> None:
    make_speech(tmp_path / "other", **FEW, seed=1)
    other, ours = tree(tmp_path / "other"), tree(speech)
    assert other.keys() == ours.keys()
    assert [name for name in ours if name.endswith(".wav") and ours[name] == other[name]] == []
    texts = [sorted(data for name, data in made.items() if name.endswith(".txt")) for made in (ours, other)]
    assert texts[0] != texts[1]


def test_it_is_laid_out_and_sounds_as_a_corpus_should(speech: Path) -> None:
    assert all(check_manifest(speech / manifest) == [] for manifest in MANIFESTS)
    train, val = (read_manifest(speech / manifest) for manifest in (TRAIN_MANIFEST, VAL_MANIFEST))
    assert (len(train), len(val)) == (20, 9)
    edges = []
    for utterance in train + val:
        samples = read_audio(utterance.wav)
        edges.append(samples[:1000])
        peak, loudness = np.abs(samples).max(), np.sqrt(np.mean(samples**2))
        assert 0.07 < peak < 0.7, utterance
        assert peak / 40 < loudness < peak, utterance
        assert 0.4 < utterance.duration_s < 12, utterance
        edge = np.sqrt(np.mean(edges[-1] ** 2))
        assert 0 < edge < loudness / 5, "there is noise before the words, and it is quiet"
    assert (np.abs(np.corrcoef(edges)) - np.eye(len(edges))).max() < 0.5, "each recording has its own noise"


@pytest.mark.parametrize("variant", ["ed", "gustave", "john", "paul"])
def test_the_engine_does_not_clip_its_loudest_voices(variant: str) -> None:
    line = {"say": "enter four fifty six", "rate": 150, "pitch": 50, "range": 50, "gap": 0}
    rate_hz, (samples,) = synth._speak(f"en-us+{variant}", [line])
    assert rate_hz == 22_050
    assert 0.05 < np.abs(samples).max() < 0.9


def test_without_the_engine_speech_is_kept_and_none_made(
    tmp_path: Path, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in speech.rglob("*")}
    monkeypatch.setattr(synth, "ENGINE", "no_such_package")
    assert make_speech(speech, **FEW).cached
    assert {path: path.stat().st_mtime_ns for path in speech.rglob("*")} == before
    with pytest.raises(SpeechError, match=r'pip install "oktopk\[synth\]"'):
        make_speech(tmp_path / "out", **FEW)
    assert not (tmp_path / "out").exists()
    assert "espeakng_loader" not in sys.modules, "the engine, which is GPL, is never imported here"


def test_what_is_half_there_is_made_again(tmp_path: Path) -> None:
    one = {"utterances": 1, "val_utterances": 1}
    make_speech(tmp_path, **one)
    before, stamp = tree(tmp_path), json.loads((tmp_path / STAMP).read_text())
    other_version = json.dumps({**stamp, "settings": {**stamp["settings"], "version": 0}})
    for name, content in ((MANIFESTS[0], None), (MANIFESTS[1], None), (STAMP, other_version), (STAMP, "{")):
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
        assert not make_speech(tmp_path, **one).cached
        assert tree(tmp_path) == before


def test_other_settings_replace_speech_but_never_recordings(tmp_path: Path) -> None:
    make_speech(tmp_path / "a", utterances=2, val_utterances=1)
    assert not make_speech(tmp_path / "a", utterances=1, val_utterances=1).cached
    assert len(list((tmp_path / "a" / "train" / "wav").iterdir())) == 1
    (tmp_path / "a" / STAMP).unlink()
    before = tree(tmp_path / "a")
    with pytest.raises(DataError, match="not made by synth-an4"):
        make_speech(tmp_path / "a", utterances=2, val_utterances=1)
    assert tree(tmp_path / "a") == before


@given(st.integers(0, 10_000), st.integers(1, 2000), st.integers(1, 300))
def test_no_voice_speaks_in_both_parts_and_everything_is_said_once(seed: int, train: int, val: int) -> None:
    speakers = {"train": speakers_of("train", train, seed), "val": speakers_of("val", val, seed)}
    variants = {part: {s.voice.split("+")[1] for s in speakers[part]} for part in speakers}
    assert not variants["train"] & variants["val"]
    assert [i for s in speakers["train"] for i in s.utterances] == list(range(train))
    assert [i for s in speakers["val"] for i in s.utterances] == list(range(val))


def test_no_voice_breathes() -> None:
    """Read in a child: the engine's package is not imported into this process."""
    where = "import espeakng_loader as e; print(e.get_data_path())"
    data = Path(subprocess.check_output([sys.executable, "-c", where], text=True).strip())
    definitions = {name: (data / "voices" / "!v" / name).read_text(errors="replace") for name in VARIANTS}
    assert [name for name, text in definitions.items() if "breath" in text] == []
    assert len(set(VARIANTS)) == len(VARIANTS) >= 55


def test_a_voice_that_fails_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "VARIANTS", ("m1", "no-such-voice") * 8)
    monkeypatch.setattr(synth, "ACCENTS", ("xx",))
    with pytest.raises(SpeechError, match=r"voice xx\+.*: eSpeak NG has no voice"):
        make_speech(tmp_path / "out", **FEW)
    assert not (tmp_path / "out").exists()


def test_a_child_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "CHILD_TIMEOUT_S", 0.001)
    with pytest.raises(SpeechError, match=r"no answer for voice .* in 0\.001 s"):
        make_speech(tmp_path / "out", **FEW)


@pytest.mark.parametrize(
    "bad", [{"utterances": 0}, {"val_utterances": 0}, {"seed": -1}, {"jobs": 0}, {"grammar": "comands"}]
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, bad: dict) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        make_speech(tmp_path / "out", **bad)
    assert not (tmp_path / "out").exists()


def test_an_eighth_is_for_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "_make", lambda *_: None)
    assert [make_speech(tmp_path, n).val_utterances for n in (1, 256, 948)] == [16, 32, 118]


@given(st.integers(), st.sampled_from(sorted(KINDS)))
def test_everything_said_can_be_labelled(seed: int, grammar: str) -> None:
    text = say(grammar, random.Random(seed))
    assert encode(text)
    assert text == " ".join(text.split()) != ""
    if grammar == "commands":
        assert set(text.split()) <= {*DIGITS, *COMMANDS, *VERBS}


def test_every_kind_of_utterance_is_said() -> None:
    said = {say("an4", random.Random(seed)) for seed in range(2000)}
    letters = {word for text in said for word in text.split() if len(word) == 1}
    assert letters == set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert {word for text in said for word in text.split()} >= {*DIGITS, *COMMANDS, *VERBS, "JULY", "HUNDRED", "FIRST"}
    assert len(said) > 1000


def test_numbers_in_words() -> None:
    assert len({below_hundred(n) for n in range(100)}) == 100
    assert [ordinal(n) for n in (2, 3, 5, 8, 9, 12, 20, 21, 31)] == [
        *("SECOND", "THIRD", "FIFTH", "EIGHTH", "NINTH", "TWELFTH", "TWENTIETH", "TWENTY FIRST", "THIRTY FIRST"),
    ]


@given(st.integers(50, 6400), st.integers(4000, 9000))
def test_a_tone_is_the_same_tone_at_another_rate(hz: int, length: int) -> None:
    """Below the transition band of the filter, which a window of 48 taps and -80 dB makes 6.4 to 8.8 kHz."""

    def wave(rate_hz: int, num_samples: int) -> np.ndarray:
        return np.sin(2 * np.pi * hz * np.arange(num_samples) / rate_hz).astype(np.float32)

    out = resample(wave(22_050, length), 22_050, 16_000)
    assert len(out) == -(-length * 320 // 441)
    inner = slice(100, len(out) - 100)
    np.testing.assert_allclose(out[inner], wave(16_000, len(out))[inner], atol=2e-4)


@given(st.integers(8800, 11_000))
def test_what_cannot_be_carried_does_not_fold_back(hz: int) -> None:
    tone = np.sin(2 * np.pi * hz * np.arange(8000) / 22_050).astype(np.float32)
    assert np.abs(resample(tone, 22_050, 16_000)[100:-100]).max() < 2e-4
