"""What the settings of Ok-Topk mean: when scales and regions are made anew, and how values travel by default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk import OkTopk
from oktopk.cost import predict
from tests.cases import Case, oktopk, take_step, trace
from tests.harness import on_threads
from tests.laws import same_run


@given(numel=st.integers(0, 3) | st.integers(0, 1_000_000), density=st.sampled_from([1e-6, 0.03, 0.9999, 1.0]))
def test_by_default_values_travel_as_int8_unless_everything_travels(numel: int, density: float) -> None:
    algorithm = OkTopk(density=density)
    everything = numel <= 1 or density == 1
    named = replace(algorithm, wire="fp32" if everything else "int8")
    assert algorithm.codec(numel) == named.codec(numel)
    assert predict(algorithm, numel, 4) == predict(named, numel, 4)
    for wire in ("fp32", "bf16", "int8"):  # one that is named is kept
        assert replace(algorithm, wire=wire).codec(numel).wire == wire


def test_the_default_is_the_same_run_as_the_wire_it_stands_for() -> None:
    auto = Case(OkTopk(density=0.05), size=3, numel=3000, kind="heavy tails")
    named = replace(auto, algorithm=OkTopk(density=0.05, wire="int8"))
    same_run(on_threads(3, trace, auto), on_threads(3, trace, named))


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
    first, other = on_threads(2, states, case)
    for seen in (first, other):
        new_scales, new_cuts = ([i for i in range(1, 8) if not seen[i][n].equal(seen[i - 1][n])] for n in (0, 1))
        assert new_scales == [2, 4, 6]
        if mode == "paper":  # bounded moves its regions when one is asked for more than fits
            assert new_cuts == [3, 6]
    if mode == "paper":  # all ranks have the same scales
        assert all(mine[0].equal(theirs[0]) for mine, theirs in zip(first, other, strict=True))
