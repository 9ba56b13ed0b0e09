"""A gradient that is not finite, anywhere, on any rank, is an error or a skipped step on all, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA
from tests.ddp.harness import Net, Raised, Worlds, attach, error_of, loss_of, name_of, same_bits, weights_of

pytestmark = pytest.mark.processes

SPARSE, DENSE = "body.0.weight", "body.0.bias"
DENSE_STEPS = 3
STEPS = 8


@dataclass(frozen=True)
class Accident:
    """A value in the gradient of a parameter, on one rank, at one step."""

    parameter: str = SPARSE
    step: int = 5
    rank: int = 1
    value: float = math.nan


@dataclass(frozen=True)
class Seen:
    """What one rank saw of the step of the accident, and of the run."""

    raised: Raised | None
    skipped: bool
    all_zero: bool
    undone: bool
    nonfinite_steps: int
    weights: dict[str, Tensor]
    active: bool


@contextmanager
def happening(accident: Accident, model: DDP, step: int) -> Iterator[None]:
    if (step, dist.get_rank()) != (accident.step, accident.rank):
        yield
        return

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = accident.value
        return grad

    handle = model.module.get_parameter(accident.parameter).register_hook(spoil)
    yield
    handle.remove()


def train(
    accident: Accident | None, algorithm: Any, settings: dict[str, Any], options: dict[str, Any] | None = None
) -> Seen:
    """Train through an accident; without one, leave out the step where it would be."""
    model = DDP(Net(), bucket_cap_mb=0.005, **(options or {}))
    attached = attach(model, algorithm, **{"dense_steps": DENSE_STEPS, "exclude": "*bias", **settings})
    raised, undone, skipped, all_zero = None, False, False, False
    for step in range(STEPS):
        if accident is None and step == Accident.step:
            continue
        before = attached.state_dict()
        model.zero_grad()
        loss = loss_of(model, dist.get_rank(), step)
        if accident is None or step != accident.step:
            loss.backward()
            update_(model)
            continue
        with happening(accident, model, step):
            raised = error_of(loss.backward)
        after = attached.state_dict()
        undone = same_bits(after["residual"], before["residual"])
        assert attached.last is not None
        skipped = attached.last.skipped
        all_zero = not any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    active = attached.active
    attached.detach()
    count = attached.summary().nonfinite
    return Seen(raised, skipped, all_zero, undone, count, weights_of(model.module), active)


def update_(model: DDP) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad


OKTOPK = OkTopk(density=0.05)
ACCIDENTS = {
    "sparse parameter": Accident(),
    "dense parameter": Accident(DENSE),
    "inf": Accident(value=math.inf),
    "minus inf in a dense parameter on rank 0": Accident(DENSE, rank=0, value=-math.inf),
    "first sparse step": Accident(step=DENSE_STEPS),
    "dense phase": Accident(step=1),
    "dense phase, dense parameter, inf": Accident(DENSE, step=2, rank=0, value=math.inf),
    "very first step": Accident(step=0),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_raising_ends_backward_on_all_ranks_and_names_rank_and_parameter(worlds: Worlds, name: str) -> None:
    accident = ACCIDENTS[name]
    for seen in worlds.run(2, train, accident, OKTOPK, {}):
        assert seen.raised is not None
        assert "NonFiniteError" in seen.raised.message
        assert f"rank {accident.rank}" in seen.raised.message
        assert repr(accident.parameter) in seen.raised.message
        assert seen.undone
        assert seen.active
        assert all(bool(weights.isfinite().all()) for weights in seen.weights.values())


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_training_goes_on_after_raising_whatever_ddp_was_asked_to_do(worlds: Worlds, option: str, step: int) -> None:
    by_rank = worlds.run(2, train, Accident(step=step), OKTOPK, {}, {option: True})
    for seen in by_rank:
        assert seen.raised is not None
        assert repr(SPARSE) in seen.raised.message
        assert seen.undone
        assert seen.active
        assert all(bool(weights.isfinite().all()) for weights in seen.weights.values())
        assert same_bits(seen.weights, by_rank[0].weights)


@pytest.mark.parametrize("name", ACCIDENTS)
def test_skipping_delivers_zeros_and_counts_it(worlds: Worlds, name: str) -> None:
    for seen in worlds.run(2, train, ACCIDENTS[name], OKTOPK, {"on_nonfinite": "skip"}):
        assert seen.raised is None
        assert seen.skipped
        assert seen.all_zero
        assert seen.undone
        assert seen.nonfinite_steps == 1
        assert seen.active


@pytest.mark.parametrize("on_nonfinite", ["skip", pytest.param("raise", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (OKTOPK, {"clip": 0.01}),
        (OkTopkPaper(density=0.05), {}),
        (OkTopk(density=0.05, ranking="scaled"), {}),
        (TopkA(density=0.05), {}),
        (TopkDSA(density=0.05), {}),
        (GTopk(density=0.05), {}),
        (GaussianK(density=0.05), {}),
        (Dense(), {}),
    ],
    ids=lambda thing: name_of(thing) if not isinstance(thing, dict) else str(thing),
)
def test_residuals_are_as_before_whatever_the_algorithm(
    worlds: Worlds, algorithm: Any, settings: dict[str, Any], on_nonfinite: str
) -> None:
    for seen in worlds.run(3, train, Accident(rank=2), algorithm, {"on_nonfinite": on_nonfinite, **settings}):
        assert seen.undone
        assert seen.skipped
        assert (seen.raised is not None) == (on_nonfinite == "raise")


def test_a_run_with_a_skipped_step_ends_as_one_without_that_step(worlds: Worlds) -> None:
    """TopkA has no state of its own, so that nothing at all may differ."""
    algorithm, settings = TopkA(density=0.05), {"on_nonfinite": "skip"}
    skipped = worlds.run(2, train, Accident(), algorithm, settings)
    without = worlds.run(2, train, None, algorithm, settings)
    assert all(same_bits(a.weights, b.weights) for a, b in zip(skipped, without, strict=True))


def test_sums_that_overflow_are_refused_too(worlds: Worlds) -> None:
    """Every rank's gradient is finite, their sum is not, where a parameter travels dense beside sparse ones.

    The dense phase divides before it sums, as DDP does, and has nothing to refuse.
    """
    for (dense_undone, dense_raised), (undone, raised) in worlds.run(2, overflow):
        assert dense_undone
        assert dense_raised is None
        assert undone
        assert raised is not None
        assert "NonFiniteError" in raised.message


def overflow() -> list[tuple[bool, Raised | None]]:
    model = DDP(torch.nn.Linear(4, 4, bias=False))
    attached = attach(model, OKTOPK, dense_steps=1, exclude="weight")
    seen = []
    for _ in range(2):
        before = attached.residual
        model.zero_grad()
        loss = (model(torch.eye(4)) * 3e38).sum()
        raised = error_of(loss.backward)
        seen.append((same_bits(attached.residual, before), raised))
    attached.detach()
    return seen


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_of_the_largest_numbers_is_finite_or_refused(worlds: Worlds, dtype: torch.dtype, size: int) -> None:
    """A third of float64's largest number, or float16's, is rounded up, and three of them are infinite."""
    overflows = size == 3 and dtype in (torch.float64, torch.float16)
    for steps in worlds.run(size, reduce_the_largest, dtype):
        for on_nonfinite, (raised, skipped, finite, undone) in steps.items():
            assert skipped == overflows
            assert undone
            assert finite or (skipped and on_nonfinite == "skip")
            assert (raised is not None) == (skipped and on_nonfinite == "raise")
            assert raised is None or "NonFiniteError" in raised.message


def reduce_the_largest(dtype: torch.dtype) -> dict[str, tuple[Raised | None, bool, bool, bool]]:
    """Return, for a dense step whose gradients are the dtype's largest number but for the first, what came of it."""
    seen = {}
    for on_nonfinite in ("raise", "skip"):
        model = DDP(torch.nn.Linear(8, 1, bias=False).to(dtype))
        attached = attach(model, OKTOPK, dense_steps=1, on_nonfinite=on_nonfinite)
        gradient = torch.full((1, 8), torch.finfo(dtype).max, dtype=dtype)
        gradient[0, 0] = 1
        before = attached.residual
        raised = error_of(model(gradient).sum().backward)
        assert attached.last is not None
        grad = model.module.weight.grad
        finite = raised is not None or bool(grad.isfinite().all())
        seen[on_nonfinite] = raised, attached.last.skipped, finite, same_bits(attached.residual, before)
        attached.detach()
    return seen


