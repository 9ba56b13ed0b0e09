"""Resample from the engine's sample rate to 16 kHz: a windowed sinc, one filter for each phase."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.float32]

# Of the filter. From 22,050 to 16,000 Hz its transition band is 6.4 to 8.8 kHz.
ZERO_CROSSINGS = 16  # of the sinc, on each side
ROLL_OFF = 0.95  # cut-off as a part of the lower rate's Nyquist frequency; frequencies above that fold back
KAISER_BETA = 8.0  # of the window: side lobes near -80 dB, below the noise of 16 bits


def resample(signal: Signal, from_hz: int, to_hz: int) -> Signal:
    """Return `signal` at another rate; the same bits in every run, with any number of threads.

    Products are added tap by tap, elementwise: a matrix product would leave the order of the sum to the BLAS library,
    which chooses it by the number of its threads.
    """
    up, down = to_hz // gcd(from_hz, to_hz), from_hz // gcd(from_hz, to_hz)
    filters, starts = _phases(up, down)
    num_taps = filters.shape[1]
    num_out = -(-len(signal) * up // down)
    num_blocks = -(-num_out // up)  # a block: `down` samples in, `up` samples out
    before = num_taps // 2 - 1
    padded = np.zeros(num_blocks * down + num_taps + before, np.float32)
    padded[before : before + len(signal)] = signal
    # Row i is the i-th input of every block, so that rows are contiguous.
    rows = np.ascontiguousarray(
        np.lib.stride_tricks.sliding_window_view(padded, down + num_taps)[::down][:num_blocks].T
    )
    out = np.zeros((up, num_blocks), np.float32)
    for tap in range(num_taps):
        out += filters[:, tap, None] * rows[starts + tap]
    return np.ascontiguousarray(out.T).reshape(-1)[:num_out]


@lru_cache(maxsize=4)
def _phases(up: int, down: int) -> tuple[Signal, NDArray[np.intp]]:
    """Return the filter of each of `up` phases, and where in a block's input it begins."""
    cutoff = ROLL_OFF * min(1.0, up / down)
    half = int(np.ceil(ZERO_CROSSINGS / cutoff))
    middle = np.arange(up) * down / up
    starts = np.floor(middle).astype(np.intp)
    distance = np.arange(-half + 1, half + 1)[None, :] - (middle - starts)[:, None]
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (distance / half) ** 2, 0, None))) / np.i0(KAISER_BETA)
    filters = cutoff * np.sinc(cutoff * distance) * window
    return (filters / filters.sum(axis=1, keepdims=True)).astype(np.float32), starts
