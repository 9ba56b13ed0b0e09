"""A model of your own for `oktopk bench step`:

    sudo oktopk bench step --model examples.bench_factory:make --ranks 2 --mbit 100

docs/bench.md defines the factory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def make():
    """Return a net, the function that makes its batches, and its loss."""
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return net, batch, F.cross_entropy


def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the net's input, and the target of the loss."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 64, generator=generator), torch.randint(10, (size,), generator=generator)
