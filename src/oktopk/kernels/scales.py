"""The scales of a ranking by segments, from running means of the squared gradient; on any device, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor

MEMORY = 0.9
"""Part of a running mean that one more measurement leaves."""

MOST = 2.0**16
"""Largest scale, and the inverse of the smallest."""


def running(squares: Tensor, measured: Tensor) -> Tensor:
    """Return the running means after one more measurement; one that is not finite is not taken."""
    mixed = torch.where(squares > 0, MEMORY * squares + (1 - MEMORY) * measured, measured)
    return torch.where(measured.isfinite(), mixed, squares)


def scales_of(squares: Tensor, lengths: Tensor) -> Tensor:
    """Return each segment's rms over the whole vector's; 1 for a segment without a gradient.

    It lies between 1 / MOST and MOST: whatever the gradient, no score is infinite, or NaN.
    """
    whole = (squares * (lengths / lengths.sum().clamp(min=1)).to(squares.dtype)).sum()
    ratio = squares / whole.clamp(min=torch.finfo(squares.dtype).tiny)
    return torch.where((squares > 0) & (whole > 0), ratio, 1.0).sqrt().clamp(1 / MOST, MOST)
