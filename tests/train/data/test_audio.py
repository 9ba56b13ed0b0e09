import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oktopk.train.data.audio import RATE_HZ, decode_pcm, detect_byte_order, num_samples, read_pcm, write_wav
from oktopk.train.data.errors import DataError
from tests.train.data.corpus import tone


@given(arrays(np.int16, st.integers(1, 2000)), st.sampled_from(["big", "little"]))
def test_samples_come_back_from_wav_and_from_raw_bytes_in_either_order(tmp_path, pcm, order):
    write_wav(tmp_path / "a.wav", pcm)
    np.testing.assert_array_equal(read_pcm(tmp_path / "a.wav"), pcm)
    assert num_samples(tmp_path / "a.wav") == len(pcm)
    raw = pcm.astype(pcm.dtype.newbyteorder(order)).tobytes()
    np.testing.assert_array_equal(decode_pcm(raw, "a.raw", order), pcm)


@pytest.mark.parametrize("order", ["big", "little"])
def test_sphere_is_read_in_either_order_and_of_raw_samples_it_is_heard_but_not_of_noise_or_silence(tmp_path, order):
    sphere = {"format": "NIST", "subtype": "PCM_16", "endian": order.upper()}
    soundfile.write(tmp_path / "a.sph", tone(0.1), RATE_HZ, **sphere)
    np.testing.assert_array_equal(read_pcm(tmp_path / "a.sph"), tone(0.1))
    recordings = [tone(0.5, hz).astype(np.dtype("i2").newbyteorder(order)).tobytes() for hz in (100, 300)]
    assert detect_byte_order([*recordings, b"", b"\0"], "somewhere") == order
    for data in (np.random.default_rng(0).bytes(20_000), bytes(2000), b""):
        with pytest.raises(DataError, match=r"somewhere: cannot tell the byte order"):
            detect_byte_order([data], "somewhere")


def test_no_bytes_no_order_half_a_sample_and_floating_point_are_refused(tmp_path):
    empty, floats = tmp_path / "empty.wav", tmp_path / "floats.wav"
    empty.touch()
    soundfile.write(floats, np.array([0, 0.5], np.float32), RATE_HZ, subtype="FLOAT")  # read as 16 bits: silence
    for path, said in ((empty, "has no bytes"), (floats, "floating point; convert it")):
        for read in (read_pcm, num_samples):
            with pytest.raises(DataError, match=said):
                read(path)
    for data, order, said in ((b"01", None, "no byte order"), (b"012", "big", "odd number"), (b"", "big", "no bytes")):
        with pytest.raises(DataError, match=said):
            decode_pcm(data, "a.raw", order)
