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
from tests.train.data.corpus import BAD_AUDIO, spoilt, tone


@given(arrays(np.int16, st.integers(1, 2000)), st.sampled_from(["big", "little"]))
def test_samples_come_back_from_wav_and_from_raw_bytes_in_either_order(
    tmp_path: Path, pcm: np.ndarray, order: str
) -> None:
    wav, raw = tmp_path / "a.wav", tmp_path / "a.raw"
    write_wav(wav, pcm)
    np.testing.assert_array_equal(read_pcm(wav), pcm)
    np.testing.assert_array_equal(read_audio(wav) * FULL_SCALE, pcm.astype(np.float32))
    assert num_samples(wav) == len(pcm)
    raw.write_bytes(pcm.astype(pcm.dtype.newbyteorder(order)).tobytes())
    np.testing.assert_array_equal(read_pcm(raw, order), pcm)


@pytest.mark.parametrize(("order", "endian"), [("big", None), ("little", "BIG")])
def test_sphere_is_read_whatever_its_byte_order(tmp_path: Path, order: str, endian: str | None) -> None:
    path = tmp_path / "a.sph"
    soundfile.write(path, tone(0.1), RATE_HZ, format="NIST", subtype="PCM_16", endian=endian)
    np.testing.assert_array_equal(read_pcm(path, order), tone(0.1))
    np.testing.assert_array_equal(read_audio(path) * FULL_SCALE, tone(0.1).astype(np.float32))


@pytest.mark.parametrize("order", ["big", "little"])
def test_the_byte_order_is_heard(order: str) -> None:
    recordings = [tone(0.5, hz).astype(np.dtype("i2").newbyteorder(order)).tobytes() for hz in (100, 300)]
    assert detect_byte_order([*recordings, b"", b"\0"], "somewhere") == order


def test_noise_and_silence_have_no_byte_order() -> None:
    for data in (np.random.default_rng(0).bytes(20_000), bytes(2000), b""):
        with pytest.raises(DataError, match=r"somewhere: cannot tell the byte order"):
            detect_byte_order([data], "somewhere")


@pytest.mark.parametrize("fault", BAD_AUDIO)
def test_a_file_that_is_not_16_khz_mono_sound_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    wav = spoilt(tmp_path, fault)
    for read in (read_audio, read_pcm, num_samples):
        with pytest.raises(DataError) as caught:
            read(wav)
        assert (caught.value.kind, caught.value.path) == (fault, wav)
        assert str(wav) in str(caught.value)


def test_no_bytes_no_numbers_no_order_and_half_a_sample_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.touch()
    for read in (read_audio, num_samples):
        with pytest.raises(DataError, match="has no bytes"):
            read(path)
    soundfile.write(path, np.array([0, np.nan, 0], np.float32), RATE_HZ, subtype="FLOAT")
    with pytest.raises(DataError, match="NaN"):
        read_audio(path)
    with pytest.raises(DataError, match="no byte order was given"):
        decode_pcm(b"\0\1", "a.raw")
    for data, said in ((b"\0\1\2", "odd number"), (b"", "no bytes")):
        with pytest.raises(DataError, match=said):
            decode_pcm(data, "a.raw", "big")