def test_what_a_narrow_gradient_cannot_hold_of_a_dense_sum_stays_for_later(worlds: Worlds) -> None:
    for grad, residual in worlds.run(2, flush_too_much):
        assert grad == [65504.0] * 4
        assert residual == [65504.0] * 4


def flush_too_much() -> tuple[list[float], list[float]]:
    """Return what `Dense` delivers as the algorithm of a sparse step, and keeps, of twice float16's largest number."""
    model = DDP(torch.nn.Linear(4, 1, bias=False).half())
    attached = attach(model, Dense())
    largest = torch.full((1, 4), 65504.0)
    attached.load_residual({"weight": largest.view(-1)}, 0)
    model(largest.half()).sum().backward()
    attached.detach()
    return model.module.weight.grad.view(-1).tolist(), attached.residual["weight"].tolist()


def test_a_sparse_sum_that_overflows_loses_nothing(worlds: Worlds) -> None:
    """Whatever is delivered or refused: a finite gradient is either in what is applied or still held back."""
    for before, after, applied, raised in worlds.run(2, overflow_sparsely):
        assert raised is not None or applied.isfinite().all()
        if raised is not None:
            assert same_bits(after, before)


def overflow_sparsely() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Raised | None]:
    model = DDP(torch.nn.Linear(4, 4, bias=False))
    attached = attach(model, OkTopk(density=1.0))
    before = attached.residual
    loss = (model(torch.eye(4)) * 3e38).sum()
    raised = error_of(loss.backward)
    attached.detach()
    grad = model.module.weight.grad
    return before, attached.residual, torch.zeros(1) if grad is None else grad.clone(), raised
