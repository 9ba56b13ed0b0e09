"""What is seen while acc is made is what a look at all of acc would find, or it says that it is not."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import OkTopk, Reducer, run_local
from oktopk.feedback import Residual
from oktopk.kernels.reference import at_least
from oktopk.prefilter import Prefilter

CPU = torch.device("cpu")


def random(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    beyond=st.integers(0, 10),
    cuts=st.lists(st.integers(0, 160), max_size=4),
)
def test_seen_in_pieces_is_what_a_look_at_all_finds(lengths: list[int], beyond: int, cuts: list[int]) -> None:
    """Pieces need not be segments, and what lies beyond the last segment is added, but not looked at."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    numel = bounds[-1] + beyond
    floors = [0.3 * (i + 1) for i in range(len(lengths))]
    grad, prefilter = random(numel), Prefilter(bounds, floors)
    residual = Residual(numel, torch.float32, CPU)
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for low, high in itertools.pairwise(edges):
        residual.accumulate_(grad[low:high], slice(low, high), prefilter=prefilter)
    assert torch.equal(residual.acc, grad)
    whole = prefilter.all_of(bounds[-1])
    if whole is None:
        assert bounds[-1] == 0
        return
    assert torch.equal(whole[0], at_least(grad[: bounds[-1]], bounds, floors))
    assert torch.equal(whole[1], grad[whole[0]])


def test_what_was_not_all_seen_or_not_in_order_is_not_taken_for_the_whole() -> None:
    residual, prefilter = Residual(10, torch.float32, CPU), Prefilter([0, 10], [0.1])
    residual.accumulate_(random(5), slice(0, 5), prefilter=prefilter)
    assert prefilter.all_of(10) is None
    residual.accumulate_(random(5), slice(5, 10), scale=0.5, prefilter=prefilter)  # clipped: not looked at
    assert prefilter.all_of(10) is None
    swapped = Prefilter([0, 10], [0.0])
    for low in (5, 0):
        residual.accumulate_(random(5), slice(low, low + 5), prefilter=swapped)
    assert swapped.all_of(10) is None


def test_the_first_that_is_not_finite_is_told_by_its_place_in_acc() -> None:
    residual, prefilter = Residual(30, torch.float32, CPU), Prefilter([0, 8, 30], [0.5, 0.5])
    grad = random(20)
    grad[[4, 13]] = torch.inf
    residual.accumulate_(grad, slice(5, 25), prefilter=prefilter)
    assert residual.nonfinite_at == 9


@pytest.mark.parametrize("factor", [1.0, 0.01, 100.0, 0.0])
def test_a_gradient_that_changes_its_size_is_selected_from_all_the_same(factor: float) -> None:
    """Where the floor was too high nothing was seen, where too low nearly everything: k are sent either way."""

    def job(comm: object) -> list[int]:
        reducer, sent = Reducer(OkTopk(density=0.02), comm), []
        for step in range(6):
            grad = random(20_000, step) * (factor if step >= 3 else 1.0)
            reducer.all_reduce(grad)
            assert reducer.last is not None
            sent.append(reducer.last.selected)
            reducer.load_state_dict({**reducer.state_dict(), "residual": torch.zeros(20_000)})  # so that grad is all
        return sent

    for sent in run_local(2, job):
        wanted = [400] * 3 + ([400] * 3 if factor else [0] * 3)
        assert all(0.85 * k <= count <= 1.25 * k for count, k in zip(sent, wanted, strict=True))
