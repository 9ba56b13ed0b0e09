"""Clipping and the density schedule do what their equations say."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import MemorySink, OkTopk
from oktopk.selection import num_selected
from tests.cases import device_step
from tests.ddp.harness import Net, Worlds, attach, grads_of, loss_of, relative_error, step_

pytestmark = pytest.mark.processes

ROUNDING = 1e-5  # of fp32 norms and products


def norm_of(grads: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


def clipped_steps(clip: float, dense_steps: int, scale: float, on_device: bool = False) -> list[dict[str, float]]:
    """Return, for each step, this rank's norm, the delivered norm, and how far it is from what it should be."""
    model, size = DDP(Net(), bucket_cap_mb=0.01), dist.get_world_size()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1 else None
    attached = attach(model, clip=clip, dense_steps=dense_steps, scaler=scaler)
    local, seen = copy.deepcopy(model.module), []
    with device_step() if on_device else nullcontext() as device:
        for step in range(4):
            step_(local, step)
            own = {name: grad.double() for name, grad in grads_of(local).items() if grad is not None}
            norm, limit = norm_of(own), clip / math.sqrt(size) if step >= dense_steps else math.inf
            for mean in own.values():
                dist.all_reduce(mean.mul_(min(1.0, limit / norm) / size))
            model.zero_grad()
            loss = loss_of(model, dist.get_rank(), step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            came = {name: grad.double() / scale for name, grad in grads_of(model.module).items()}
            error = max(relative_error(came[name], own[name]) for name in came)
            seen.append({"own": norm, "delivered": norm_of(came), "error": error})
    assert device is None or device.runs
    attached.detach()
    return seen


@pytest.mark.parametrize(("size", "scale", "on_device"), [(1, 1.0, True), (2, 1024.0, True), (3, 1024.0, False)])
def test_each_rank_is_clipped_to_its_share_before_the_exchange(
    worlds: Worlds, size: int, scale: float, on_device: bool
) -> None:
    clip = 0.05
    for seen in worlds.run(size, clipped_steps, clip, 1, scale, on_device):
        assert all(step["error"] <= ROUNDING for step in seen)
        assert all(step["own"] > clip for step in seen), "there was to be something to clip"
        assert seen[0]["delivered"] > clip, "the dense step was to be left alone"
        assert all(step["delivered"] <= clip / math.sqrt(size) * (1 + ROUNDING) for step in seen[1:])


def test_a_gradient_below_the_limit_is_left_alone(worlds: Worlds) -> None:
    for seen in worlds.run(2, clipped_steps, 1e6, 0, 1.0):
        assert all(step["error"] <= 1e-6 for step in seen)


def scheduled(schedule: list[tuple[int, float]], steps: int) -> list[tuple[str, int, int]]:
    model, sink = DDP(nn.Linear(16, 64, bias=False)), MemorySink()
    attached = attach(model, OkTopk(density=0.01), dense_steps=2, density_schedule=schedule, sinks=[sink])
    for step in range(steps):
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    attached.detach()
    return [(record.phase, record.step, record.wanted) for record in sink.records]


def test_the_schedule_gives_its_densities_at_its_steps(worlds: Worlds) -> None:
    schedule = [(3, 0.25), (1, 0.0625), (2, 0.015625)]
    wanted = [1024] * 2 + [num_selected(1024, d) for d in [0.25] * 3 + [0.0625] + [0.015625] * 2 + [0.01] * 3]
    phases = ["dense"] * 2 + ["sparse"] * 9
    for seen in worlds.run(2, scheduled, schedule, 11):
        assert seen == list(zip(phases, range(11), wanted, strict=True))
