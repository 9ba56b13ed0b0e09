"""What each algorithm delivers on a first step, against its definition, written down as plainly as it can be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, Reducer, TopkA, TopkDSA
from tests.cases import PLAIN, Case, oktopk, trace
from tests.harness import on_threads
from tests.laws import same_bits, same_run, wanted

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


@pytest.mark.parametrize("kind", KINDS)
def test_gaussiank_is_the_sum_of_about_k_of_each_rank(kind: str) -> None:
    case = Case(GaussianK(density=0.05), 4, 4000, kind, steps=3)
    for steps in on_threads(4, trace, case):
        counts = [step.record.selected for step in steps]
        assert all(0.8 * wanted(case) <= count <= 1.25 * wanted(case) for count in counts)


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
    shares = {}
    for ranking in ("magnitude", "scaled"):

        def job(comm: Any, ranking: str = ranking) -> int:
            grad = torch.randn(2000, generator=torch.Generator().manual_seed(comm.rank))
            grad[1000:] /= 1000
            reducer = Reducer(oktopk(mode, density=0.1, ranking=ranking), comm, segments=[1000, 1000])
            return int(reducer.all_reduce(grad)[1000:].count_nonzero())

        shares[ranking] = on_threads(2, job)[0]
    assert 60 <= shares["scaled"] <= 140
    # By magnitude, what the bounded owner of the second half keeps is still the best of its region.
    assert shares["magnitude"] == 0


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_a_scaled_ranking_changes_the_choice_and_never_the_values(wire: str) -> None:
    case = Case(OkTopkPaper(density=0.2, ranking="scaled", wire=wire), 1, 100, "heavy tails", steps=1)
    ((step,),) = on_threads(1, trace, case)
    chosen = step.mean != 0
    assert torch.allclose(step.mean[chosen], step.acc[chosen], rtol=0.01 if wire == "bf16" else 0.0)
    assert int(chosen.sum()) == 20


@pytest.mark.parametrize("algorithm", [TopkA(density=0.05), GTopk(density=0.05), OkTopkPaper(density=0.05, **PLAIN)])
def test_identical_ranks_have_the_result_of_one(algorithm: Any) -> None:
    """Sums of four equal numbers are exact, so that every bit has to agree, until the first sweep, in step 5."""
    one = Case(algorithm, 1, 400, "identical ranks", steps=5)
    (alone,) = on_threads(1, trace, one)
    same_run([alone] * 4, on_threads(4, trace, replace(one, size=4)))


@pytest.mark.parametrize("algorithm", [TopkA(density=1), TopkDSA(density=1), OkTopk(density=1), OkTopkPaper(density=1)])
def test_an_owner_sums_in_rank_order(algorithm: Any) -> None:
    """((1e8 + 1) - 1e8) + 1 is 1 in float32, and 2, 0 or 1e8 in other orders: wherever the coordinate's owner is."""
    values = [1e8, 1.0, -1e8, 1.0]

    def job(comm: Any) -> Tensor:
        return Reducer(algorithm, comm).all_reduce(torch.full((8,), values[comm.rank]))

    assert all(mean.tolist() == [0.25] * 8 for mean in on_threads(4, job))


# ---- the way, not only the result


class Recorder:
    """A comm that keeps the order of the swaps it is asked for."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.swaps = comm, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def sendrecv(self, block: Any, to: int, source: int, size: int, device: Any = "cpu") -> Any:
        self.swaps.append((to, source))
        return self._comm.sendrecv(block, to, source, size, device)


def test_paper_sends_in_rotation_so_that_nobody_is_everybodys_next() -> None:
    def job(comm: Any) -> list[tuple[int, int]]:
        recorder = Recorder(comm)
        case = Case(OkTopkPaper(density=0.5), comm.size, 400)
        case.reducer(recorder).all_reduce(case.gradient(comm.rank, 0))
        return recorder.swaps

    for rank, swaps in enumerate(on_threads(5, job)):
        assert swaps == [((rank + d) % 5, (rank - d) % 5) for d in range(1, 5)]


@pytest.mark.parametrize("pairs", [1, 7, 64])
def test_paper_has_the_same_bits_whatever_the_size_of_a_bucket(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(OkTopkPaper(density=0.2, rethreshold_every=2, **PLAIN), 4, 900, "skew")
    whole = on_threads(4, trace, case)
    monkeypatch.setattr("oktopk.algorithms.oktopk_paper.BUCKET_PAIRS", pairs)
    same_run(on_threads(4, trace, case), whole)


def test_bounded_is_two_collectives_a_step_and_no_other_message() -> None:
    def job(comm: Any) -> Any:
        case = Case(OkTopk(density=0.05), comm.size, 1000, "skew", steps=70)  # across new scales
        reducer = case.reducer(comm)
        for step in range(case.steps):
            reducer.all_reduce(case.gradient(comm.rank, step))
        return reducer.traffic

    for traffic in on_threads(3, job):
        calls = {key: count for key, count in traffic.calls.items() if key != ("other", "all_gather")}  # the hand-shake
        assert calls == {("exchange", "all_to_all"): 70, ("gather", "all_gather"): 70}
        assert len(traffic.sizes[("exchange", "all_to_all")]) == len(traffic.sizes[("gather", "all_gather")]) == 1


def test_paper_balances_a_gather_where_one_owner_has_everything() -> None:
    """Regions go stale between repartitions; then all that is kept may lie with one owner."""
    case = Case(OkTopkPaper(density=0.05, repartition_every=1000, **PLAIN), 4, 2000)

    def job(comm: Any) -> list[Any]:
        reducer, records = case.reducer(comm), []
        for step in range(4):
            grad = torch.zeros(2000)
            spot = slice(0, 2000) if step == 0 else slice(1500, 2000)
            grad[spot] = case.gradient(comm.rank, step)[spot] * 100.0**step
            reducer.all_reduce(grad)
            records.append(reducer.last)
        return records

    k = wanted(case)
    for records in on_threads(4, job):
        for record in records[1:]:
            assert record.sent_by_phase["gather"] / 4 <= 4 * 1.25 * k * 3 / 4 + 3 * 12
