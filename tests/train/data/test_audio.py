from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oktopk.train.data.audio import (
    FULL_SCALE,
    RATE_HZ,
    decode_pcm,
    detect_byte_order,
    num_samples,
    read_audio,
    read_pcm,
    write_wav,
)
from oktopk.train.data.errors import DataError
from tests.train.data.corpus import tone, utterance

samples = arrays(np.int16, st.integers(1, 2000))


@given(samples)
def test_what_is_written_is_read(tmp_path: Path, pcm: np.ndarray) -> None:
    path = tmp_path / "a.wav"
    write_wav(path, pcm)
    np.testing.assert_array_equal(read_pcm(path), pcm)
    np.testing.assert_array_equal(read_audio(path) * FULL_SCALE, pcm.astype(np.float32))
    assert num_samples(path) == len(pcm)


@given(samples, st.sampled_from(["big", "little"]))
def test_raw_samples_are_read_in_the_order_given(tmp_path: Path, pcm: np.ndarray, order: str) -> None:
    path = tmp_path / "a.raw"
    path.write_bytes(pcm.astype(pcm.dtype.newbyteorder(order)).tobytes())
    np.testing.assert_array_equal(read_pcm(path, order), pcm)


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("endian", [None, "BIG"])
def test_sphere_is_read_whatever_its_byte_order(tmp_path: Path, order: str, endian: str | None) -> None:
    path = tmp_path / "a.sph"
    soundfile.write(path, tone(0.1), RATE_HZ, format="NIST", subtype="PCM_16", endian=endian)
    np.testing.assert_array_equal(read_pcm(path, order), tone(0.1))
    np.testing.assert_array_equal(read_audio(path) * FULL_SCALE, tone(0.1).astype(np.float32))


@pytest.mark.parametrize("order", ["big", "little"])
def test_the_byte_order_is_heard(order: str) -> None:
    recordings = [tone(0.5, hz).astype(np.dtype("i2").newbyteorder(order)).tobytes() for hz in (100, 300)]
    assert detect_byte_order([*recordings, b"", b"\0"], "somewhere") == order


@pytest.mark.parametrize("data", [np.random.default_rng(0).bytes(20_000), bytes(2000), b""])
def test_noise_and_silence_have_no_byte_order(data: bytes) -> None:
    with pytest.raises(DataError, match=r"somewhere: cannot tell the byte order"):
        detect_byte_order([data], "somewhere")


def bad(folder: Path, kind: str) -> Path:
    wav, _ = utterance(folder, kind.replace(" ", "-"), tone())
    if kind == "wrong rate":
        soundfile.write(wav, tone(rate_hz=8000), 8000)
    elif kind == "stereo":
        soundfile.write(wav, np.stack([tone(), tone()], axis=1), RATE_HZ)
    elif kind == "empty":
        soundfile.write(wav, tone(0), RATE_HZ)
    elif kind == "unreadable":
        wav.write_bytes(b"RIFF, and then nothing that makes sense")
    elif kind == "missing":
        wav.unlink()
    return wav


@pytest.mark.parametrize("read", [read_audio, read_pcm, num_samples])
@pytest.mark.parametrize("kind", ["wrong rate", "stereo", "empty", "unreadable", "missing"])
def test_what_is_not_16_khz_mono_sound_is_refused_by_name(tmp_path: Path, read, kind: str) -> None:
    wav = bad(tmp_path, kind)
    with pytest.raises(DataError) as caught:
        read(wav)
    assert caught.value.kind == kind
    assert caught.value.path == wav
    assert str(wav) in str(caught.value)


def test_a_file_without_bytes_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    for read in (read_audio, num_samples):
        with pytest.raises(DataError, match="has no bytes"):
            read(tmp_path / "a.wav")


def test_samples_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.array([0, np.nan, 0], np.float32), RATE_HZ, subtype="FLOAT")
    with pytest.raises(DataError, match="NaN"):
        read_audio(path)


def test_raw_bytes_need_an_order_and_an_even_number() -> None:
    with pytest.raises(DataError, match="no byte order was given"):
        decode_pcm(b"\0\1", "a.raw")
    with pytest.raises(DataError, match="odd number"):
        decode_pcm(b"\0\1\2", "a.raw", "big")
    with pytest.raises(DataError, match="no bytes"):
        decode_pcm(b"", "a.raw", "big")
