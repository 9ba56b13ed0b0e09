from __future__ import annotations

import numpy as np
import pytest
import torch

from oktopk.errors import InputError, SettingError
from oktopk.train.data.features import Augmentation, resampled, spectrogram


def noise(samples: int, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def tone(hertz: float, samples: int = 16_000) -> torch.Tensor:
    return 0.3 * torch.sin(2 * torch.pi * hertz * torch.arange(samples) / 16_000)


@pytest.mark.parametrize("samples", [1, 159, 160, 161, 320, 16_001])
def test_a_frame_every_ten_milliseconds(samples: int) -> None:
    assert spectrogram(noise(samples)).shape == (161, 1 + samples // 160)


def test_a_tone_peaks_at_its_bin_and_a_click_at_its_frame() -> None:
    for bin_ in (5, 88, 140):
        peaks = spectrogram(tone(50.0 * bin_)).argmax(0)[2:-2]
        assert torch.equal(peaks, torch.full_like(peaks, bin_))
    click = torch.zeros(1600)
    click[800] = 1.0
    assert spectrogram(click).sum(0).argmax() == 5


def test_the_values_are_normalised_logs_of_hamming_windowed_magnitudes() -> None:
    samples = np.random.default_rng(0).normal(scale=0.2, size=1600)
    padded = np.concatenate([np.zeros(160), samples, np.zeros(160)])
    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(320) / 320)
    values = np.stack([np.log1p(np.abs(np.fft.rfft(window * padded[at : at + 320]))) for at in range(0, 1601, 160)], 1)
    wanted = (values - values.mean()) / values.std()
    assert np.abs(spectrogram(torch.from_numpy(samples)).numpy() - wanted).max() < 1e-9


def test_quiet_noise_is_normalised_and_silence_is_zeros() -> None:
    for loudness in (1.0, 1e-4):
        values = spectrogram(noise(5000) * loudness)
        assert values.mean().abs() < 1e-4
        assert (values.std(correction=0) - 1).abs() < 1e-3
    assert torch.equal(spectrogram(torch.zeros(5000)), torch.zeros(161, 32))


@pytest.mark.parametrize("shape", [(0,), (2, 400)])
def test_refuses_what_is_no_recording(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="row of samples"):
        spectrogram(torch.zeros(shape))


def test_the_same_generator_gives_the_same_variation_and_no_variation_the_same_samples() -> None:
    samples = noise(3000)
    first, again, other = (Augmentation().apply(samples, torch.Generator().manual_seed(seed)) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert first.shape != other.shape
    still = Augmentation(speed=(1.0, 1.0), gain_db=(0.0, 0.0))
    assert torch.allclose(still.apply(samples, torch.Generator()), samples, atol=1e-6)


def test_variations_stay_within_bounds_and_fill_them() -> None:
    generator = torch.Generator().manual_seed(0)
    varied = [Augmentation().apply(torch.ones(10_000), generator) for _ in range(200)]
    speeds = [10_000 / each.numel() for each in varied]
    gains = [20 * each[0].log10().item() for each in varied]
    assert 0.85 <= min(speeds) < 0.87
    assert 1.13 < max(speeds) <= 1.1501
    assert -6 <= min(gains) < -5.5
    assert 7.5 < max(gains) <= 8


def test_faster_is_shorter_and_higher() -> None:
    faster = resampled(tone(1000.0), 1.1)
    assert faster.numel() == round(16_000 / 1.1)
    assert spectrogram(faster).mean(1).argmax() == 22  # 1100 Hz


@pytest.mark.parametrize("bad", [{"speed": (0.0, 1.0)}, {"speed": (1.2, 1.0)}, {"gain_db": (3.0, -3.0)}])
def test_refuses_bounds_that_cannot_be(bad: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        Augmentation(**bad)
