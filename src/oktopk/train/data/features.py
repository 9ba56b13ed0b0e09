"""Features of a recording: the log spectrogram that the recogniser reads, and variations for training."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from oktopk.errors import InputError
from oktopk.train.data.labels import ctc_frames, encode

WINDOW_SAMPLES = 320  # 20 ms
HOP_SAMPLES = 160  # 10 ms
BINS = WINDOW_SAMPLES // 2 + 1
TIME_STRIDE = 2  # the net's first convolution halves the frames

T = TypeVar("T", int, Tensor)

# Below this a spectrogram is constant but for rounding. One count of 16-bit noise lies four powers of ten above it.
_SILENT_STD = 1e-7


def spectrogram(samples: Tensor) -> Tensor:
    """Return the log magnitudes of `samples` [n] as [161, 1 + n // 160], with mean 0 and standard deviation 1.

    Silence gives zeros. Bin i is centred on i * 50 Hz, frame t on sample t * 160.
    """
    if samples.ndim != 1 or not samples.numel():
        raise InputError(f"a spectrogram wants a row of samples, not shape {list(samples.shape)}: check the recording")
    window = torch.hamming_window(WINDOW_SAMPLES, dtype=samples.dtype, device=samples.device)
    # Zeros and not a reflection at the ends: a recording shorter than half a window has nothing to reflect.
    spectrum = torch.stft(
        samples, WINDOW_SAMPLES, HOP_SAMPLES, window=window, center=True, pad_mode="constant", return_complex=True
    )
    values = spectrum.abs().log1p()
    std, mean = torch.std_mean(values, correction=0)
    return (values - mean) / std.clamp_min(_SILENT_STD)


def output_frames(frames: T) -> T:
    """Return the number of frames of the net's output for `frames` of a spectrogram: half of them, rounded up."""
    return (frames + TIME_STRIDE - 1) // TIME_STRIDE


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Bounds of the variation of a recording, drawn uniformly each time it is used."""

    speed: tuple[float, float] = (0.85, 1.15)  # factor by which it is played faster; the pitch moves with it
    gain_db: tuple[float, float] = (-6.0, 8.0)

    def apply(self, samples: Tensor, text: str, generator: torch.Generator) -> Tensor:
        """Return `samples` [n], varied, as [about n / speed]; the same for the same state of `generator`.

        No recording is made too short for its text. The result is not clipped to [-1, 1], because a spectrogram
        follows, not a loudspeaker.
        """
        draws: list[float] = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        bounds = (self.speed, self.gain_db)
        speed, gain_db = (low + (high - low) * draw for (low, high), draw in zip(bounds, draws, strict=True))
        fewest_samples = HOP_SAMPLES * TIME_STRIDE * (ctc_frames(encode(text)) - 1)
        fastest = max(1.0, samples.numel() / max(1, fewest_samples))
        size = max(1, round(samples.numel() / min(speed, fastest)))
        played = F.interpolate(samples.view(1, 1, -1), size=size, mode="linear", align_corners=True).view(-1)
        return played * 10 ** (gain_db / 20)
