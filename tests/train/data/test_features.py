import numpy as np
import pytest
import torch

from oktopk.errors import InputError
from oktopk.train.data.features import Augmentation, spectrogram

NOISE = 0.1 * torch.randn(5000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("samples", [1, 159, 160, 161, 320, 1600])
def test_the_values_are_normalised_logs_of_hamming_windowed_magnitudes(samples):
    """A frame every ten milliseconds, centred on its sample, zeros beyond the ends."""
    signal = np.random.default_rng(0).normal(scale=0.2, size=samples)
    padded = np.concatenate([np.zeros(160), signal, np.zeros(160)])
    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(320) / 320)
    starts = range(0, samples + 1, 160)
    values = np.stack([np.log1p(np.abs(np.fft.rfft(window * padded[at : at + 320]))) for at in starts], 1)
    wanted = (values - values.mean()) / max(values.std(), 1e-7)  # one sample is an impulse, whose spectrum is flat
    assert np.abs(spectrogram(torch.from_numpy(signal)).numpy() - wanted).max() < 1e-9


def test_quiet_noise_is_normalised_silence_is_zeros_and_what_is_no_recording_is_refused():
    values = spectrogram(NOISE * 1e-4)
    assert values.mean().abs() < 1e-4
    assert (values.std(correction=0) - 1).abs() < 1e-3
    assert torch.equal(spectrogram(torch.zeros(5000)), torch.zeros(161, 32))
    for shape in ((0,), (2, 400)):
        with pytest.raises(InputError, match="row of samples"):
            spectrogram(torch.zeros(shape))


def test_the_same_generator_gives_the_same_variation_and_no_variation_the_same_samples():
    samples, vary = NOISE[:3000], Augmentation().apply
    first, again, other = (vary(samples, "A", torch.Generator().manual_seed(seed)) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert first.shape != other.shape
    still = Augmentation(speed=(1.0, 1.0), gain_db=(0.0, 0.0))
    assert torch.allclose(still.apply(samples, "A", torch.Generator()), samples, atol=1e-6)


def test_variations_stay_within_bounds_and_fill_them():
    generator = torch.Generator().manual_seed(0)
    varied = [Augmentation().apply(torch.ones(10_000), "A", generator) for _ in range(200)]
    speeds = [10_000 / each.numel() for each in varied]
    gains = [20 * each[0].log10().item() for each in varied]
    assert 0.85 <= min(speeds) < 0.87 < 1.13 < max(speeds) <= 1.1501
    assert -6 <= min(gains) < -5.5 < 7.5 < max(gains) <= 8


@pytest.mark.parametrize(("text", "frames"), [("SIXTHS", 11), ("EELS", 9), ("A", 7), ("", 7)])
def test_no_variation_is_too_short_for_its_text(text, frames):
    """1600 samples are 11 frames, 6 of the output; half as many again as fast, 7 and 4."""
    fast = Augmentation(speed=(1.5, 1.5)).apply(NOISE[:1600], text, torch.Generator())
    assert spectrogram(fast).shape[1] == frames
