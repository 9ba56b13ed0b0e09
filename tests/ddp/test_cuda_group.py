"""The laws of an attachment whose steps stay on the device: with the plain kernels, on any machine."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import MemorySink, OkTopk, StepRecord
from tests.cases import broken_readback, device_step
from tests.ddp.harness import Net, Raised, Worlds, attach, error_of, loss_of, same_bits, through_a_file

pytestmark = pytest.mark.processes

STEPS, DENSE_STEPS = 8, 2


def grads_of(model: DDP) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.module.named_parameters() if p.grad is not None}


def step_(model: DDP, step: int, spoil: str = "") -> dict[str, Tensor]:
    """Make a step's gradients; return them. On rank 0 that of the parameter to spoil, if there is one, is NaN."""
    model.zero_grad()
    loss = loss_of(model, dist.get_rank(), step)
    if spoil and dist.get_rank() == 0:
        spoiling = model.module.get_parameter(spoil).register_hook(lambda grad: grad * math.nan)
        loss.backward()
        spoiling.remove()
    else:
        loss.backward()
    return grads_of(model)


def started(algorithm: OkTopk, **config: Any) -> tuple[DDP, oktopk.Attached]:
    model = DDP(Net(), bucket_cap_mb=0.005)
    attached = attach(model, algorithm, **{"dense_steps": DENSE_STEPS, "exclude": "*.bias", "timeout": 4.0, **config})
    return model, attached


def balance(density: float, exclude: Any) -> tuple[float, list[dict[str, Tensor]], int]:
    """Return the largest part of an element's gradients that is lost, each step's gradients, the number of groups."""
    with device_step() as seen:
        model, attached = started(OkTopk(density=density, wire="fp32"), exclude=exclude)
        local = copy.deepcopy(model.module)
        applied, came, size = ({n: torch.zeros_like(p) for n, p in local.named_parameters()} for _ in range(3))
        delivered = []
        for step in range(STEPS):
            delivered.append(step_(model, step))
            local.zero_grad()
            loss_of(local, dist.get_rank(), step).backward()
            for name, p in local.named_parameters():
                assert p.grad is not None
                applied[name] += delivered[-1][name]
                came[name] += p.grad
                size[name] += p.grad.abs()
        lost = 0.0
        for name, residual in attached.residual.items():
            missing = came[name].view(-1) - residual
            total, magnitude = missing.clone(), size[name].view(-1).clone()
            dist.all_reduce(total)
            dist.all_reduce(magnitude)
            gap = (total / dist.get_world_size() - applied[name].view(-1)).abs() / (magnitude + 1e-12)
            lost = max(lost, float(gap.max()))
        assert seen.runs
        assert attached.last is not None
        attached.detach()
        return lost, delivered, len(attached.last.buckets)


@pytest.mark.parametrize(
    ("density", "exclude"),
    [(0.05, "*.bias"), (0.05, ["exit.*", "branch.*"]), (1.0, [])],
    ids=["without biases", "without a lane", "everything"],
)
@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost_and_all_ranks_get_the_same(worlds: Worlds, size: int, density: float, exclude: Any) -> None:
    outcomes = worlds.run(size, balance, density, exclude)
    for lost, delivered, groups in outcomes:
        assert groups > 1
        assert lost < 1e-5
        for mine, first in zip(delivered, outcomes[0][1], strict=True):
            assert same_bits(mine, first)


def accident(on_nonfinite: str, spoil: str) -> tuple[bool, bool, Raised | None, int, list[StepRecord]]:
    """Return whether residuals are as before, what was delivered, what was raised, in which step; and the records."""
    with device_step():
        sink = MemorySink()
        model, attached = started(OkTopk(density=0.05, wire="fp32"), on_nonfinite=on_nonfinite, sinks=[sink])
        for step in range(4):
            step_(model, step)
        before = attached.residual
        spoilt = step_(model, 4, spoil)
        undone = same_bits(attached.residual, before)
        as_said = not any(bool(grad.any()) for grad in spoilt.values())
        raised, step = None, 4
        while raised is None and step < 8:
            step += 1
            raised = error_of(lambda step=step: step_(model, step))
        attached.detach()
        return undone, as_said, raised, step, sink.records


