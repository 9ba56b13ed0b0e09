"""Two hundred steps: what only shows once residuals have built up and thresholds and regions have been reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import NAMES, PLAIN, Case, algorithms, oktopk, trace
from tests.harness import on_threads
from tests.laws import RELATIVE, check_every_law, wanted

STEPS = 200
SHOWN = (
    "oktopk-bounded-as-is",
    "oktopk-bounded-magnitude-fp32",
    "oktopk-paper-scaled-fp32",
    "oktopk-paper-scaled-int8",
)
SETTLED = 20  # sparse steps after which a stationary gradient's count has to be in the band
BAND = (0.8, 1.25)
MODES = ("bounded", "paper")


@dataclass
class Totals:
    """What one rank gave and got over a whole run, in float64."""

    given: Tensor
    magnitude: Tensor
    delivered: Tensor
    selected: list[int] = field(default_factory=list)
    residual: Tensor | None = None


def totals(comm: Any, case: Case) -> Totals:
    reducer = case.reducer(comm)
    sums = Totals(*(torch.zeros(case.numel, dtype=torch.float64) for _ in range(3)))
    for step in range(case.steps):
        grad = case.gradient(comm.rank, step)
        sums.given += grad
        sums.magnitude += grad.double().abs()
        sums.delivered += reducer.all_reduce(grad)
        assert reducer.last is not None
        sums.selected.append(reducer.last.selected)
    sums.residual = reducer.residual
    return sums


def check_nothing_was_lost(by_rank: list[Totals]) -> None:
    missing = sum(t.given - t.residual for t in by_rank) - len(by_rank) * by_rank[0].delivered
    assert bool((missing.abs() <= RELATIVE * sum(t.magnitude for t in by_rank)).all())


@pytest.mark.parametrize("kind", ["growing", *(pytest.param(k, marks=pytest.mark.long) for k in ("skew", "waking"))])
@pytest.mark.parametrize("name", [n if n in SHOWN else pytest.param(n, marks=pytest.mark.long) for n in NAMES])
def test_every_law_holds_for_200_steps(name: str, kind: str) -> None:
    case = Case(algorithms(0.02)[name], size=2, numel=400, kind=kind, steps=STEPS, jump_at=100)
    check_every_law(case, on_threads(2, trace, case))


@pytest.mark.long
@pytest.mark.parametrize(("size", "numel", "density"), [(4, 3000, 0.01), (5, 257, 0.1), (7, 5, 0.5)])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_over_200_steps(name: str, size: int, numel: int, density: float) -> None:
    case = Case(algorithms(density)[name], size, numel, "drifting", steps=STEPS)
    check_nothing_was_lost(on_threads(size, totals, case))


@pytest.mark.timeout(180)  # eight ranks on a busy machine
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["heavy tails", pytest.param("drifting", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("size", "numel", "density"),
    [
        (2, 20_000, 0.01),
        pytest.param(1, 20_000, 0.01, marks=pytest.mark.long),
        pytest.param(4, 20_000, 0.01, marks=pytest.mark.long),
        pytest.param(8, 20_000, 0.01, marks=pytest.mark.long),
        pytest.param(4, 5_000, 0.02, marks=pytest.mark.long),
        pytest.param(3, 60_000, 0.003, marks=pytest.mark.long),
        pytest.param(2, 120_000, 0.02, marks=pytest.mark.long),  # k is large enough for sampled thresholds
    ],
)
def test_the_selected_count_settles_within_the_band(
    mode: str, kind: str, size: int, numel: int, density: float
) -> None:
    """Of independent steps, and of a base vector plus noise ("drifting"), which correlates in time."""
    case = Case(oktopk(mode, density=density), size, numel, kind, steps=STEPS)
    by_rank = on_threads(size, totals, case)
    check_nothing_was_lost(by_rank)
    settled = [count / wanted(case) for t in by_rank for count in t.selected[SETTLED:]]
    assert BAND[0] <= min(settled), f"{min(settled):.3f} k selected"
    assert max(settled) <= BAND[1], f"{max(settled):.3f} k selected"


@pytest.mark.parametrize(
    ("settings", "steps"),
    [pytest.param(PLAIN, 60, id="plain"), pytest.param({}, 240, id="as it is", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("mode", MODES)
def test_no_coordinate_waits_for_ever(mode: str, settings: dict[str, Any], steps: int) -> None:
    """A constant gradient asks for everything at once, every step: whoever is left out must have its turn later.

    Scales let a segment wait longer: they are those of what waits, too, and grow with it.
    """
    case = Case(oktopk(mode, density=0.05, **settings), size=4, numel=400, kind="constant", steps=steps)
    by_rank = on_threads(4, totals, case)
    assert float(by_rank[0].delivered.abs().min()) > 0
