"""A gradient that is not finite, anywhere, on any rank, is an error or a skipped step on all, and leaves no trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import Dense, OkTopk, TopkA
from tests.cases import COVER, algorithms
from tests.ddp.harness import (
    Net,
    Raised,
    Worlds,
    attach,
    delivered_nothing,
    descend_,
    error_of,
    grads_of,
    same_bits,
    step_,
    weights_of,
)

pytestmark = pytest.mark.processes

SPARSE, DENSE = "body.0.weight", "body.0.bias"
DENSE_STEPS = 3
STEPS = 8
OKTOPK = OkTopk(density=0.05)


@dataclass(frozen=True)
class Accident:
    """A value in the gradient of a parameter, on one rank, at one step of a run."""

    parameter: str = SPARSE
    step: int = 5
    rank: int = 1
    value: float = math.nan
    algorithm: Any = OKTOPK
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of DDP
    happens: bool = True  # or the step where it would be is left out


@dataclass(frozen=True)
class Seen:
    """What one rank saw of the step of the accident, and of the run."""

    raised: Raised | None
    skipped: bool
    nothing: bool
    undone: bool
    nonfinite_steps: int
    weights: dict[str, Tensor]
    active: bool


def train(accident: Accident, on_nonfinite: str) -> Seen:
    model = DDP(Net(), bucket_cap_mb=0.005, **accident.options)
    settings = {"dense_steps": DENSE_STEPS, "exclude": "*bias", "on_nonfinite": on_nonfinite, **accident.settings}
    attached = attach(model, accident.algorithm, **settings)

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = accident.value
        return grad

    raised, undone, skipped, nothing = None, False, False, False
    for step in range(STEPS):
        if step != accident.step:
            step_(model, step)
            descend_(model)
        elif accident.happens:
            before = attached.residual
            if dist.get_rank() == accident.rank:
                spoiling = model.module.get_parameter(accident.parameter).register_hook(spoil)
            raised = error_of(lambda step=step: step_(model, step))
            if dist.get_rank() == accident.rank:
                spoiling.remove()
            undone = same_bits(attached.residual, before)
            assert attached.last is not None
            skipped, nothing = attached.last.skipped, delivered_nothing(grads_of(model.module))
    active = attached.active
    attached.detach()
    return Seen(raised, skipped, nothing, undone, attached.summary().nonfinite, weights_of(model.module), active)


ACCIDENTS = {
    "sparse parameter": Accident(),
    "dense parameter": Accident(DENSE),
    "inf": Accident(value=math.inf),
    "minus inf in a dense parameter on rank 0": Accident(DENSE, rank=0, value=-math.inf),
    "first sparse step": Accident(step=DENSE_STEPS),
    "dense phase": Accident(step=1),
    "dense phase, dense parameter, inf": Accident(DENSE, step=2, rank=0, value=math.inf),
    "very first step": Accident(step=0),
    **{
        f"{option} {step}": Accident(step=step, options={option: True})
        for option, step in (
            ("find_unused_parameters", 0),
            ("find_unused_parameters", 5),
            ("static_graph", 0),
            ("static_graph", 1),
            ("static_graph", 5),
            ("gradient_as_bucket_view", 1),
            ("gradient_as_bucket_view", 5),
        )
    },
    "clip": Accident(settings={"clip": 0.01}),
}


@pytest.mark.parametrize(
    ("size", "accidents"),
    [(2, ACCIDENTS), (3, {name: Accident(rank=2, algorithm=algorithms(0.05)[name]) for name in COVER})],
    ids=["accidents", "algorithms"],
)
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_step_that_is_not_finite_leaves_no_trace(
    worlds: Worlds, size: int, accidents: dict[str, Accident], on_nonfinite: str
) -> None:
    cases = {name: (accident, on_nonfinite) for name, accident in accidents.items()}
    for name, by_rank in worlds.run_all(size, train, cases).items():
        for seen in by_rank:
            assert (seen.undone, seen.active, seen.skipped, seen.nonfinite_steps) == (True, True, True, 1), name
            if on_nonfinite == "skip":
                assert seen.raised is None, name
                assert seen.nothing, name
            else:
                assert seen.raised is not None, name
                assert "NonFiniteError" in seen.raised.message
                assert f"rank {accidents[name].rank}" in seen.raised.message
                assert repr(accidents[name].parameter) in seen.raised.message
            assert all(bool(weights.isfinite().all()) for weights in seen.weights.values())
            assert same_bits(seen.weights, by_rank[0].weights)


def test_a_run_with_a_skipped_step_ends_as_one_without_that_step(worlds: Worlds) -> None:
    """TopkA has no state of its own, so that nothing at all may differ."""
    algorithm = TopkA(density=0.05)
    cases = {
        name: (Accident(algorithm=algorithm, happens=name == "skipped"), "skip") for name in ("skipped", "without")
    }
    for seen, expected in zip(*worlds.run_all(2, train, cases).values(), strict=True):
        assert same_bits(seen.weights, expected.weights)


@dataclass(frozen=True)
class Overflow:
    """What came of one step: what was raised or delivered, and what is held back."""

    raised: Raised | None
    skipped: bool
    grad: Tensor
    residual: Tensor
    undone: bool


def reduce_(dtype: torch.dtype, values: list[float], pending: float = 0.0, **settings: Any) -> Overflow:
    """Make one step of a net of one row whose gradients are these values on every rank."""
    model = DDP(torch.nn.Linear(len(values), 1, bias=False).to(dtype))
    attached = attach(model, settings.pop("algorithm", OKTOPK), **settings)
    if pending:
        held = {"weight": torch.full((len(values),), pending)}
        attached.load_state_dict({**attached.state_dict(), "residual": held})
    before = attached.residual
    raised = error_of(model(torch.tensor([values], dtype=dtype)).sum().backward)
    assert attached.last is not None
    grad = model.module.weight.grad
    grad = torch.zeros(len(values)) if grad is None else grad.view(-1).clone()
    undone, residual = same_bits(attached.residual, before), attached.residual["weight"]
    attached.detach()
    return Overflow(raised, attached.last.skipped, grad, residual, undone)


def test_sums_that_overflow_are_refused_too(worlds: Worlds) -> None:
    """Every rank's gradient is finite, their sum is not, where a parameter travels dense beside sparse ones.

    The dense phase divides before it sums, as DDP does, and has nothing to refuse.
    """
    huge = [3e38] * 16
    for seen in worlds.run(2, partial(reduce_, torch.float32, huge, dense_steps=1, exclude="weight")):
        assert seen.undone
        assert seen.raised is None
    for seen in worlds.run(2, partial(reduce_, torch.float32, huge, exclude="weight")):
        assert seen.undone
        assert seen.raised is not None
        assert "NonFiniteError" in seen.raised.message
    for seen in worlds.run(2, partial(reduce_, torch.float32, huge, algorithm=OkTopk(density=1.0))):
        assert seen.undone if seen.raised else seen.grad.isfinite().all()


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_of_the_largest_numbers_is_finite_or_refused(worlds: Worlds, size: int) -> None:
    """A third of float64's largest number, or float16's, is rounded up, and three of them are infinite."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        overflows = size == 3 and dtype in (torch.float64, torch.float16)
        values = [1.0, *[torch.finfo(dtype).max] * 7]
        for on_nonfinite in ("raise", "skip"):
            for seen in worlds.run(size, partial(reduce_, dtype, values, dense_steps=1, on_nonfinite=on_nonfinite)):
                assert seen.undone
                assert seen.skipped == overflows
                assert (seen.raised is not None) == (overflows and on_nonfinite == "raise")
                assert seen.raised is None or "NonFiniteError" in seen.raised.message
                assert overflows or bool(seen.grad.isfinite().all())


def test_what_a_narrow_gradient_cannot_hold_of_a_dense_sum_stays_for_later(worlds: Worlds) -> None:
    """Twice float16's largest number, half of it pending, under `Dense` as the algorithm of a sparse step."""
    largest = [65504.0] * 4
    for seen in worlds.run(2, partial(reduce_, torch.float16, largest, pending=65504.0, algorithm=Dense())):
        assert seen.grad.tolist() == largest
        assert seen.residual.tolist() == largest
