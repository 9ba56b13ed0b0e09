import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.data import synth
from oktopk.train.data.audio import FULL_SCALE, read_pcm
from oktopk.train.data.errors import DataError, SpeechError
from oktopk.train.data.grammar import COMMANDS, DIGITS, KINDS, VERBS, below_hundred, ordinal, say
from oktopk.train.data.labels import encode
from oktopk.train.data.manifest import MANIFESTS, STAMP, TRAIN_MANIFEST, VAL_MANIFEST, check_manifest, read_manifest
from oktopk.train.data.synth import VARIANTS, make_speech, resample, speakers_of
from tests.train.data.corpus import tree

FEW = {"utterances": 20, "val_utterances": 9}


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    out = tmp_path_factory.mktemp("speech") / "out"
    make_speech(out, **FEW, jobs=2)
    return out


def test_the_bytes_are_the_same_with_any_number_of_jobs_and_in_any_memory(tmp_path, speech, monkeypatch):
    """glibc fills what it allocates with this pattern in the children; elsewhere this is a plain repetition."""
    monkeypatch.setenv("MALLOC_PERTURB_", "165")
    assert make_speech(tmp_path / "again", **FEW, jobs=1)
    assert tree(tmp_path / "again") == tree(speech)


def test_it_is_laid_out_and_sounds_as_a_corpus_should(speech):
    assert all(check_manifest(speech / manifest) == [] for manifest in MANIFESTS)
    train, val = (read_manifest(speech / manifest) for manifest in (TRAIN_MANIFEST, VAL_MANIFEST))
    assert (len(train), len(val)) == (20, 9)
    assert len({utterance.text for utterance in train + val}) > 20
    edges = []
    for utterance in train + val:
        samples = read_pcm(utterance.wav) / FULL_SCALE
        edges.append(samples[:1000])
        peak, loudness = np.abs(samples).max(), np.sqrt(np.mean(samples**2))
        assert 0.07 < peak < 0.7, utterance
        assert peak / 40 < loudness < peak, utterance
        assert 0.4 < utterance.duration_s < 12, utterance
        edge = np.sqrt(np.mean(edges[-1] ** 2))
        assert 0 < edge < loudness / 5, "there is noise before the words, and it is quiet"
    assert (np.abs(np.corrcoef(edges)) - np.eye(len(edges))).max() < 0.5, "each recording has its own noise"


def test_without_the_engine_speech_is_kept_and_none_made(tmp_path, speech, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in speech.rglob("*")}
    monkeypatch.setattr(synth, "ENGINE", "no_such_package")
    assert not make_speech(speech, **FEW)
    assert {path: path.stat().st_mtime_ns for path in speech.rglob("*")} == before
    with pytest.raises(SpeechError, match=r'pip install "oktopk\[synth\]"'):
        make_speech(tmp_path / "out", **FEW)
    assert not (tmp_path / "out").exists()
    assert "espeakng_loader" not in sys.modules, "the engine, which is GPL, is never imported here"


def test_what_is_half_there_or_of_other_settings_is_replaced_but_recordings_never(tmp_path):
    one = {"utterances": 1, "val_utterances": 1}
    make_speech(tmp_path, utterances=2, val_utterances=1)
    assert make_speech(tmp_path, **one)
    assert len(list((tmp_path / "train" / "wav").iterdir())) == 1
    before, stamp = tree(tmp_path), json.loads((tmp_path / STAMP).read_text())
    other_version = json.dumps({"settings": {**stamp["settings"], "version": 0}})
    for name, content in ((MANIFESTS[0], None), (MANIFESTS[1], None), (STAMP, other_version), (STAMP, "{")):
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
        assert make_speech(tmp_path, **one)
        assert tree(tmp_path) == before
    (tmp_path / STAMP).unlink()
    with pytest.raises(DataError, match="not made by synth-an4"):
        make_speech(tmp_path, **one)
    assert tree(tmp_path) == {name: data for name, data in before.items() if name != STAMP}


