"""A model of yours for `oktopk bench step`:

    sudo oktopk bench step --model examples.bench_factory:make --ranks 2 --mbit 100

What is asked of the factory is in docs/bench.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def make():
    """Return a net, what makes its batches, and its loss."""
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return net, batch, F.cross_entropy


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return what the net is called with, and what the loss compares its output to."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 64, generator=generator), torch.randint(10, (size,), generator=generator)