@pytest.mark.parametrize("spoil", ["exit.weight", "entry.bias"])  # in the first lane; in the last, and it travels dense
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_is_not_finite_leaves_no_trace(worlds: Worlds, size: int, on_nonfinite: str, spoil: str) -> None:
    for undone, as_said, raised, step, records in worlds.run(size, accident, on_nonfinite, spoil):
        assert undone
        assert as_said
        refused = records[4]
        assert (refused.selected, refused.nnz, refused.threshold, refused.compression_ratio) == (0, 0, None, None)
        assert all(part.skipped for part in refused.buckets)
        assert refused.reason is not None
        assert all(record.to_json() for record in records)
        skipped = [record.step for record in records if record.skipped]
        if on_nonfinite == "raise":
            assert skipped == [4, 6]
            assert raised is not None
            assert "step 4" in raised.message
            assert step == 6  # on all ranks the same one, though what step 4 did was asked for before
        else:
            assert raised is None
            assert skipped == [4]
            assert len(records) == 9


def accidents(loads: bool) -> tuple[list[int], bool, list[int]]:
    """Spoil steps 3 and 4, and go on, whatever is raised; return the steps that raised, whether each of them left the
    residuals as they were, and the steps that are said to have been skipped. One rank asks for `last` at every step.
    """
    with device_step():
        sink, raised, undone = MemorySink(), [], True
        model, attached = started(OkTopk(density=0.05, wire="fp32"), sinks=[sink])
        for step in range(9):
            saved = attached.state_dict() if step == 3 else {}
            before = attached.residual
            if error_of(lambda step=step: step_(model, step, "exit.weight" if step in (3, 4) else "")) is not None:
                raised.append(step)
                undone = undone and same_bits(attached.residual, before)
            if dist.get_rank() == 0:
                assert attached.last is not None
            if step == 3 and loads:
                attached.load_state_dict(saved)
        attached.detach()
        return raised, undone, [record.step for record in sink.records if record.skipped]


def test_two_accidents_are_told_of_in_the_same_steps_on_all_ranks(worlds: Worlds) -> None:
    for raised, undone, skipped in worlds.run(2, accidents, False):
        assert (raised, undone, skipped) == ([5, 6], True, [3, 4, 5, 6])


def test_who_goes_back_to_a_checkpoint_has_left_the_accident_behind(worlds: Worlds) -> None:
    for raised, _, _ in worlds.run(2, accidents, True):
        assert raised == [6]  # only what was spoilt since


def resumed(schedule: Any) -> bool:
    with device_step():
        whole_model, whole = started(OkTopk(density=0.05, wire="fp32"), density_schedule=schedule)
        for step in range(5):
            step_(whole_model, step)
        saved = through_a_file(whole.state_dict())
        model, attached = started(OkTopk(density=0.05, wire="fp32"), density_schedule=schedule)
        attached.load_state_dict(saved)
        same = all(same_bits(step_(whole_model, step), step_(model, step)) for step in range(5, 24))
        same = same and same_bits(whole.residual, attached.residual)
        whole.detach()
        attached.detach()
        return same


@pytest.mark.parametrize("schedule", [None, [(4, 0.5), (4, 0.1)]])
def test_going_on_from_a_checkpoint_is_never_having_stopped(worlds: Worlds, schedule: Any) -> None:
    assert all(worlds.run(2, resumed, schedule))


def records() -> tuple[list[int], list[tuple[int, int, int]], int]:
    with device_step():
        sink = MemorySink()
        model, attached = started(OkTopk(density=0.05, wire="fp32"), sinks=[sink])
        for step in range(STEPS):
            step_(model, step)
            assert attached.last is not None
            assert attached.last.step == step
        steps = attached.summary().steps
        attached.detach()
        made = [(record.selected, record.nnz, record.wanted) for record in sink.records]
        return [record.step for record in sink.records], made, steps


def test_every_step_has_its_record(worlds: Worlds) -> None:
    for steps, made, count in worlds.run(2, records):
        assert steps == list(range(STEPS))
        assert count == STEPS
        for selected, nnz, wanted in made[DENSE_STEPS:]:
            assert 0 < selected <= 1.4 * wanted
            assert 0 < nnz <= 1.4 * wanted


def unreadable_stats() -> Raised | None:
    """Return what backward() says after the stats of steps could not be read on one rank."""
    with device_step():
        model, attached = started(OkTopk(density=0.05, wire="fp32"))
        raised = None
        with broken_readback("the device is gone") if dist.get_rank() == 0 else nullcontext():
            for step in range(STEPS):
                raised = raised or error_of(lambda step=step: step_(model, step))
        attached.detach()
        return raised


def test_what_breaks_behind_the_steps_ends_all_ranks(worlds: Worlds) -> None:
    first, second = worlds.run(2, unreadable_stats)
    assert first is not None
    assert second is not None
    assert "the device is gone" in first.message
    assert "the device is gone" in second.message or "rank 0" in second.message
