"""What each algorithm delivers on a first step, against its plainest definition, and what Ok-Topk's settings mean."""

import math
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk import Dense, GTopk, OkTopk, OkTopkPaper, Reducer, TopkA, TopkDSA
from oktopk.cost import predict
from tests.cases import PLAIN, Case, oktopk, take_step, trace
from tests.harness import on_threads
from tests.laws import same_bits, wanted

KINDS = ("heavy tails", "correlated ranks", "skew", "ties")
kinds = st.sampled_from(KINDS)
sizes = st.integers(1, 8)
seeds = st.integers(0, 1000)


def largest(dense: Tensor, k: int) -> Tensor:
    """Return `dense` with all but its k largest zeroed; of equals the first stay."""
    order = sorted(range(len(dense)), key=lambda i: (-abs(float(dense[i])), i))
    kept = torch.zeros_like(dense)
    kept[order[:k]] = dense[order[:k]]
    return kept


def delivered(case: Case) -> Tensor:
    """Return the sum that the first step delivers."""
    return on_threads(case.size, trace, replace(case, steps=1))[0][0].mean.double() * case.size


def gradients(case: Case) -> list[Tensor]:
    return [case.gradient(rank, 0).double() for rank in range(case.size)]


def close(ours: Tensor, expected: Tensor) -> bool:
    return torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


@given(size=sizes, kind=kinds, seed=seeds)
def test_dense_topka_and_dsa_are_the_sum_of_what_each_rank_selects(size: int, kind: str, seed: int) -> None:
    for algorithm, k in ((Dense(), 200), (TopkA(density=0.1), 20), (TopkDSA(density=0.1), 20)):
        case = Case(algorithm, size, 200, kind, seed=seed)
        assert close(delivered(case), sum(largest(grad, k) for grad in gradients(case)))


@given(kind=kinds, density=st.sampled_from([0.01, 0.2, 0.9]))
def test_dsa_and_topka_give_the_same_bits(kind: str, density: float) -> None:
    """Whether a region travels as pairs or dense is nobody's business but the wire's."""
    topka, dsa = (Case(cls(density=density), 4, 333, kind, steps=3) for cls in (TopkA, TopkDSA))
    for ours, theirs in zip(on_threads(4, trace, topka)[0], on_threads(4, trace, dsa)[0], strict=True):
        assert same_bits(ours.mean + 0.0, theirs.mean + 0.0)  # a cancelled pair may be -0.0 in one of them
        assert same_bits(ours.residual, theirs.residual)


@given(size=sizes, kind=kinds, seed=seeds)
def test_gtopk_is_a_tree_of_merges_cut_to_k(size: int, kind: str, seed: int) -> None:
    case = Case(GTopk(density=0.1), size, 200, kind, seed=seed)
    parts = [largest(grad, 20) for grad in gradients(case)]
    distance = 1
    while distance < size:
        for rank in range(0, size - distance, 2 * distance):
            parts[rank] = largest(parts[rank] + parts[rank + distance], 20)
        distance *= 2
    assert close(delivered(case), parts[0])


@given(size=sizes, kind=st.sampled_from(KINDS[:3]), seed=seeds)
def test_paper_delivers_the_k_largest_of_the_sum_of_each_ranks_k_largest(size: int, kind: str, seed: int) -> None:
    case = Case(OkTopkPaper(density=0.1, **PLAIN), size, 200, kind, seed=seed)
    expected = largest(sum(largest(grad, 20) for grad in gradients(case)), 20)
    assert close(delivered(case), expected)


