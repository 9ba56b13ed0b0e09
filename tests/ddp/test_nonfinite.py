"""A gradient that is not finite, anywhere, on any rank, is an error or a skipped step on all, and leaves no trace."""

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import Dense, OkTopk, TopkA
from tests.cases import COVER, algorithms
from tests.ddp.accounts import any_left, check_same_on_all_ranks, grads_of, same_bits, weights_of
from tests.ddp.harness import attach, check_words, end_now, error_of, on_ranks, started
from tests.ddp.nets import BRAIN, DOUBLE, HALF, SINGLE, Net, descend_, step_
from tests.harness import JOB_TIMEOUT_S

SPARSE, DENSE = "body.0.weight", "body.0.bias"
DENSE_STEPS = 3
OKTOPK = OkTopk(density=0.05)


@dataclass(frozen=True)
class Accident:
    """A value in the gradient of a parameter, on one rank, at one step of a run."""

    parameter: str = SPARSE
    step: int = 5
    rank: int = 1
    value: float = math.nan
    algorithm: Any = OKTOPK
    clip: float | None = None
    options: tuple[str, ...] = ()  # of DDP
    happens: bool = True  # or the step where it would be is left out

    def spoil(self, grad):
        grad = grad.clone()
        if dist.get_rank() == self.rank:
            grad.view(-1)[-1] = self.value
        return grad


def train_through(accident, on_nonfinite):
    """Train, check the step in which the accident happens, and return the weights at the end."""
    model = DDP(Net(), bucket_cap_mb=0.005, **dict.fromkeys(accident.options, True))
    settings = {"dense_steps": DENSE_STEPS, "exclude": "*bias", "on_nonfinite": on_nonfinite, "clip": accident.clip}
    attached = attach(model, accident.algorithm, **settings)
    for step in range(8):
        if step != accident.step:
            step_(model, step)
            descend_(model)
        elif accident.happens:
            before = attached.residual
            spoiling = model.module.get_parameter(accident.parameter).register_hook(accident.spoil)
            raised = error_of(step_, model, step)
            spoiling.remove()
            if on_nonfinite == "skip":
                assert raised == "", accident
                assert not any_left(grads_of(model.module)), accident
            else:
                assert raised.startswith("NonFiniteError: ")  # not a RuntimeError that quotes it
                check_words(raised, f"rank {accident.rank}", repr(accident.parameter))
            assert same_bits(attached.residual, before), accident
            assert attached.last.skipped, accident
    assert attached.active, accident
    attached.detach()
    assert attached.summary().nonfinite == accident.happens, accident
    weights = weights_of(model.module)
    assert all(bool(weight.isfinite().all()) for weight in weights.values()), accident
    check_same_on_all_ranks(weights)
    return weights


ACCIDENTS = [
    Accident(DENSE),
    Accident(value=math.inf),
    Accident(DENSE, rank=0, value=-math.inf),
    Accident(DENSE, step=2, rank=0, value=math.inf),
    *(Accident(step=step) for step in (0, 1, DENSE_STEPS, 5)),
    *(Accident(step=step, options=("find_unused_parameters",)) for step in (0, 5)),
    *(Accident(step=step, options=("static_graph",)) for step in (0, 1, 5)),
    *(Accident(step=step, options=("gradient_as_bucket_view",)) for step in (1, 5)),
    Accident(clip=0.01),
]
OF_ALGORITHMS = [Accident(rank=2, algorithm=algorithms(0.05)[name]) for name in COVER]


@pytest.mark.parametrize("ways", [("raise", "skip"), pytest.param(("skip", "raise"), marks=pytest.mark.slow)])
@on_ranks(2, 3)
def test_a_step_that_is_not_finite_leaves_no_trace(ways):
    """In two ways, in turn."""
    accidents = ACCIDENTS if dist.get_world_size() == 2 else OF_ALGORITHMS
    for accident, on_nonfinite in zip(accidents, itertools.cycle(ways), strict=False):
        train_through(accident, on_nonfinite)


