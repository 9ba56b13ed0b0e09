"""Trainings as users have them, on one GPU over NCCL: no step leaves the device path, and none waits for the host."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import oktopk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")

WARM_UP, STEPS = 8, 50


@dataclass(frozen=True)
class Habit:
    """One way to train: settings of `attach`, and what is done to the model, the passes and the loss."""

    settings: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scales: bool = False
    micro_steps: int = 1
    change: Callable[[nn.Module], Any] = lambda model: model


HABITS = {
    "plain": Habit(),
    "clip": Habit({"clip": 0.5}),
    "a scaler": Habit(autocast=torch.float16, scales=True),
    "a scaler, and clip": Habit({"clip": 0.5}, autocast=torch.float16, scales=True),
    "accumulation": Habit(micro_steps=3),
    "bf16 model": Habit(dtype=torch.bfloat16),
    "fp16 model": Habit(dtype=torch.float16),
    "bf16 autocast, compiled": Habit(autocast=torch.bfloat16, change=torch.compile),
}


@pytest.fixture(scope="module", autouse=True)
def _world():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextmanager
def nothing_waits():
    """Let torch refuse every operation that would wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Training:
    """A small net that is trained by one habit."""

    def __init__(self, habit, wire, device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 400)).to(device, habit.dtype)
        self.habit, self.ddp = habit, DistributedDataParallel(net, bucket_cap_mb=0.5)
        self.scaler = GradScaler(device, enabled=habit.scales)
        given = {"scaler": self.scaler} if habit.scales else {}
        algorithm = oktopk.OkTopk(density=0.05, wire=wire)
        self.handle = oktopk.attach(self.ddp, algorithm, dense_steps=2, timeout=60, **habit.settings, **given)
        self.model, self.optimizer = habit.change(self.ddp), torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.x = torch.randn(8, 300, device=device, dtype=habit.dtype)
        self.autocast = torch.autocast(device, habit.autocast, enabled=habit.autocast is not None)

    def step(self):
        """Make a step; `GradScaler.step` waits for the host itself, and is left out."""
        for micro_step in range(self.habit.micro_steps):
            is_last = micro_step == self.habit.micro_steps - 1
            with nullcontext() if is_last else self.ddp.no_sync():
                with self.autocast:
                    loss = self.model(self.x).square().mean()
                self.scaler.scale(loss).backward()
        if not self.habit.scales:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("wire", ["auto", "int8"])
@pytest.mark.parametrize("name", HABITS)
def test_no_step_waits_for_the_host(name, wire):
    training = Training(HABITS[name], wire, "cuda")
    for _ in range(WARM_UP):
        training.step()
    with nothing_waits():
        for _ in range(STEPS):
            training.step()
    last = training.handle.last
    assert (last.step, last.phase, last.skipped) == (WARM_UP + STEPS - 1, "sparse", False)
    assert last.nnz_by_owner == ()
    training.handle.detach()
