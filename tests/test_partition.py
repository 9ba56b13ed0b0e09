from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.partition import balanced_cuts, consensus, even_cuts, rebalanced_cuts
from tests.harness import on_threads


@st.composite
def selections(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    numel = draw(st.integers(1, 300) | st.just(2**40))
    index = draw(st.sets(st.integers(0, numel - 1), max_size=300))
    return torch.tensor(sorted(index), dtype=torch.int64), numel, draw(st.integers(1, 9))


def are_cuts(cuts: torch.Tensor, numel: int, parts: int) -> bool:
    ends = (int(cuts[0]), int(cuts[-1]), len(cuts)) == (0, numel, parts + 1)
    return ends and cuts.dtype == torch.int64 and bool((cuts.diff() >= 0).all())


@given(selection=selections(), data=st.data())
def test_balanced_cuts_share_a_selection_evenly(selection: tuple[torch.Tensor, int, int], data: Any) -> None:
    index, numel, parts = selection
    cuts = balanced_cuts(index, numel, parts)
    assert are_cuts(cuts, numel, parts)
    demand = data.draw(st.lists(st.integers(0, 2**31), min_size=parts, max_size=parts))
    inner = sorted(data.draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1)))
    assert are_cuts(rebalanced_cuts(torch.tensor([0, *inner, numel]), index, demand), numel, parts)
    shares = torch.searchsorted(index, cuts).diff().tolist()
    assert sum(shares) == len(index)
    assert max(shares) - min(shares) <= 1 if len(index) else torch.equal(cuts, even_cuts(numel, parts))


@given(st.lists(st.sets(st.integers(0, 99), min_size=1), min_size=1, max_size=5))
def test_the_consensus_is_the_mean_of_all_cuts_and_the_same_everywhere(chosen: list[set[int]]) -> None:
    size = len(chosen)
    mine = [balanced_cuts(torch.tensor(sorted(index)), 100, size) for index in chosen]

    def job(comm: Any) -> list[int]:
        cuts = mine[comm.rank].clone()
        agreed = consensus(cuts, comm)
        assert torch.equal(cuts, mine[comm.rank])  # its own are left alone
        assert are_cuts(agreed, 100, size)
        return agreed.tolist()

    expected = (sum(mine) // size).tolist()
    assert on_threads(size, job) == [expected] * size


@pytest.mark.parametrize(("cuts", "index", "demand", "expected", "within"), [
    ([0, 100, 200, 300, 400], range(0, 100, 2), [1000, 0, 0, 0], [0, 25, 50, 75, 400], 3),  # all follow it
    ([0, 100, 200, 300, 400], range(0, 400, 4), [25, 25, 25, 25], [0, 100, 200, 300, 400], 4),  # fair already
    ([0, 3, 10], [], [5, 5], [0, 3, 10], 0),  # nothing was delivered
    ([0, 3, 10], [1, 7], [0, 0], [0, 3, 10], 0),  # nothing was asked for
    ([0, 3, 10], [1, 7], [0, 4], [0, 7, 10], 0),  # of the last element alone
])  # fmt: skip
def test_rebalanced_cuts_follow_the_demand(cuts: Any, index: Any, demand: Any, expected: Any, within: int) -> None:
    again = rebalanced_cuts(torch.tensor(cuts), torch.tensor(list(index), dtype=torch.int64), demand)
    assert int((again - torch.tensor(expected)).abs().max()) <= within
