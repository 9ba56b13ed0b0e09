"""A net that is all exchange: many parameters, and almost nothing to compute with a batch of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 3000
LAYERS = 3


def wide() -> tuple[nn.Module, Callable[[int, int], tuple[Tensor, Tensor]], Callable[[Any, Any], Tensor]]:
    """Return three Linear layers of 3000 x 3000, 27.0 M parameters, that learn to return their input."""
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), _batch, F.mse_loss


def _batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs
