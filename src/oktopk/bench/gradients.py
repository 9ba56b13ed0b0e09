"""The gradients that the benchmarks exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

POOL = 3
"""Number of gradients made in advance and used in turn, because making one must not be timed."""


def make_pool(numel: int) -> list[Tensor]:
    """Return `POOL` gradients, different on every rank."""
    return [heavy_tailed(numel, seed=100 * dist.get_rank() + i) for i in range(POOL)]


def heavy_tailed(numel: int, seed: int, device: str = "cpu") -> Tensor:
    """Return a gradient of which few elements carry most of the mass."""
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(seed), device=device).pow_(3)
