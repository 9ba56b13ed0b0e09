"""DDP's `mixed_precision=`: an attached model does what the plain one does, in the dtypes that DDP was told.

On a CPU torch has no events, which DDP asks for then. Here they do nothing: there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from oktopk import OkTopk
from tests.ddp.harness import (
    Books,
    Net,
    Worlds,
    attach,
    batch,
    check_balance,
    descend_,
    grads_of,
    relative_error,
    same_bits,
)

pytestmark = pytest.mark.processes

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
ROUNDING = {HALF: 2.0**-10, BRAIN: 2.0**-7, SINGLE: 1e-6}


class Nothing(nullcontext[None]):
    """A stream, and an event on it, of a device that does one thing after the other."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


@contextmanager
def a_cpu_with_events() -> Iterator[None]:
    with (
        mock.patch("torch.Event", Nothing),
        mock.patch("torch.Stream", Nothing),
        mock.patch("torch.accelerator.current_stream", Nothing),
    ):
        yield


def loss_of(model: nn.Module, rank: int, step: int, **forward: Any) -> Tensor:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype), **forward).float(), y)


def once(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.entry.requires_grad_(False)


@dataclass(frozen=True)
class Use:
    """How a model is made and trained: with these dtypes for parameters and sums."""

    param: torch.dtype
    reduce: torch.dtype | None
    dense_steps: int = 0
    make: Callable[[], nn.Module] = Net
    options: dict[str, Any] = field(default_factory=dict)
    detach_at: int = 99

    def model(self) -> DDP:
        precision = _MixedPrecision(param_dtype=self.param, reduce_dtype=self.reduce, buffer_dtype=self.param)
        return DDP(self.make(), bucket_cap_mb=0.005, mixed_precision=precision, **self.options)


USES = {
    "dense, summed in float32": Use(BRAIN, SINGLE, dense_steps=9),
    "dense, summed in bfloat16": Use(BRAIN, BRAIN, dense_steps=9),
    "dense, then detached": Use(HALF, SINGLE, dense_steps=9, detach_at=2),
    "float16, summed in float32": Use(HALF, SINGLE),
    "float16, summed in float16": Use(HALF, HALF),
    "no dtype for sums": Use(BRAIN, None),
    "bucket view": Use(BRAIN, SINGLE, options={"gradient_as_bucket_view": True}),
    "static_graph, frozen": Use(BRAIN, SINGLE, make=Frozen, options={"static_graph": True}),
}


STEPS = 5


Grads = dict[str, Tensor]


def train(use: Use) -> list[tuple[Grads, Grads, Grads]]:
    """Return each step's gradients: as they came, from the model without oktopk, and the mean of the ranks' own."""
    rank, came = dist.get_rank(), []
    with a_cpu_with_events():
        ours, plain, local = use.model(), replace(use, options={}).model(), use.make().to(use.param)
        attached = attach(ours, dense_steps=use.dense_steps)
        for step in range(STEPS):
            plain.module.load_state_dict(ours.module.state_dict())
            local.load_state_dict(ours.module.state_dict())
            for model in (ours, plain, local):
                model.zero_grad(set_to_none=step % 2 == 0)
                once(model, rank, step)
            came.append(tuple(present_grads(net) for net in (ours.module, plain.module, local)))
            for mean in came[-1][2].values():
                dist.all_reduce(mean.div_(dist.get_world_size()))
            assert {p.dtype for p in ours.parameters()} == {SINGLE}
            assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {SINGLE}
            descend_(ours)
            if step + 1 == use.detach_at:
                attached.detach()
        attached.detach()
    assert attached.step == min(STEPS, use.detach_at)
    return came


def present_grads(net: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that there are, in float64, which changes none of them."""
    return {name: grad.double() for name, grad in grads_of(net).items() if grad is not None}


def test_ddps_mixed_precision_trains_as_it_does_without_oktopk(worlds: Worlds) -> None:
    """Dense steps to the last bit; at density 1 as nearly as the dtype of the sums allows.

    But for the first step, in which torch sums tensors that nobody has filled.
    """
    for case, by_rank in worlds.run_all(2, train, {name: (use,) for name, use in USES.items()}).items():
        use = USES[case]
        tolerance = ROUNDING[use.reduce or use.param]
        for step, (ours, plain, mean) in (pair for came in by_rank for pair in enumerate(came)):
            assert ours.keys() == plain.keys() == mean.keys()
            assert all(relative_error(ours[name], mean[name]) <= tolerance for name in mean), case
            assert not step or not use.dense_steps or same_bits(ours, plain), case


def sparse_books(param: torch.dtype, reduce: torch.dtype) -> Books:
    """Sparse steps with constant weights, beside a net with parameters and inputs of a narrow dtype."""
    local, books = Net().to(param), Books(Net())
    with a_cpu_with_events():
        model = Use(param, reduce).model()
        attached = attach(model, OkTopk(density=0.05), exclude="*bias")
        for step in range(8):
            for each in (model, local):
                each.zero_grad()
                once(each, dist.get_rank(), step)
            books.enter_(model.module, local)
        attached.detach()
    books.residual = attached.residual
    return books


@pytest.mark.parametrize(("param", "reduce"), [(BRAIN, SINGLE), (HALF, HALF)], ids=str)
def test_sparse_steps_under_ddps_mixed_precision_lose_nothing(
    worlds: Worlds, param: torch.dtype, reduce: torch.dtype
) -> None:
    check_balance(worlds.run(2, sparse_books, param, reduce))


def leave_out_a_branch() -> tuple[bool, bool]:
    """Return whether a branch that was not used has no gradient, and the rest has."""
    with a_cpu_with_events():
        model = Use(BRAIN, SINGLE, options={"static_graph": True}).model()
        loss_of(model, dist.get_rank(), 0)  # a forward without a backward leaves the parameters narrow
        attached = attach(model)
        for step in range(3):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step, branch=False).backward()
        attached.detach()
    net = model.module
    return net.branch.weight.grad is None, net.exit.weight.grad is not None


def test_unused_parameters_under_ddps_mixed_precision(worlds: Worlds) -> None:
    """DDP's own hook fails at those."""
    assert worlds.run(2, leave_out_a_branch) == [(True, True)] * 2
