"""The small nets that ranks train, and their data."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SINGLE, DOUBLE, BRAIN, HALF = torch.float32, torch.float64, torch.bfloat16, torch.float16


class Net(nn.Module):
    """A small net with weights, biases, a norm, and a branch that a forward pass may leave out."""

    def __init__(self, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.entry = nn.Linear(8, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)
        self.branch = nn.Linear(width, width)
        self.exit = nn.Linear(width, 4)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        hidden = torch.tanh(self.entry(x))
        hidden = self.norm(hidden + self.body(hidden))
        return self.exit(hidden + self.branch(hidden) if branch else hidden)


def frozen() -> Net:
    net = Net()
    net.entry.requires_grad_(False)
    net.body[2].weight.requires_grad_(False)
    return net


class Chain(nn.Module):
    """Linear layers with a tanh after each, every layer in a dtype of its own."""

    def __init__(self, widths: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = zip(widths, widths[1:], dtypes, strict=False)
        self.layers = nn.ModuleList(nn.Linear(first, second).to(dtype) for first, second, dtype in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


def batch(rank: int, step: int, outputs: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a rank at a step: always the same ones, other ones for each."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)
    x, y = (torch.randn(8, n, generator=generator, dtype=torch.float64).to(dtype) for n in (8, outputs))
    return x, y


def loss_of(model: nn.Module, rank: int, step: int, **forward: Any) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x, **forward), y)


def step_(model: nn.Module, step: int, **forward: Any) -> None:
    """Make the gradients of this rank's batch of this step, and no others."""
    model.zero_grad()
    loss_of(model, dist.get_rank(), step, **forward).backward()


def descend_(module: nn.Module, rate: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
