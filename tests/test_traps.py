"""One test for each trap that has been seen in this field, named after it: each fails where the trap is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk import NonFiniteError, Reducer, Sparse
from oktopk.algorithms.base import Algorithm, Reduced, StepInput
from oktopk.codec import Codec
from oktopk.codec.values import WIRES
from oktopk.partition import consensus, even_cuts
from tests.cases import COVER, NAMES, PLAIN, Case, algorithms, oktopk, take_step, trace
from tests.harness import on_threads
from tests.laws import check_every_law, predicted, same_bits, same_run, selected_limit, wanted

OKTOPK_COVER = [name for name in COVER if name.startswith("oktopk")]
SPARSE_NAMES = [name for name in COVER if name != "dense"]
EXACT_NAMES = [name for name in NAMES if name.endswith("fp32")]  # no rounding: a coordinate goes whole or stays


class Spy(Algorithm):
    """An algorithm that does what another does, and keeps what it was given and what it returned."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.seen: list[tuple[Tensor, Reduced]] = []

    def init(self, numel: int, comm: Any, **more: Any) -> Any:
        return self.algorithm.init(numel, comm, **more)

    def measure(self, state: Any, acc: Tensor, residual: Tensor) -> Tensor | None:
        return self.algorithm.measure(state, acc, residual)

    def reduce_step(self, acc: Tensor, state: Any, comm: Any, inputs: StepInput) -> Reduced:
        before = acc.clone()
        reduced = self.algorithm.reduce_step(acc, state, comm, inputs)
        self.seen.append((before, reduced))
        return reduced


def spied(comm: Any, case: Case) -> list[tuple[Tensor, Reduced]]:
    spy = Spy(case.algorithm)
    reducer = Reducer(spy, comm, segments=case.segments)
    for step in range(case.steps):
        reducer.all_reduce(case.gradient(comm.rank, step))
    return spy.seen


# ---- intersecting with an unsorted list: nearly the whole update applied twice on every threshold-refresh step


@pytest.mark.parametrize("kind", ["correlated ranks", "ties"])
@pytest.mark.parametrize("name", EXACT_NAMES)
def test_intersecting_with_an_unsorted_list_applies_nothing_twice(name: str, kind: str) -> None:
    """Each delivered coordinate is the sum of what the ranks say was taken of theirs, on refresh steps above all."""
    algorithm = algorithms(0.05, rethreshold_every=1, repartition_every=2)[name]
    case = Case(algorithm, size=4, numel=2000, kind=kind, steps=5)
    for at_step in zip(*on_threads(4, spied, case), strict=True):
        parts = torch.zeros(case.numel, dtype=torch.float64)
        for acc, reduced in at_step:
            parts[reduced.taken] += acc[reduced.taken].double()
            for part in reduced.leftover:
                parts[part.index] -= part.value.double()
        magnitude = sum(acc.double().abs() for acc, _ in at_step)
        delivered = at_step[0][1].sum.to_dense().double()
        assert bool(((delivered - parts).abs() <= 1e-6 * magnitude).all())


# ---- strict `>` with k = 1 or ties selects nothing


@pytest.mark.parametrize(
    ("density", "kind", "size"),
    [(1e-9, "normal", 1), (1e-9, "normal", 5), (1e-9, "constant", 3), (0.05, "ties", 3), (0.5, "constant", 3)],
)
@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_strict_greater_with_k_1_or_ties_selects_nothing(name: str, density: float, kind: str, size: int) -> None:
    case = Case(algorithms(density)[name], size, numel=200, kind=kind)
    least = 1 if "bounded" in name else 0.8 * wanted(case)  # equals crowd into few regions, whose blocks are bounded
    for steps in on_threads(size, trace, case):
        assert all(step.record.selected >= least and step.record.nnz >= 1 for step in steps)


# ---- clearing the residual of something that was not sent (the k-th element lost each step)


