"""Read and write sound: 16 kHz, one channel, 16 bits. Other sound is refused by name, never converted in silence."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile
from numpy.typing import NDArray

from oktopk.train.data.errors import DataError

RATE_HZ = 16_000  # the only sample rate that is read or written
FULL_SCALE = 32_768  # divisor that brings int16 samples into [-1, 1)
DECISIVE = 2.0  # factor by which the wrong byte order must be rougher; in AN4 it is 200 times rougher

ByteOrder = Literal["big", "little"]
Samples = NDArray[np.int16]

_SPHERE = b"NIST_1A"


def read_pcm(path: Path) -> Samples:
    """Return the samples of a 16 kHz mono wav or NIST sphere file, or raise a `DataError`."""
    _check_file(path)
    return decode_pcm(path.read_bytes(), path)


def num_samples(path: Path) -> int:
    """Return the number of samples of a 16 kHz mono file, from its header alone, or raise a `DataError`."""
    _check_file(path)
    with _opened(path, path) as sound:
        return int(sound.frames)


def decode_pcm(data: bytes, name: str | Path, byte_order: ByteOrder | None = None) -> Samples:
    """Return the samples in `data`: wav, NIST sphere, or headerless 16-bit PCM in `byte_order`."""
    if has_header(data):
        _check_sphere_header(data, name)
        with _opened(io.BytesIO(data), name) as sound:
            samples: Samples = sound.read(dtype="int16")
            return samples
    if not data:
        raise DataError("empty", name, "has no bytes; make the file again")
    if byte_order is None:
        raise DataError("unreadable", name, "has neither a wav nor a sphere header, and no byte order was given")
    if len(data) % 2:
        raise DataError("unreadable", name, f"is no 16-bit PCM: it has {len(data)} bytes, an odd number")
    return np.frombuffer(data, ">i2" if byte_order == "big" else "<i2").astype(np.int16)


def has_header(data: bytes) -> bool:
    """Return whether `data` begins as a wav or NIST sphere file does; the suffix of its name proves nothing."""
    return data.startswith((b"RIFF", _SPHERE))


def detect_byte_order(recordings: list[bytes], name: str | Path) -> ByteOrder:
    """Return the byte order in which neighbouring samples of headerless `recordings` differ less.

    Speech is smooth at 16 kHz. With the bytes swapped the low byte, which is as good as random, leads.
    """
    big, little = (sum(_roughness(data, order) for data in recordings) for order in (">i2", "<i2"))
    if max(big, little) < DECISIVE * min(big, little) or big == little:
        found = f"neighbouring samples differ by {big:.0f} (big endian) and {little:.0f} (little endian)"
        raise DataError("bad corpus", name, f"cannot tell the byte order of its raw audio: {found}; is it 16-bit PCM?")
    return "big" if big < little else "little"


def _roughness(data: bytes, dtype: str) -> float:
    samples = np.frombuffer(data[: len(data) // 2 * 2], dtype).astype(np.int32)
    return float(np.abs(np.diff(samples)).mean()) if len(samples) > 1 else 0.0


def write_wav(path: Path, samples: Samples) -> None:
    """Write int16 samples as a 16 kHz mono wav file."""
    memory = io.BytesIO()
    soundfile.write(memory, samples, RATE_HZ, subtype="PCM_16", format="WAV")
    path.write_bytes(memory.getbuffer())  # soundfile's own errors do not say that a disk is full


def _check_file(path: Path) -> None:
    if not path.is_file():
        hint = "paths are relative to the manifest; those of another machine are put right by: oktopk data an4"
        raise DataError("missing", path, f"there is no such file; {hint} FOLDER --out DIR")
    if not path.stat().st_size:
        raise DataError("empty", path, "has no bytes; make the file again")


@contextmanager
def _opened(file: Path | io.BytesIO, name: str | Path) -> Iterator[Any]:
    try:
        with soundfile.SoundFile(file) as sound:
            _check(sound, name)
            yield sound
    except (soundfile.LibsndfileError, OSError) as error:
        reason = getattr(error, "error_string", None) or error
        raise DataError("unreadable", name, f"cannot be read as wav or NIST sphere ({reason})") from None


def _check(sound: Any, name: str | Path) -> None:
    if sound.samplerate != RATE_HZ:
        got = f"wanted {RATE_HZ} Hz, got {sound.samplerate} Hz"
        raise DataError("wrong rate", name, f"{got}; convert it: sox IN -r {RATE_HZ} OUT")
    if sound.channels != 1:
        raise DataError("stereo", name, f"wanted one channel, got {sound.channels}; convert it: sox IN OUT remix -")
    if sound.frames == 0:
        raise DataError("empty", name, "has a header and no samples; make the file again")
    if sound.subtype in ("FLOAT", "DOUBLE"):  # libsndfile would cut [-1, 1] to integers: silence
        raise DataError("unreadable", name, "wanted 16-bit samples, got floating point; convert it: sox IN -b 16 OUT")


def _check_sphere_header(data: bytes, name: str | Path) -> None:
    """Raise if the second line of a sphere file is not the size of its header: libsndfile would seek there blindly."""
    size = data[len(_SPHERE) :].lstrip(b"\r\n")[:8].strip()
    good = size.isdigit() and 0 < int(size) <= len(data) and b"end_head" in data[: int(size)]
    if data.startswith(_SPHERE) and not good:
        found = f"its size is said to be {size.decode('ascii', 'replace')!r}, and the file has {len(data)} bytes"
        raise DataError("unreadable", name, f"has a bad NIST header: {found}; is the download complete?")