@on_ranks(2)
def test_a_run_with_a_skipped_step_ends_as_one_without_that_step():
    """TopkA has no state of its own, so that nothing at all may differ."""
    runs = (Accident(algorithm=TopkA(density=0.05), happens=happens) for happens in (True, False))
    assert same_bits(*(train_through(run, "skip") for run in runs))


def first_backward(rank, pipe):
    """Send the number that autograd gives to the first backward() of a process, and the error that ends it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=1)
    model, numbers = DDP(torch.nn.Linear(4, 1)), []
    attach(model, OKTOPK)
    model.module.weight.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
    pipe.send((error_of(model(torch.full((1, 4), math.nan)).sum().backward), *numbers))


@pytest.mark.processes
def test_the_first_backward_of_a_process_raises_the_error_itself():
    pipes, processes = started(1, first_backward)
    try:
        assert pipes[0].poll(JOB_TIMEOUT_S), "the process does not answer"
        raised, number = pipes[0].recv()
    finally:
        end_now(pipes, processes)
    assert number == 0  # which is not the number outside of backward(), -1
    assert raised.startswith("NonFiniteError: ")


def reduced(dtype, values, pending=0.0, **settings):
    """Make one step of a net of one row whose gradients are these values on every rank; return what came of it."""
    model = DDP(torch.nn.Linear(len(values), 1, bias=False).to(dtype))
    attached = attach(model, settings.pop("algorithm", OKTOPK), **settings)
    if pending:
        held = {"weight": torch.full((len(values),), pending)}
        attached.load_state_dict({**attached.state_dict(), "residual": held})
    before = attached.residual
    raised = error_of(model(torch.tensor([values], dtype=dtype)).sum().backward)
    after, grad = attached.residual, grads_of(model.module).get("weight", torch.zeros(len(values)))
    attached.detach()
    skipped, undone = attached.last.skipped, same_bits(after, before)
    return SimpleNamespace(raised=raised, skipped=skipped, grad=grad, residual=after["weight"], undone=undone)


@on_ranks(2)
def test_sums_that_overflow_are_refused_too():
    """Of finite gradients, where one travels dense beside sparse ones. The dense phase divides before it sums."""
    huge = [3e38] * 16
    for dense_steps in (1, 0):
        seen = reduced(SINGLE, huge, dense_steps=dense_steps, exclude="weight")
        assert seen.undone
        assert ("NonFiniteError" in seen.raised) == bool(seen.raised) == (dense_steps == 0)
    seen = reduced(SINGLE, huge, algorithm=OkTopk(density=1.0))
    assert seen.undone if seen.raised else bool(seen.grad.isfinite().all())


@on_ranks(2, 3)
def test_a_mean_of_the_largest_numbers_is_finite_or_refused():
    """A third of float64's largest number, or float16's, is rounded up, and three of them are infinite."""
    for dtype in (DOUBLE, SINGLE, BRAIN, HALF):
        overflows = dist.get_world_size() == 3 and dtype in (DOUBLE, HALF)
        values = [1.0, *[torch.finfo(dtype).max] * 7]
        for on_nonfinite in ("raise", "skip"):
            seen = reduced(dtype, values, dense_steps=1, on_nonfinite=on_nonfinite)
            assert seen.undone
            assert seen.skipped == overflows
            assert ("NonFiniteError" in seen.raised) == bool(seen.raised) == (overflows and on_nonfinite == "raise")
            assert overflows or bool(seen.grad.isfinite().all())


@on_ranks(2)
def test_what_a_narrow_gradient_cannot_hold_of_a_dense_sum_stays_for_later():
    """Twice float16's largest number, half of it pending, under `Dense` as the algorithm of a sparse step."""
    largest = [65504.0] * 4
    seen = reduced(HALF, largest, pending=65504.0, algorithm=Dense())
    assert seen.grad.tolist() == seen.residual.tolist() == largest
