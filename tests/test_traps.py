"""One test for each trap that has been seen in this field, named after it: each fails where the trap is."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk import GTopk, NonFiniteError, OkTopk, Reducer
from oktopk.partition import consensus, even_cuts
from tests.cases import COVER, NAMES, OKTOPK_COVER, PLAIN, Case, algorithms, oktopk, take_step, trace
from tests.harness import on_threads
from tests.laws import check_every_law, same_bits, same_run, wanted

SPARSE_NAMES = [name for name in COVER if name != "dense"]
EXACT_NAMES = [name for name in NAMES if name.endswith("fp32")]  # no rounding: a coordinate goes whole or stays


# strict `>` with k = 1 or ties selects nothing
@pytest.mark.parametrize(("density", "kind", "size"), [
    (1e-9, "normal", 1), (1e-9, "normal", 5), (1e-9, "constant", 3), (0.5, "constant", 3),
    *((0.05, kind, 3) for kind in ("ties", "heavy tails", "skew", "correlated ranks")),
])  # fmt: skip
@pytest.mark.parametrize("name", SPARSE_NAMES)
def test_strict_greater_with_k_1_or_ties_selects_nothing(name: str, density: float, kind: str, size: int) -> None:
    case = Case(algorithms(density)[name], size, numel=200, kind=kind)
    least = 1 if "bounded" in name else 0.8 * wanted(case)  # equals crowd into few regions, whose blocks are bounded
    for steps in on_threads(size, trace, case):
        assert all(step.record.selected >= least and step.record.nnz >= 1 for step in steps)


# intersecting with an unsorted list applies nearly the whole update twice on every threshold-refresh step;
# clearing the residual of something that was not sent loses the k-th element each step
@pytest.mark.parametrize("kind", ["ties", "growing", "correlated ranks"])
@pytest.mark.parametrize("name", EXACT_NAMES)
def test_clearing_the_residual_of_something_that_was_not_sent(name: str, kind: str) -> None:
    """The laws say that a coordinate stays or goes whole; this tries steps that refresh the threshold above all."""
    algorithm = algorithms(0.02, rethreshold_every=1 + (kind == "growing"), repartition_every=2)[name]
    case = Case(algorithm, size=4, numel=3000, kind=kind, steps=5)
    check_every_law(case, on_threads(4, trace, case))


def test_clearing_what_a_merge_cut() -> None:
    """gTop-k as published drops, from P = 4 on, a value cut in an early merge whose index survives elsewhere."""
    gradients = [[9.0, 8.0, 0, 0, 0], [0, 8.5, 8.0, 0, 0], [0, 0, 20.0, 0, 1.0], [0, 0, 20.0, 0, 2.0]]

    def job(comm: Any) -> tuple[Tensor, Tensor]:
        reducer = Reducer(GTopk(density=0.4), comm)
        mean = reducer.all_reduce(torch.tensor(gradients[comm.rank]))
        return mean, reducer.residual

    by_rank = on_threads(4, job)
    kept = sum(residual for _, residual in by_rank)
    assert torch.equal(4 * by_rank[0][0] + kept, torch.tensor(gradients).sum(0))
    assert float(kept[2]) == 8.0  # rank 1 lost it in its first merge, though index 2 won in the end
    assert int(by_rank[0][0].count_nonzero()) == 2


# threshold reuse without a cap selects 3k to 12k (the laws hold every growing run to its limit), or nothing
@pytest.mark.parametrize("factor", [1e-6, 0.01, 100.0, 0.0])
@pytest.mark.parametrize("name", OKTOPK_COVER)
def test_threshold_reuse_selects_nothing_when_gradients_shrink(name: str, factor: float) -> None:
    """Without its residual, so that all of acc changes: a threshold or a floor of before is too high, or too low."""
    case = Case(algorithms(0.02)[name], size=1, numel=5000)

    def job(comm: Any) -> list[int]:
        reducer, counts = case.reducer(comm), []
        for step in range(6):
            reducer.all_reduce(case.gradient(0, step) * (factor if step >= 3 else 1.0))
            counts.append(reducer.last.selected)
            reducer.load_state_dict({**reducer.state_dict(), "residual": torch.zeros(case.numel)})
        return counts

    (counts,) = on_threads(1, job)
    for step, count in enumerate(counts):
        k = wanted(case) if factor or step < 3 else 0
        assert 0.8 * k <= count <= 1.25 * k


# int32 sums of cut points overflow from P = 79 at n = 27.5 M
@pytest.mark.parametrize("numel", [27_569_568, 2**31 - 1, 2**31 + 11, 2**40 + 1])
def test_int32_sums_of_cut_points_overflow(numel: int) -> None:
    echo: Any = SimpleNamespace(size=100, all_reduce=lambda tensor: tensor.mul_(100))  # all ranks say the same
    cuts = torch.tensor([0, numel - 7, numel - 1, numel])
    assert same_bits(consensus(cuts, echo), cuts)


# n % (n//P) in place of n % P when splitting loses the tail (that all of it arrives: density 1, in the laws)
@given(numel=st.integers(0, 200) | st.integers(0, 2**34), size=st.integers(1, 64))
def test_splitting_with_the_wrong_remainder(numel: int, size: int) -> None:
    cuts = even_cuts(numel, size)
    lengths = cuts.diff().tolist()
    assert (int(cuts[0]), int(cuts[-1]), len(lengths)) == (0, numel, size)
    assert max(lengths) - min(lengths) == (numel % size > 0)


# warm-up length not a multiple of tau: first sparse step with threshold 0
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


# residual kept in class attributes, shared between two models of one process
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


# a NaN is never selected and poisons its residual coordinate (see `test_bad_input`); Inf spreads
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


# indices exact above 2^24 (never inside float32)
@pytest.mark.parametrize("algorithm", [OkTopk, pytest.param(GTopk, marks=pytest.mark.long)])
def test_indices_inside_float32_in_a_whole_step(algorithm: Any) -> None:
    numel = 2**24 + 10
    spikes = torch.tensor([5, 2**24 - 1, 2**24 + 1, 2**24 + 3, numel - 1])

    def job(comm: Any) -> tuple[Tensor, int]:
        grad = torch.zeros(numel)
        grad[spikes] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * (1 + comm.rank)
        mean = Reducer(algorithm(density=5.5 / numel, wire="fp32"), comm).all_reduce(grad)
        return mean[spikes], int(mean.count_nonzero())

    for found, nnz in on_threads(2, job):
        delivered = found != 0
        assert nnz == int(delivered.sum()) >= 3
        assert torch.equal(found[delivered], (torch.arange(1.0, 6.0) * 1.5)[delivered])


# regions that do not follow the gradient: one owner does all the work, and most elements wait
@pytest.mark.parametrize("mode", ["bounded", "paper"])
def test_all_large_values_in_one_region(mode: str) -> None:
    case = Case(oktopk(mode, density=0.05, **PLAIN), size=4, numel=4000, kind="skew", steps=6)
    by_rank = on_threads(4, trace, case)
    check_every_law(case, by_rank)
    for steps in by_rank:
        assert steps[-1].record.selected >= 0.8 * wanted(case)
        assert steps[-1].record.nnz >= 0.8 * wanted(case)
