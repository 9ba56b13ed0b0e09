"""Steps on the device path, with the reference kernels: what changes between one step and the next."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import NonFiniteError, OkTopk, Reducer
from tests.cases import device_step
from tests.ddp.harness import attach, on_ranks, on_threads

OKTOPK = OkTopk(density=0.1)


def step_(model, scaler=None, bad=False):
    model.zero_grad()
    loss = model(torch.randn(8, 64)).square().mean() * (math.nan if bad else 1.0)
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("change", ["exclude", "scaler"])
@on_ranks(1)
@device_step()
def test_a_dense_tail_or_a_scaler_may_come_later(change):
    """The words of a step then have another shape."""
    model = DDP(nn.Linear(64, 64))
    attached = attach(model, OKTOPK)
    for step in range(8):
        if step == 4 and change == "exclude":
            attached.exclude("*bias")
        step_(model, torch.amp.GradScaler("cpu") if step >= 4 and change == "scaler" else None)
    assert attached.summary().steps == 8


@pytest.mark.parametrize("scaled_first", [False, True])
@on_ranks(1)
def test_an_unscaled_step_is_skipped_with_zeros_whatever_came_before(scaled_first):
    model = DDP(nn.Linear(64, 64))
    attach(model, OKTOPK, on_nonfinite="skip")
    if scaled_first:
        step_(model, torch.amp.GradScaler("cpu"))
    step_(model, bad=True)
    assert not any(bool(parameter.grad.any()) for parameter in model.parameters())


@on_ranks(1)
def test_a_detached_group_needs_no_garbage_collector():
    model = DDP(nn.Linear(64, 64))
    attached = attach(model, OKTOPK)
    step_(model)
    gc.collect()
    gc.disable()
    try:
        group = weakref.ref(attached.group)
        attached.detach()
        del attached, model
        assert group() is None
    finally:
        gc.enable()


@on_threads(2)
def test_a_reducer_keeps_no_tensor_of_its_caller(comm):
    reducer, grad = Reducer(OKTOPK, comm), torch.randn(100)
    kept = weakref.ref(grad)
    reducer.all_reduce(grad)
    del grad
    assert kept() is None


@on_threads(2)
def test_a_step_that_raises_leaves_the_gradient_to_be_looked_at(comm):
    grad = torch.tensor([1.0, math.nan, 2.0])
    with pytest.raises(NonFiniteError):
        Reducer(OkTopk(density=0.5), comm).all_reduce(grad, out=grad)
    assert grad.nan_to_num(7.0).tolist() == [1.0, 7.0, 2.0]
