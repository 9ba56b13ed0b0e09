"""What error feedback is for: sparse training ends where dense training does, in every part of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import OkTopk, OkTopkPaper
from tests.ddp.harness import Worlds, attach

HEADS = {"small": 8, "middle": 32, "large": 64}
"""Outputs of three linear maps of the same 48 inputs."""

INPUTS, STEPS = 48, 600


class Heads(nn.Module):
    """Three heads, one after another in one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(INPUTS, size, bias=False) for name, size in HEADS.items()})
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return what each head says."""
        return {name: head(inputs) for name, head in self.heads.items()}


def teacher(name: str) -> Tensor:
    """Return the weights to learn: all of one size, so that their gradient agrees with itself."""
    return torch.randn(HEADS[name], INPUTS, generator=torch.Generator().manual_seed(HEADS[name])).sign()


def errors_after(algorithm: Any) -> dict[str, float]:
    """Return each head's relative error after training it, sparsely from the first step on, or dense."""
    model = DDP(Heads())
    if algorithm is not None:
        attach(model, algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(dist.get_rank())
    teachers = {name: teacher(name) for name in HEADS}
    for step in range(STEPS):
        inputs = torch.randn(32, INPUTS, generator=generator)
        answers = model(inputs)
        loss = sum((answers[name] - inputs @ weight.T).square().sum() for name, weight in teachers.items()) / 32
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads = model.module.heads
    return {name: float((heads[name].weight - weight).norm() / weight.norm()) for name, weight in teachers.items()}


CASES = {"dense": (None,), "bounded": (OkTopk(ranking="scaled"),), "paper": (OkTopkPaper(),)}


def test_three_heads_end_where_dense_ends(worlds: Worlds) -> None:
    """The ranking by gradient + residual stopped at errors of 0.2 to 0.5 in a head."""
    errors = {name: by_rank[0] for name, by_rank in worlds.run_all(2, errors_after, CASES).items()}
    for algorithm in ("bounded", "paper"):
        for name, error in errors[algorithm].items():
            assert error <= 1.25 * errors["dense"][name] + 1e-3, errors
