"""The gradients that are exchanged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

POOL = 3
"""Made in advance and used in turn, so that making them is not timed."""


def make_pool(numel: int) -> list[Tensor]:
    """Return some gradients, others on every rank."""
    return [heavy_tailed(numel, seed=100 * dist.get_rank() + i) for i in range(POOL)]


def heavy_tailed(numel: int, seed: int, device: str = "cpu") -> Tensor:
    """Return a gradient of which few elements carry most."""
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(seed), device=device).pow_(3)
