"""The law of error feedback: no element waits without bound. A stationary residual reaches a plateau."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oktopk import GaussianK, OkTopk, OkTopkPaper, Reducer
from tests.cases import PLAIN, device_step, oktopk
from tests.harness import on_threads

SHARE = 0.05
"""Largest part of what was put in that may be pending after `STEPS` steps."""

STEPS = 1500
long = partial(pytest.param, marks=pytest.mark.long)
SHAPES = ("plateau", "ramp", "sinus", "signs", "laplace")
BASE = (64, 512, 9, 9, 9, 1, 1)


@dataclass(frozen=True)
class Stationary:
    """Gradients with a mean of this shape in each row, the same on all ranks, and noise of each rank's own.

    loud    the rows' sizes lie between 1 and this
    noise   its size, over the row's mean magnitude
    used    each row has a gradient in one of this many steps: an embedding's rows, say
    beside  elements of one row more, which has no mean, only noise: it is not counted, but it wants its share
    """

    rows: tuple[int, ...]
    shape: str = "plateau"
    size: int = 1
    loud: float = 1.0
    noise: float = 0.3
    used: int = 1
    beside: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def mean(self) -> Tensor:
        """Return the mean of the gradient."""
        generator = torch.Generator().manual_seed(len(self.rows))
        louder = torch.linspace(0, math.log(self.loud), len(self.rows)).exp().tolist()
        return torch.cat([size * self._row(row, generator) for row, size in zip(self.rows, louder, strict=True)])

    def _row(self, numel: int, generator: torch.Generator) -> Tensor:
        x, uniform = torch.arange(1, numel + 1) / numel, torch.rand(numel, generator=generator)
        return {
            "plateau": torch.ones(numel),
            "ramp": x,
            "sinus": (7 * x).sin(),
            "signs": (uniform - 0.5).sign(),
            "laplace": (uniform - 0.5).sign() * -(1 - 2 * (uniform - 0.5).abs()).clamp(min=1e-6).log(),
        }[self.shape]

    def pending(self, steps: int) -> list[tuple[float, float]]:
        """Return the mass that all ranks hold back and the mass that was put in, after `steps` and twice as many."""
        by_rank = torch.tensor(on_threads(self.size, self._run, steps), dtype=torch.float64)
        return [(float(held), float(put_in)) for held, put_in in by_rank.sum(0)]

    def _run(self, comm: Any, steps: int) -> list[tuple[float, float]]:
        mean, generator = self.mean(), torch.Generator().manual_seed(comm.rank)
        row_of = torch.arange(len(self.rows)).repeat_interleave(torch.tensor(self.rows))
        noise = self.noise * torch.cat([part.abs().mean().expand(len(part)) for part in mean.split(list(self.rows))])
        segments = [*self.rows, *([self.beside] if self.beside else [])]
        reducer = Reducer(oktopk(**{"mode": "bounded", **self.options}), comm, segments=segments)
        put_in, masses = 0 * mean.double(), []
        for step in range(2 * steps):
            grad = mean + noise * torch.randn(len(mean), generator=generator)
            grad *= (step + row_of) % self.used == 0
            reducer.all_reduce(torch.cat([grad, torch.randn(self.beside, generator=generator)]))
            put_in += grad
            if step + 1 in (steps, 2 * steps):
                assert reducer.residual is not None
                pending = reducer.residual[: len(mean)].double().abs().sum()
                masses.append((float(pending), float(put_in.abs().sum())))
        return masses


def check_plateau(case: Stationary, steps: int = STEPS) -> None:
    """Hold a run to the law; a gradient that is used in a tenth of the steps is pending ten times as long."""
    (first, put_in), (second, _) = case.pending(steps)
    assert first <= SHARE * put_in, f"{case}: {first / put_in:.1%} of what was put in is pending after {steps} steps"
    assert second <= 1.25 * first, f"{case}: pending grew from {first:.4g} to {second:.4g}"


@pytest.fixture(params=["host", "device"])
def step(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which step is tried."""
    with device_step() if request.param == "device" else nullcontext():
        yield str(request.param)


@pytest.mark.parametrize(("step", "shape", "size", "options"), [
    ("device", "plateau", 1, {"ranking": "scaled"}),
    ("device", "signs", 1, {"ranking": "magnitude"}),
    ("host", "laplace", 2, {}),
    ("host", "ramp", 2, {"mode": "paper", "ranking": "scaled"}),
    long("device", "laplace", 2, {}),
    long("host", "plateau", 1, {"ranking": "scaled"}),
    long("host", "signs", 1, {"ranking": "magnitude"}),
], ids=str, indirect=["step"])  # fmt: skip
@pytest.mark.usefixtures("step")
def test_a_row_that_agrees_with_itself_is_delivered(shape: str, size: int, options: dict[str, Any]) -> None:
    check_plateau(Stationary(BASE, shape, size, beside=1000, options=options), steps=300)


