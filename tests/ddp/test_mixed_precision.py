"""DDP's `mixed_precision=`: an attached model does what the plain one does, in the dtypes that DDP was told."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from oktopk import OkTopk
from tests.ddp.accounts import Audit, grads_of, mean_of, same_bits, worst_error
from tests.ddp.harness import attach, on_ranks
from tests.ddp.nets import BRAIN, HALF, SINGLE, Net, batch, descend_, frozen

ROUNDING = {HALF: 2.0**-10, BRAIN: 2.0**-7, SINGLE: 1e-6}
STEPS = 5


class Nothing(nullcontext[None]):
    """A stream, and an event on it. DDP asks for both, and torch has none on a CPU: there is nothing to wait for."""

    def wait(self, stream=None): ...

    record = wait_stream = wait


@contextmanager
def a_cpu_with_events():
    stream = mock.patch("torch.accelerator.current_stream", Nothing)
    with mock.patch.multiple("torch", Event=Nothing, Stream=Nothing), stream:
        yield


def backward(model, step, **forward):
    x, y = batch(dist.get_rank(), step)
    nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype), **forward).float(), y).backward()


@dataclass(frozen=True)
class Use:
    """How a model is made and trained: with these dtypes for parameters and sums."""

    param: torch.dtype
    reduce: torch.dtype | None
    dense_steps: int = 0
    make: Callable[[], nn.Module] = Net
    options: dict[str, Any] = field(default_factory=dict)
    detach_at: int = 99

    def model(self):
        precision = _MixedPrecision(param_dtype=self.param, reduce_dtype=self.reduce, buffer_dtype=self.param)
        return DDP(self.make(), bucket_cap_mb=0.005, mixed_precision=precision, **self.options)


USES = [
    Use(BRAIN, SINGLE, dense_steps=9),
    Use(BRAIN, BRAIN, dense_steps=9),
    Use(HALF, SINGLE, dense_steps=9, detach_at=2),
    Use(HALF, SINGLE),
    Use(HALF, HALF),
    Use(BRAIN, None),
    Use(BRAIN, SINGLE, options={"gradient_as_bucket_view": True}),
    Use(BRAIN, SINGLE, make=frozen, options={"static_graph": True}),
]


@on_ranks(2)
@a_cpu_with_events()
def test_ddps_mixed_precision_trains_as_it_does_without_oktopk():
    """Dense steps to the last bit, but for torch's first, which sums memory that nobody filled; others nearly."""
    for use in USES:
        ours, plain, local = use.model(), replace(use, options={}).model(), use.make().to(use.param)
        attached = attach(ours, dense_steps=use.dense_steps)
        for step in range(STEPS):
            plain.module.load_state_dict(ours.module.state_dict())
            local.load_state_dict(ours.module.state_dict())
            for model in (ours, plain, local):
                model.zero_grad(set_to_none=step % 2 == 0)
                backward(model, step)
            came = grads_of(ours.module)
            assert worst_error(came, mean_of(grads_of(local))) <= ROUNDING[use.reduce or use.param], use
            assert not step or not use.dense_steps or same_bits(came, grads_of(plain.module)), use
            assert {p.dtype for p in ours.parameters()} == {SINGLE}
            assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {SINGLE}
            descend_(ours)
            if step + 1 == use.detach_at:
                attached.detach()
        attached.detach()
        assert attached.step == min(STEPS, use.detach_at)


@pytest.mark.parametrize(("param", "reduce"), [(BRAIN, SINGLE), (HALF, HALF)], ids=str)
@on_ranks(2)
@a_cpu_with_events()
def test_sparse_steps_under_ddps_mixed_precision_lose_nothing(param, reduce):
    """With constant weights, beside a net with parameters and inputs of a narrow dtype."""
    model = Use(param, reduce).model()
    audit = Audit(model, attach(model, OkTopk(density=0.05), exclude="*bias"), local=Net().to(param))
    for step in range(8):
        audit.step(partial(backward, step=step))
    audit.check()


@on_ranks(2)
@a_cpu_with_events()
def test_unused_parameters_under_ddps_mixed_precision():
    """DDP's own hook fails at those."""
    model = Use(BRAIN, SINGLE, options={"static_graph": True}).model()
    model(batch(dist.get_rank(), 0)[0])  # a forward without a backward leaves the parameters narrow
    attach(model)
    for step in range(3):
        model.zero_grad()
        backward(model, step, branch=False)
    assert model.module.branch.weight.grad is None
    assert model.module.exit.weight.grad is not None
