"""Features of a recording: the log spectrogram that the recogniser reads, and variations for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from oktopk.errors import InputError, SettingError

WINDOW_SAMPLES = 320  # 20 ms
HOP_SAMPLES = 160  # 10 ms
BINS = WINDOW_SAMPLES // 2 + 1

# Below this a spectrogram is constant but for rounding. One count of 16-bit noise lies four powers of ten above it.
_SILENT_STD = 1e-7


def spectrogram(samples: Tensor) -> Tensor:
    """Return the log magnitudes of `samples` [n] as [161, 1 + n // 160], with mean 0 and standard deviation 1.

    Silence gives zeros. Bin i is centred on i * 50 Hz, frame t on sample t * 160.

    >>> spectrogram(torch.zeros(16_000)).shape
    torch.Size([161, 101])
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


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Bounds of the variation of a recording, drawn uniformly each time it is used.

    speed     factor by which it is played faster; the pitch moves with it
    gain_db   decibels by which it is amplified
    """

    speed: tuple[float, float] = (0.85, 1.15)
    gain_db: tuple[float, float] = (-6.0, 8.0)

    def __post_init__(self) -> None:
        if not 0 < self.speed[0] <= self.speed[1]:
            raise SettingError(f"speed must be (low, high) with 0 < low <= high, not {self.speed}")
        if not self.gain_db[0] <= self.gain_db[1]:
            raise SettingError(f"gain_db must be (low, high) with low <= high, not {self.gain_db}")

    def apply(self, samples: Tensor, generator: torch.Generator, least_samples: int = 1) -> Tensor:
        """Return `samples` [n], varied, as [about n / speed]; the same for the same state of `generator`.

        No recording is made shorter than `least_samples`, so that its text still fits. The result is not clipped to
        [-1, 1], because a spectrogram follows, not a loudspeaker.
        """
        speed, gain_db = (_uniform(bounds, generator) for bounds in (self.speed, self.gain_db))
        fastest = max(1.0, samples.numel() / max(1, least_samples))
        return resampled(samples, min(speed, fastest)) * 10 ** (gain_db / 20)


def resampled(samples: Tensor, speed: float) -> Tensor:
    """Return `samples` as they sound `speed` times as fast, by linear interpolation; at least one sample."""
    wanted = max(1, round(samples.numel() / speed))
    return F.interpolate(samples.view(1, 1, -1), size=wanted, mode="linear", align_corners=True).view(-1)


def _uniform(bounds: tuple[float, float], generator: torch.Generator) -> float:
    low, high = bounds
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()