MANY_ROWS = st.sampled_from([BASE, (9,) * 120, (1,) * 200, (4096,), (512, 1, 512), (300, 3), (128,) * 8])
OPTIONS = {
    "mode": st.sampled_from(["bounded", "paper"]),
    "ranking": st.sampled_from(["magnitude", "scaled"]),
    "wire": st.sampled_from(["auto", "fp32", "bf16", "int8"]),
}
STATIONARY = st.builds(
    Stationary,
    MANY_ROWS | st.lists(st.integers(1, 600), min_size=1, max_size=8).map(tuple),
    st.sampled_from(SHAPES),
    st.integers(1, 8),
    st.sampled_from([1.0, 10.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    beside=st.sampled_from([0, 500]),
    options=st.fixed_dictionaries(OPTIONS),
)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(deadline=None, max_examples=12)
@given(case=STATIONARY)
@example(case=Stationary((64, 9, 9, 1, 128), "signs", 8, noise=1.0))  # one slot in a message
@example(case=Stationary((64, 9, 9, 1, 128), "signs", 8, options={"mode": "paper"}))
@example(case=Stationary((4000,), "signs", 8))
@example(case=Stationary((4000,), "signs", 8, noise=1.0, options={"mode": "paper"}))
def test_the_residual_of_a_stationary_gradient_reaches_a_plateau(case: Stationary) -> None:
    check_plateau(case)


@pytest.mark.parametrize("step", ["host", long("device")], indirect=True)
@pytest.mark.usefixtures("step")
def test_eight_ranks_deliver_an_element_together() -> None:
    """Their noise makes them choose different elements of equal size; 75 steps' gradients are 5 % of 1,500 steps'."""
    pending, put_in = Stationary((64, 9, 9, 1, 128), "signs", 8).pending(60)[1]
    assert 120 * pending <= 75 * put_in, f"the gradients of {120 * pending / put_in:.0f} steps are pending"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranking", ["magnitude", "scaled"])
def test_rows_that_are_seldom_used_are_delivered(ranking: str) -> None:
    check_plateau(Stationary((64,) * 20, "signs", 2, used=10, options={"ranking": ranking}))


BOUNDED = (OkTopk(**PLAIN), OkTopk())
ON_HOST = [("host", each) for each in (*BOUNDED, OkTopkPaper(**PLAIN, cap=1.0), GaussianK(density=0.03))]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("step", "algorithm"), [*ON_HOST, *(("device", each) for each in BOUNDED)], indirect=["step"])
@pytest.mark.usefixtures("step")
def test_what_is_larger_goes_first_although_all_others_are_equal(algorithm: Any, size: int) -> None:
    """Ties at the threshold share what room is left; one element that is a million times larger does not wait."""
    numel = 3000

    def run(comm: Any) -> list[bool]:
        reducer, arrived = Reducer(algorithm, comm), []
        for number in range(12):
            grad, giant = torch.ones(numel), (977 * number + 2999) % numel
            grad[giant] = 1e6
            arrived.append(float(reducer.all_reduce(grad)[giant]) >= 0.9e6)
        return arrived

    for arrived in on_threads(size, run):
        assert all(arrived), arrived


@pytest.mark.usefixtures("step")
@pytest.mark.parametrize("both", [False, True])
def test_what_cancels_over_the_ranks_does_not_keep_its_slots(both: bool) -> None:
    """Two ranks disagree on the largest elements, and their sum is zero: it is delivered, and the rest has its turn."""
    numel = 2000

    def run(comm: Any) -> float:
        reducer = Reducer(OkTopk(**PLAIN), comm)
        small = torch.randn(numel, generator=torch.Generator().manual_seed(7)) * (1 if both else 0)
        for number in range(120):
            grad = small.clone()
            grad[:40] += (1 - 2 * comm.rank) * (100 if number == 0 else 0)
            reducer.all_reduce(grad)
        assert reducer.residual is not None
        return float(reducer.residual.abs().max())

    assert max(on_threads(2, run)) <= 90


@pytest.mark.usefixtures("step")
def test_density_one_after_a_lower_density_delivers_everything() -> None:
    """All that is large lies in one tenth, so that the cuts move there; then everything is to travel."""
    numel = 4000

    def run(comm: Any) -> float:
        reducer = Reducer(OkTopk(density=0.02, wire="fp32"), comm)
        for number in range(40):
            grad = torch.randn(numel, generator=torch.Generator().manual_seed(100 * number + comm.rank))
            grad[400:] *= 1e-3
            reducer.all_reduce(grad)
        dense = Reducer(OkTopk(density=1.0, wire="fp32"), comm)
        dense.load_state_dict(reducer.state_dict())
        dense.all_reduce(torch.ones(numel))
        assert dense.residual is not None
        return float(dense.residual.abs().max())

    assert on_threads(3, run) == [0.0] * 3