@pytest.mark.parametrize("kind", ["ties", "growing"])
@pytest.mark.parametrize("name", [name for name in EXACT_NAMES if not name.startswith("gtopk")])
def test_clearing_the_residual_of_something_that_was_not_sent(name: str, kind: str) -> None:
    """A coordinate of a rank stays, bit for bit, or goes whole; and goes only where something was delivered."""
    case = Case(algorithms(0.02, rethreshold_every=2)[name], size=4, numel=3000, kind=kind, steps=5)
    by_rank = on_threads(4, spied, case)
    residuals = [[step.residual for step in steps] for steps in on_threads(4, trace, case)]
    for rank, seen in enumerate(by_rank):
        for (acc, reduced), residual in zip(seen, residuals[rank], strict=True):
            gone = (residual == 0) & (acc != 0)
            assert torch.equal(residual[~gone], acc[~gone])
            delivered = torch.zeros(case.numel, dtype=torch.bool)
            delivered[reduced.sum.index] = True
            cancelled = name.startswith("topkdsa")  # a dense region does not list what summed up to zero
            assert cancelled or not bool((gone & ~delivered).any())
            assert int(gone.sum()) <= reduced.selected


@pytest.mark.parametrize("name", [name for name in EXACT_NAMES if name.startswith("gtopk")])
def test_clearing_what_a_merge_cut(name: str) -> None:
    """gTop-k as published drops, from P = 4 on, a value cut in an early merge whose index survives elsewhere."""
    gradients = [[9.0, 8.0, 0, 0, 0], [0, 8.5, 8.0, 0, 0], [0, 0, 20.0, 0, 1.0], [0, 0, 20.0, 0, 2.0]]

    def job(comm: Any) -> tuple[Tensor, Tensor]:
        reducer = Reducer(algorithms(0.4)[name], comm)
        mean = reducer.all_reduce(torch.tensor(gradients[comm.rank]))
        return mean, reducer.residual

    by_rank = on_threads(4, job)
    kept = sum(residual for _, residual in by_rank)
    assert torch.equal(4 * by_rank[0][0] + kept, torch.tensor(gradients).sum(0))
    assert float(kept[2]) == 8.0  # rank 1 lost it in its first merge, though index 2 won in the end
    assert int(by_rank[0][0].count_nonzero()) == 2


# ---- threshold reuse without a cap: 3k to 12k selected after warm-up, after a refresh or when gradients grow


@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_threshold_reuse_without_a_cap_when_gradients_grow(name: str) -> None:
    case = Case(algorithms(0.01)[name], size=4, numel=5000, kind="heavy tails")

    def job(comm: Any) -> list[Any]:
        reducer, records = case.reducer(comm), []
        for factor in (1.0, 1.0, 1.0, 3.0, 3.0, 100.0, 100.0, 1e4):
            reducer.all_reduce(case.gradient(comm.rank, len(records)) * factor)
            records.append(reducer.last)
        return records

    for rank, records in enumerate(on_threads(4, job)):
        for record in records:
            assert record.selected <= selected_limit(case)
            assert record.sent_bytes <= 4 * predicted(case, rank).most


@pytest.mark.parametrize("name", OKTOPK_COVER)
def test_threshold_reuse_selects_nothing_when_gradients_shrink(name: str) -> None:
    """The same trap, upside down. The residual keeps its size, so what shrinks here is everything: from a fresh one."""
    case = Case(algorithms(0.02)[name], size=1, numel=5000)

    def job(comm: Any) -> int:
        reducer = case.reducer(comm)
        reducer.all_reduce(1e6 * case.gradient(0, 0))
        saved = reducer.state_dict()
        saved["residual"].zero_()
        reducer.load_state_dict(saved)
        reducer.all_reduce(case.gradient(0, 1))
        return reducer.last.selected

    (selected,) = on_threads(1, job)
    assert 0.8 * wanted(case) <= selected <= 1.25 * wanted(case)


# ---- int32 sums of cut points overflow from P = 79 at n = 27.5 M


