import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import Sparse
from oktopk.feedback import FEW, Prefilter, Residual
from oktopk.kernels import REFERENCE
from tests.laws import same_bits

CPU = torch.device("cpu")


def residual_of(*values: float) -> Residual:
    residual = Residual(len(values), torch.float32, CPU)
    residual.held.copy_(torch.tensor(values))
    return residual


@pytest.mark.parametrize("taken", [torch.tensor([1, 3]), torch.tensor([False, True, False, True]), slice(1, 4, 2)])
def test_what_was_taken_is_gone_and_the_rest_stays(taken: torch.Tensor | slice) -> None:
    residual = residual_of(1, 2, 3, 4)
    assert residual.accumulate_(torch.tensor([10.0, 10, 10, 10])).tolist() == [11, 12, 13, 14]
    residual.retain_(taken)
    residual.commit_()
    assert residual.held.tolist() == [11, 0, 13, 0]
    residual.accumulate_(torch.ones(4))  # in the other buffer, which holds nothing of the first step
    residual.retain_(taken)
    residual.commit_()
    assert residual.held.tolist() == [12, 0, 14, 0]


def test_what_is_returned_is_added_to_what_stays() -> None:
    residual = residual_of(0, 0, 0)
    residual.accumulate_(torch.tensor([1.0, 2, 3]))
    part = Sparse(torch.tensor([0, 2]), torch.tensor([0.5, 0.25]), 3)
    residual.retain_(torch.tensor([0]), (part, part, torch.tensor([0.0, 1.0, 0.0])))
    residual.commit_()
    assert residual.held.tolist() == [1.0, 3.0, 3.5]


def test_a_step_that_is_not_committed_never_was() -> None:
    residual = residual_of(0.1, -0.0, 1e-45)
    before = residual.held.clone()
    for taken in (slice(None), torch.tensor([2])):
        residual.accumulate_(torch.tensor([5.0, float("nan"), float("inf")]))
        residual.retain_(taken, (Sparse(torch.tensor([1]), torch.tensor([9.0]), 3),))
        assert same_bits(residual.held, before)
        assert residual.nonfinite_at == 1
    assert residual.accumulate_(torch.zeros(3)).tolist() == pytest.approx(before.tolist())
    assert residual.nonfinite_at == -1


def test_a_part_of_it_can_be_made_alone() -> None:
    """Where a residual is many parameters', each slice is a step of its own until all are committed."""
    residual = residual_of(1, 2, 3, 4)
    residual.accumulate_(torch.tensor([10.0, 10.0]), at=slice(0, 2), scale=0.5)
    acc = residual.accumulate_(torch.tensor([1.0, float("nan")]), at=slice(2, 4), decay=0.5)
    assert (acc[0].item(), residual.nonfinite_at) == (2.5, 3)
    residual.accumulate_(torch.tensor([1.0, 1.0]), at=slice(2, 4))
    residual.retain_(torch.tensor([1]), (Sparse(torch.tensor([0]), torch.tensor([100.0]), 2),), at=slice(2, 4))
    residual.commit_()
    assert residual.held.tolist() == [6, 7, 104, 0]


def random(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5),
    beyond=st.integers(0, 10),
    cuts=st.lists(st.integers(0, 160), max_size=4),
    height=st.sampled_from([0.3, 1.5, 2.5]),
)
def test_seen_in_pieces_is_what_a_look_at_all_finds(
    lengths: list[int], beyond: int, cuts: list[int], height: float
) -> None:
    """Pieces need not be segments, and what lies beyond the last segment is added, but not looked at."""
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    numel = bounds[-1] + beyond
    floors = [height + 0.3 * i for i in range(len(lengths))]
    grad, prefilter = random(numel), Prefilter(bounds, floors)
    residual = Residual(numel, torch.float32, CPU)
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for low, high in itertools.pairwise(edges):
        residual.accumulate_(grad[low:high], slice(low, high), prefilter=prefilter)
    assert torch.equal(residual.acc, grad)
    whole, wanted = prefilter.all_of(bounds[-1]), REFERENCE.at_least(grad[: bounds[-1]], bounds, floors)
    if whole is None:
        assert bounds[-1] == 0 or len(wanted) > bounds[-1] // FEW
        return
    assert len(wanted) <= bounds[-1] // FEW
    assert torch.equal(whole[0], wanted)
    assert torch.equal(whole[1], grad[whole[0]])


def test_what_was_not_all_seen_or_not_in_order_is_not_taken_for_the_whole() -> None:
    residual, prefilter = Residual(64, torch.float32, CPU), Prefilter([0, 64], [0.5])
    one = torch.eye(1, 32)[0]
    residual.accumulate_(one, slice(0, 32), prefilter=prefilter)
    assert prefilter.all_of(64) is None
    residual.accumulate_(one, slice(32, 64), scale=0.5, prefilter=prefilter)  # clipped: not looked at
    assert prefilter.all_of(64) is None
    for starts, is_whole in (((32, 0), False), ((0, 32), True)):
        another = Prefilter([0, 64], [0.5])
        for low in starts:
            residual.accumulate_(one, slice(low, low + 32), prefilter=another)
        assert (another.all_of(64) is not None) == is_whole


def test_the_first_that_is_not_finite_is_told_by_its_place_in_acc() -> None:
    residual, prefilter = Residual(30, torch.float32, CPU), Prefilter([0, 8, 30], [0.5, 0.5])
    grad = random(20)
    grad[[4, 13]] = torch.inf
    residual.accumulate_(grad, slice(5, 25), prefilter=prefilter)
    assert residual.nonfinite_at == 9
