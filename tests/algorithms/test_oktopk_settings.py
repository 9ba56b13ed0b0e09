"""What the settings of Ok-Topk mean: when scales and regions are made anew, and how values travel by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from oktopk import OkTopk, OkTopkPaper
from oktopk.cost import predict
from tests.cases import Case, oktopk, take_step, trace
from tests.harness import on_threads


@pytest.mark.parametrize("numel", [0, 1, 2, 999, 1_000_000])
@pytest.mark.parametrize("density", [1e-6, 0.03, 0.9999, 1.0])
def test_by_default_values_travel_as_int8_unless_everything_travels(numel: int, density: float) -> None:
    algorithm = OkTopk(density=density)
    everything = numel <= 1 or density == 1
    named = replace(algorithm, wire="fp32" if everything else "int8")
    assert algorithm.codec(numel) == named.codec(numel)
    assert predict(algorithm, numel, 4) == predict(named, numel, 4)


def test_the_default_is_the_same_run_as_the_wire_it_stands_for() -> None:
    auto = Case(OkTopk(density=0.05), size=3, numel=3000, kind="heavy tails")
    named = replace(auto, algorithm=OkTopk(density=0.05, wire="int8"))
    for ours, theirs in zip(on_threads(3, trace, auto), on_threads(3, trace, named), strict=True):
        assert all(a.mean.equal(b.mean) and a.residual.equal(b.residual) for a, b in zip(ours, theirs, strict=True))


def test_a_wire_that_is_named_is_kept_at_density_1() -> None:
    assert [OkTopk(density=1, wire=wire).codec(10).wire for wire in ("fp32", "bf16", "int8")] == [
        "fp32",
        "bf16",
        "int8",
    ]


def states(comm: Any, case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return the scales and the cuts after each step."""
    reducer, seen = case.reducer(comm), []
    for step in range(case.steps):
        take_step(reducer, case, step)
        state = reducer.state_dict()["state"]
        seen.append((state["ranking"]["scale"], state["cuts"]))
    return seen


@pytest.mark.parametrize("mode", ["bounded", "paper"])
def test_scales_and_regions_have_their_own_periods(mode: str) -> None:
    algorithm = oktopk(mode, density=0.05, ranking="scaled", rescale_every=2, repartition_every=3)
    case = Case(algorithm, size=2, numel=2000, kind="heavy tails", steps=8)
    for seen in on_threads(2, states, case):
        new_scales = [0, *(i for i in range(1, 8) if not seen[i][0].equal(seen[i - 1][0]))]
        new_cuts = [0, *(i for i in range(1, 8) if not seen[i][1].equal(seen[i - 1][1]))]
        assert new_scales == [0, 2, 4, 6]
        if mode == "paper":  # bounded moves its regions when one is asked for more than fits
            assert new_cuts == [0, 3, 6]


def test_in_paper_mode_all_ranks_have_the_same_scales() -> None:
    case = Case(
        OkTopkPaper(density=0.05, ranking="scaled", rescale_every=2),
        size=3,
        numel=2000,
        kind="heavy tails",
        steps=5,
    )
    first, *others = on_threads(3, states, case)
    assert all(mine[0].equal(theirs[0]) for other in others for mine, theirs in zip(first, other, strict=True))