@given(size=sizes, kind=st.sampled_from(KINDS[:2]), seed=seeds)
def test_bounded_delivers_the_largest_of_each_region(size: int, kind: str, seed: int) -> None:
    """With room enough for all (slack 8), so that only the owners' choice is left to see: demand/P of each region."""
    case = Case(OkTopk(density=0.1, slack=8.0, **PLAIN), size, 200, kind, seed=seed)
    selected = torch.stack([largest(grad, 20) for grad in gradients(case)])
    regions = [selected[:, i * 200 // size : (i + 1) * 200 // size] for i in range(size)]
    shares = [math.ceil(int(region.count_nonzero()) / size) for region in regions]
    expected = [largest(region.sum(0), share) for region, share in zip(regions, shares, strict=True)]
    assert close(delivered(case), torch.cat(expected))


@pytest.mark.parametrize("mode", ["bounded", "paper"])
def test_a_scaled_ranking_serves_every_segment(mode: str) -> None:
    """The second half is a thousand times quieter; by magnitude it would get nothing."""

    def job(comm: Any, ranking: str) -> int:
        grad = torch.randn(2000, generator=torch.Generator().manual_seed(comm.rank))
        grad[1000:] /= 1000
        reducer = Reducer(oktopk(mode, density=0.1, ranking=ranking), comm, segments=[1000, 1000])
        return int(reducer.all_reduce(grad)[1000:].count_nonzero())

    assert on_threads(2, job, "magnitude") == [0, 0]
    assert 60 <= on_threads(2, job, "scaled")[0] <= 140


@pytest.mark.parametrize("algorithm", [TopkA(density=1), TopkDSA(density=1), OkTopk(density=1), OkTopkPaper(density=1)])
def test_an_owner_sums_in_rank_order(algorithm: Any) -> None:
    """((1e8 + 1) - 1e8) + 1 is 1 in float32, and 2, 0 or 1e8 in other orders: wherever the coordinate's owner is."""
    values = [1e8, 1.0, -1e8, 1.0]

    def job(comm: Any) -> Tensor:
        return Reducer(algorithm, comm).all_reduce(torch.full((8,), values[comm.rank]))

    assert all(mean.tolist() == [0.25] * 8 for mean in on_threads(4, job))


def test_paper_sends_in_rotation_so_that_nobody_is_everybodys_next() -> None:
    case = Case(OkTopkPaper(density=0.5), 5, 400)

    def job(comm: Any) -> list[tuple[int, int]]:
        with mock.patch.object(comm, "sendrecv", wraps=comm.sendrecv) as sendrecv:
            case.reducer(comm).all_reduce(case.gradient(comm.rank, 0))
        return [call.args[1:3] for call in sendrecv.call_args_list]

    for rank, swaps in enumerate(on_threads(5, job)):
        assert swaps == [((rank + d) % 5, (rank - d) % 5) for d in range(1, 5)]


@pytest.mark.parametrize("pairs", [1, 7, 64])
def test_paper_has_the_same_bits_whatever_the_size_of_a_bucket(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(OkTopkPaper(density=0.2, rethreshold_every=2, **PLAIN), 4, 900, "skew")
    whole = on_threads(4, trace, case)
    monkeypatch.setattr("oktopk.algorithms.oktopk_paper.BUCKET_PAIRS", pairs)
    for ours, theirs in zip(chain(*on_threads(4, trace, case)), chain(*whole), strict=True):
        assert same_bits(ours.mean, theirs.mean)
        assert same_bits(ours.residual, theirs.residual)


def test_bounded_is_two_collectives_a_step_and_no_other_message() -> None:
    case = Case(OkTopk(density=0.05), 3, 1000, "skew", steps=70)  # across new scales

    def job(comm: Any) -> Any:
        reducer = case.reducer(comm)
        for step in range(case.steps):
            reducer.all_reduce(case.gradient(comm.rank, step))
        return reducer.traffic

    for traffic in on_threads(3, job):
        calls = {key: count for key, count in traffic.calls.items() if key != ("other", "all_gather")}  # the hand-shake
        assert calls == {("exchange", "all_to_all"): 70, ("gather", "all_gather"): 70}
        cost = predict(case.algorithm, case.numel, 3)  # a message is larger where a region is longer
        for key in calls:
            assert 4 * cost.least <= 2 * 2 * min(traffic.sizes[key]) <= 2 * 2 * max(traffic.sizes[key]) <= 4 * cost.most


def test_paper_balances_a_gather_where_one_owner_has_everything() -> None:
    """Regions go stale between repartitions; then all that is kept may lie with one owner."""
    case = Case(OkTopkPaper(density=0.05, repartition_every=1000, **PLAIN), 4, 2000)

    def job(comm: Any) -> int:
        reducer, words = case.reducer(comm), []
        for step in range(4):
            grad = case.gradient(comm.rank, step) * 100.0**step
            grad[: 1500 if step else 0] = 0
            reducer.all_reduce(grad)
            words.append(reducer.last.sent_by_phase["gather"] // 4)
        return max(words[1:])

    assert max(on_threads(4, job)) <= 4 * 1.25 * wanted(case) * 3 / 4 + 3 * 12


@given(numel=st.integers(0, 3) | st.integers(0, 1_000_000), density=st.sampled_from([1e-6, 0.03, 0.9999, 1.0]))
def test_by_default_values_travel_as_int8_unless_everything_travels(numel: int, density: float) -> None:
    algorithm = OkTopk(density=density)
    everything = numel <= 1 or density == 1
    named = replace(algorithm, wire="fp32" if everything else "int8")
    assert algorithm.codec(numel) == named.codec(numel)
    assert predict(algorithm, numel, 4) == predict(named, numel, 4)
    for wire in ("fp32", "bf16", "int8"):  # one that is named is kept
        assert replace(algorithm, wire=wire).codec(numel).wire == wire


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
