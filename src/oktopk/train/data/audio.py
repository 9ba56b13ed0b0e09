"""Read and write sound: 16 kHz, one channel, 16 bits. Other sound is refused by name, never converted in silence."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import soundfile
from numpy.typing import NDArray

from oktopk.train.data.errors import DataError

RATE_HZ = 16_000  # the only sample rate that is read or written
FULL_SCALE = 32_768  # divisor that brings int16 samples into [-1, 1)
DECISIVE = 2.0  # factor by which the wrong byte order must be rougher; in AN4 it is 200 times rougher

ByteOrder = Literal["big", "little"]
Samples = NDArray[np.int16]
T = TypeVar("T")

_SPHERE = b"NIST_1A"


def read_audio(path: str | Path) -> NDArray[np.float32]:
    """Return the samples of a 16 kHz mono wav or NIST sphere file, float32 in [-1, 1), or raise a `DataError`."""
    num_samples(path)
    samples: NDArray[np.float32] = _opened(path, lambda: soundfile.read(path, dtype="float32"))[0]
    if not np.isfinite(samples).all():
        raise DataError("unreadable", path, "holds NaN or Inf; make the file again")
    return samples


def read_pcm(path: str | Path, byte_order: ByteOrder | None = None) -> Samples:
    """Return the samples of a 16 kHz mono file as int16; `byte_order` is for a file without a header."""
    _check_exists(path)
    return decode_pcm(Path(path).read_bytes(), path, byte_order)


def decode_pcm(data: bytes, name: str | Path, byte_order: ByteOrder | None = None) -> Samples:
    """Return the samples in `data`: wav, NIST sphere, or headerless 16-bit PCM in `byte_order`."""
    if has_header(data):
        _check_sphere_header(data, name)
        _check(_opened(name, lambda: soundfile.info(io.BytesIO(data))), name)
        samples: Samples = _opened(name, lambda: soundfile.read(io.BytesIO(data), dtype="int16"))[0]
        return samples
    if byte_order is None:
        raise DataError("unreadable", name, "has neither a wav nor a sphere header, and no byte order was given")
    if not data:
        raise _no_bytes(name)
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
        raise DataError(
            "bad corpus",
            name,
            f"cannot tell the byte order of its raw audio: neighbouring samples differ by {big:.0f} (big endian) and "
            f"{little:.0f} (little endian) on the average; is this 16-bit PCM?",
        )
    return "big" if big < little else "little"


def write_wav(path: str | Path, samples: Samples) -> None:
    """Write int16 samples as a 16 kHz mono wav file."""
    memory = io.BytesIO()
    soundfile.write(memory, samples, RATE_HZ, subtype="PCM_16", format="WAV")
    Path(path).write_bytes(memory.getbuffer())  # soundfile's own errors do not say that a disk is full


def num_samples(path: str | Path) -> int:
    """Return the number of samples of a 16 kHz mono file, from its header alone, or raise a `DataError`."""
    _check_exists(path)
    if Path(path).stat().st_size == 0:
        raise _no_bytes(path)
    info = _opened(path, lambda: soundfile.info(path))
    _check(info, path)
    return int(info.frames)


def _check_exists(path: str | Path) -> None:
    if not Path(path).is_file():
        raise DataError("missing", path, "there is no such file")


def _no_bytes(name: str | Path) -> DataError:
    return DataError("empty", name, "has no bytes; make the file again")


def _opened(name: str | Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except (soundfile.LibsndfileError, OSError) as error:
        reason = getattr(error, "error_string", None) or error
        raise DataError("unreadable", name, f"cannot be read as wav or NIST sphere ({reason})") from None


def _check_sphere_header(data: bytes, name: str | Path) -> None:
    """Raise if the second line of a sphere file is not the size of its header: libsndfile would seek there blindly."""
    size = data[len(_SPHERE) :].lstrip(b"\r\n")[:8].strip()
    good = size.isdigit() and 0 < int(size) <= len(data) and b"end_head" in data[: int(size)]
    if data.startswith(_SPHERE) and not good:
        raise DataError(
            "unreadable",
            name,
            f"has a bad NIST header: its size is said to be {size.decode('ascii', 'replace')!r}, wanted a number up to "
            f"the file's {len(data)} bytes with end_head before it; is the download complete?",
        )


def _check(info: Any, name: str | Path) -> None:
    if info.samplerate != RATE_HZ:
        got = f"wanted {RATE_HZ} Hz, got {info.samplerate} Hz"
        raise DataError("wrong rate", name, f"{got}; convert it: sox IN -r {RATE_HZ} OUT")
    if info.channels != 1:
        raise DataError("stereo", name, f"wanted one channel, got {info.channels}; convert it: sox IN OUT remix -")
    if info.frames == 0:
        raise DataError("empty", name, "has a header and no samples; make the file again")


def _roughness(data: bytes, dtype: str) -> float:
    samples = np.frombuffer(data[: len(data) // 2 * 2], dtype).astype(np.int32)
    return float(np.abs(np.diff(samples)).mean()) if len(samples) > 1 else 0.0