class Echo:
    """A comm whose other ranks all say what this one says."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.size)


@pytest.mark.parametrize("numel", [27_569_568, 2**31 - 1, 2**31 + 11, 2**40 + 1])
def test_int32_sums_of_cut_points_overflow(numel: int) -> None:
    cuts = torch.tensor([0, numel - 7, numel - 1, numel])
    assert torch.equal(consensus(cuts, Echo(100)), cuts)
    assert consensus(cuts, Echo(100)).dtype == torch.int64


# ---- n % (n//P) in place of n % P when splitting


@given(numel=st.integers(0, 200) | st.integers(0, 2**34), size=st.integers(1, 64))
def test_splitting_with_the_wrong_remainder(numel: int, size: int) -> None:
    cuts = even_cuts(numel, size)
    lengths = cuts.diff().tolist()
    assert (int(cuts[0]), int(cuts[-1]), len(lengths)) == (0, numel, size)
    assert max(lengths) - min(lengths) == (numel % size > 0)


@pytest.mark.parametrize("numel", [10, 13])
@pytest.mark.parametrize("name", COVER)
def test_splitting_with_the_wrong_remainder_loses_the_tail(name: str, numel: int) -> None:
    """Each element in turn is all there is, so that one that nobody owns would never arrive."""

    def job(comm: Any) -> list[Tensor]:
        case = Case(algorithms(0.2)[name], size=4, numel=numel)
        return [case.reducer(comm).all_reduce(spike) for spike in torch.eye(numel)]

    for means in on_threads(4, job):
        assert torch.equal(torch.stack(means), torch.eye(numel))


# ---- warm-up length not a multiple of tau: first sparse step with threshold 0


@pytest.mark.parametrize("warm_up", [0, 5])
@pytest.mark.parametrize("name", [*OKTOPK_COVER, "gaussiank-fp32"])
def test_the_first_sparse_step_has_threshold_0(name: str, warm_up: int) -> None:
    """Steps that came before the first sparse one, here skipped ones, do not count for its periods."""
    case = Case(algorithms(0.01)[name], size=2, numel=4000)

    def job(comm: Any) -> Any:
        reducer = Reducer(case.algorithm, comm, segments=case.segments, on_nonfinite="skip")
        for _ in range(warm_up):
            reducer.all_reduce(torch.full((case.numel,), float("nan")))
        reducer.all_reduce(case.gradient(comm.rank, 0))
        return reducer.last

    for record in on_threads(2, job):
        assert record.step == warm_up
        assert record.threshold > 0
        assert 0.8 * wanted(case) <= record.selected <= 1.25 * wanted(case)


# ---- residual kept in class attributes, shared between two models of one process


@pytest.mark.parametrize("name", COVER)
def test_residual_kept_in_class_attributes(name: str) -> None:
    """Two reducers, even with one algorithm object between them, taking turns: each as if it were alone."""
    algorithm = algorithms(0.05)[name]
    ours, theirs = Case(algorithm, 3, 300, seed=1), Case(algorithm, 3, 500, kind="heavy tails", seed=2)

    def job(comm: Any) -> tuple[list[Any], list[Any]]:
        one, two = ours.reducer(comm), theirs.reducer(comm)
        steps = [(take_step(one, ours, step), take_step(two, theirs, step)) for step in range(ours.steps)]
        return [mine for mine, _ in steps], [other for _, other in steps]

    together = on_threads(3, job)
    same_run([mine for mine, _ in together], on_threads(3, trace, ours))
    same_run([other for _, other in together], on_threads(3, trace, theirs))


# ---- a NaN is never selected and poisons its residual coordinate for ever; Inf spreads


@pytest.mark.parametrize("poison", [float("nan"), -float("inf")], ids=str)
@pytest.mark.parametrize("at_step", [0, 2])
@pytest.mark.parametrize("name", COVER)
def test_a_nan_poisons_the_residual_and_an_inf_spreads(name: str, at_step: int, poison: float) -> None:
    """Refused on all ranks, with rank and index; the residual keeps its bits; the run goes on as if nothing was."""
    case = Case(algorithms(0.05, rethreshold_every=2, repartition_every=2)[name], size=3, numel=200)

    def job(comm: Any) -> list[Any]:
        reducer, steps = case.reducer(comm), []
        for step in range(case.steps):
            for culprit in range(3) if step == at_step else ():
                bad = case.gradient(comm.rank, 77) * 1e30
                if comm.rank == culprit:
                    bad[[41, 160]] = poison
                before = reducer.residual
                with pytest.raises(NonFiniteError, match=rf"rank {culprit}.*index 41 of 200"):
                    reducer.all_reduce(bad)
                after = reducer.residual
                assert same_bits(torch.zeros_like(after) if before is None else before, after)
            steps.append(take_step(reducer, case, step))
        return steps

    same_run(on_threads(3, job), on_threads(3, trace, case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COVER)
def test_a_sum_that_overflows_poisons_the_residual(name: str, dtype: torch.dtype) -> None:
    """Each gradient is finite, their sum is not: refused on all ranks, all as before, and the reducer goes on."""
    case = Case(algorithms(0.1)[name], size=4, numel=100, dtype=dtype)

    def job(comm: Any) -> Tensor:
        reducer = case.reducer(comm)
        reducer.all_reduce(case.gradient(comm.rank, 0))
        before = reducer.residual
        huge = case.gradient(comm.rank, 1)
        huge[7] = 3e38
        with pytest.raises(NonFiniteError, match="sum over ranks"):
            reducer.all_reduce(huge)
        assert same_bits(before, reducer.residual)
        return reducer.all_reduce(case.gradient(comm.rank, 2))

    for mean in on_threads(4, job):
        assert bool(mean.isfinite().all())


# ---- indices exact above 2^24 (never inside float32)


@given(numel=st.sampled_from([2**24 + 10, 2**25 + 3, 2**31 - 1, 2**31, 2**33 + 5]), wire=st.sampled_from(list(WIRES)))
def test_indices_inside_float32(numel: int, wire: str) -> None:
    index = torch.tensor([0, 2**24 - 1, 2**24 + 1, 2**24 + 3, 2**24 + 5, numel - 2, numel - 1]).unique()
    part = Sparse(index, torch.arange(1.0, len(index) + 1), numel)
    codec = Codec(numel, wire)
    for capacity in (None, len(index), len(index) + 1, 64):
        back, note = codec.decode(codec.encode(part, capacity, note=numel)[0], torch.float32, capacity)
        assert torch.equal(back.index, index)
        assert torch.equal(back.value, part.value)
        assert note == numel


@pytest.mark.parametrize(
    "name",
    [
        "oktopk-bounded-magnitude-fp32",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("gtopk-bf16", "topkdsa-fp32")),
    ],
)
def test_indices_inside_float32_in_a_whole_step(name: str) -> None:
    numel = 2**24 + 10
    spikes = torch.tensor([5, 2**24 - 1, 2**24 + 1, 2**24 + 3, numel - 1])

    def job(comm: Any) -> tuple[Tensor, int]:
        grad = torch.zeros(numel)
        grad[spikes] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * (1 + comm.rank)
        mean = Reducer(algorithms(5.5 / numel)[name], comm).all_reduce(grad)
        return mean[spikes], int(mean.count_nonzero())

    for found, nnz in on_threads(2, job):
        delivered = found != 0
        assert nnz == int(delivered.sum()) >= 3
        assert torch.equal(found[delivered], (torch.arange(1.0, 6.0) * 1.5)[delivered])


# ---- empty regions, empty local and empty global selections: every rank still joins every collective


@pytest.mark.parametrize("kind", ["zero", "few", "waking"])
@pytest.mark.parametrize("name", COVER)
def test_a_rank_with_nothing_to_say_stays_away(name: str, kind: str) -> None:
    case = Case(algorithms(0.03, rethreshold_every=2, repartition_every=1)[name], size=5, numel=90, kind=kind, steps=6)
    check_every_law(case, on_threads(5, trace, case))


@pytest.mark.parametrize("mode", ["bounded", "paper"])
def test_all_large_values_in_one_region(mode: str) -> None:
    """The regions have to follow the gradient, or one owner would do all the work and most would wait."""
    case = Case(oktopk(mode, density=0.05, **PLAIN), size=4, numel=4000, kind="skew", steps=6)
    by_rank = on_threads(4, trace, case)
    check_every_law(case, by_rank)
    for steps in by_rank:
        assert steps[-1].record.selected >= 0.8 * wanted(case)
        assert steps[-1].record.nnz >= 0.8 * wanted(case)