@given(st.integers(1, 2000), st.integers(1, 300))
def test_no_voice_speaks_in_both_parts_and_everything_is_said_once(train, val):
    parts = speakers_of("train", train), speakers_of("val", val)
    of_train, of_val = ({speaker.voice.split("+")[1] for speaker in speakers} for speakers in parts)
    assert not of_train & of_val
    said = [[i for speaker in speakers for i in speaker.utterances] for speakers in parts]
    assert said == [list(range(train)), list(range(val))]


def test_no_voice_breathes_and_the_engine_does_not_clip_the_loudest():
    """The voices are read in a child: the engine's package is not imported into this process."""
    where = "import espeakng_loader as e; print(e.get_data_path())"
    data = Path(subprocess.check_output([sys.executable, "-c", where], text=True).strip())
    definitions = {name: (data / "voices" / "!v" / name).read_text(errors="replace") for name in VARIANTS}
    assert [name for name, text in definitions.items() if "breath" in text] == []
    assert len(set(VARIANTS)) == len(VARIANTS) >= 55
    line = {"say": "enter four fifty six", "rate": 150, "pitch": 50, "range": 50, "gap": 0}
    for variant in ("ed", "gustave", "john", "paul"):
        rate_hz, (samples,) = synth._speak(f"en-us+{variant}", [line])
        assert (rate_hz, 0.05 < np.abs(samples).max() < 0.9) == (22_050, True)


def test_a_child_that_fails_or_hangs_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    for name, value, said in (
        ("ACCENTS", ("xx",), r"voice xx\+.*: eSpeak NG has no voice"),
        ("CHILD_TIMEOUT_S", 0.001, r"no answer for voice .* in 0\.001 s"),
    ):
        monkeypatch.setattr(synth, name, value)
        with pytest.raises(SpeechError, match=said):
            make_speech(tmp_path / "out", **FEW)
        assert not (tmp_path / "out").exists()


@given(st.integers(), st.sampled_from(sorted(KINDS)))
def test_everything_said_can_be_labelled(seed, grammar):
    text = say(grammar, random.Random(seed))
    assert encode(text)
    assert text == " ".join(text.split()) != ""
    assert grammar != "commands" or set(text.split()) <= {*DIGITS, *COMMANDS, *VERBS}


def test_every_kind_of_utterance_is_said_and_numbers_in_words():
    said = {say("an4", random.Random(seed)) for seed in range(2000)}
    words = {word for text in said for word in text.split()}
    assert {word for word in words if len(word) == 1} == set("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert words >= {*DIGITS, *COMMANDS, *VERBS, "JULY", "HUNDRED", "FIRST"}
    assert len(said) > 1000
    assert len({below_hundred(n) for n in range(100)}) == 100
    wanted = ("SECOND", "THIRD", "FIFTH", "EIGHTH", "NINTH", "TWELFTH", "TWENTIETH", "TWENTY FIRST", "THIRTY FIRST")
    assert tuple(ordinal(n) for n in (2, 3, 5, 8, 9, 12, 20, 21, 31)) == wanted


@given(st.integers(50, 11_000), st.integers(4000, 9000))
def test_a_tone_is_the_same_tone_at_another_rate_or_nothing(hz, length):
    """Outside of the transition band of the filter, which a window of 48 taps and -80 dB makes 6.4 to 8.8 kHz."""

    def wave(rate_hz, num_samples):
        return np.sin(2 * np.pi * hz * np.arange(num_samples) / rate_hz).astype(np.float32)

    out = resample(wave(22_050, length), 22_050, 16_000)
    assert len(out) == -(-length * 320 // 441)
    inner = slice(100, len(out) - 100)
    if hz <= 6400:
        np.testing.assert_allclose(out[inner], wave(16_000, len(out))[inner], atol=2e-4)
    elif hz >= 8800:
        assert np.abs(out[inner]).max() < 2e-4, "it folds back"
