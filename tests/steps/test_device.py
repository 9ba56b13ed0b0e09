"""Steps on the device path, with the reference kernels: what changes between one step and the next."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import MemorySink, NonFiniteError, OkTopk, Reducer, run_local
from tests.cases import device_step
from tests.ddp.harness import Worlds, attach

pytestmark = pytest.mark.processes


def step_(model: DDP, scaler: torch.amp.GradScaler | None = None, bad: bool = False) -> None:
    model.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean() * (math.nan if bad else 1.0)
    (loss if scaler is None else scaler.scale(loss)).backward()


def change(what: str) -> int:
    """Return the number of steps after a change between them; the words of a step then have another shape."""
    with device_step():
        model = DDP(nn.Linear(64, 64))
        attached = attach(model, OkTopk(density=0.1), exclude=())
        scaler = torch.amp.GradScaler("cpu") if what == "scaler" else None
        for _ in range(4):
            step_(model)
        if what == "exclude":
            attached.exclude("*bias")
        for _ in range(4):
            step_(model, scaler)
        steps = attached.summary().steps
        attached.detach()
        return int(steps)


@pytest.mark.parametrize("what", ["exclude", "scaler"])
def test_a_dense_tail_or_a_scaler_may_come_later(worlds: Worlds, what: str) -> None:
    assert worlds.run(1, change, what) == [8]


def late_error() -> list[tuple[bool, int, int]]:
    with device_step():
        model, sink = DDP(nn.Linear(64, 64)), MemorySink()
        attached = attach(model, OkTopk(density=0.1), sinks=[sink])
        for step in range(7):
            try:
                step_(model, bad=step == 4)
            except RuntimeError:
                assert step == 6
        attached.detach()
        return [(record.skipped, record.selected, record.nnz) for record in sink.records]


def test_a_step_that_raises_an_earlier_ones_error_is_recorded_as_skipped(worlds: Worlds) -> None:
    records = worlds.run(1, late_error)[0]
    assert [records[step] for step in (4, 6)] == [(True, 0, 0)] * 2
    assert not records[5][0]


def skipped(scaled_first: bool) -> bool:
    """Return whether an unscaled step that is not finite delivers zeros."""
    model, scaler = DDP(nn.Linear(64, 64)), torch.amp.GradScaler("cpu")
    attached = attach(model, OkTopk(density=0.1), on_nonfinite="skip")
    if scaled_first:
        step_(model, scaler)
    step_(model, bad=True)
    attached.detach()
    return not any(bool(parameter.grad.any()) for parameter in model.parameters())


@pytest.mark.parametrize("scaled_first", [False, True])
def test_an_unscaled_step_is_skipped_with_zeros_whatever_came_before(worlds: Worlds, scaled_first: bool) -> None:
    assert worlds.run(1, skipped, scaled_first) == [True]


def lives_on() -> bool:
    model = DDP(nn.Linear(64, 64))
    attached = attach(model, OkTopk(density=0.1))
    step_(model)
    gc.collect()
    gc.disable()
    try:
        group = weakref.ref(attached.group)
        attached.detach()
        del attached, model
        assert dist.is_initialized()
        return group() is not None
    finally:
        gc.enable()


def test_a_detached_group_needs_no_garbage_collector(worlds: Worlds) -> None:
    assert worlds.run(1, lives_on) == [False]


def test_a_reducer_keeps_no_tensor_of_its_caller() -> None:
    def job(comm: Any) -> bool:
        reducer, grad = Reducer(OkTopk(density=0.1), comm), torch.randn(100)
        kept = weakref.ref(grad)
        reducer.all_reduce(grad)
        del grad
        return kept() is not None

    assert run_local(2, job) == [False, False]


def test_a_step_that_raises_leaves_the_gradient_to_be_looked_at() -> None:
    def job(comm: Any) -> bool:
        grad = torch.tensor([1.0, math.nan, 2.0])
        with pytest.raises(NonFiniteError):
            Reducer(OkTopk(density=0.5), comm).all_reduce(grad, out=grad)
        return bool(grad.isnan().any()) and grad[0] == 1.0

    assert all(run_local(2, job))
