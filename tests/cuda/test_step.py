"""The laws, for the step that stays on the device: with the plain kernels, on any machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oktopk
from oktopk.cuda.reference import HEADER_WORDS, TILE
from tests.cases import PLAIN, device_step

MOST = 2**31 - 1
Made = Callable[[int, int], Tensor]


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with device_step() as seen:
        yield
    assert seen.runs


def heavy_tailed(rank: int, step: int, numel: int = 20_000) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step)).pow_(3)


def reduce_steps(size: int, steps: int, density: float, gradient: Made) -> list[tuple[list[Tensor], ...]]:
    """Return each rank's results, its gradients, and the residuals after each step."""

    def work(comm: oktopk.Comm) -> tuple[list[Tensor], ...]:
        reducer = oktopk.Reducer(oktopk.OkTopk(density=density, **PLAIN), comm)
        grads = [gradient(comm.rank, step) for step in range(steps)]
        results, residuals = [], []
        for grad in grads:
            results.append(reducer.all_reduce(grad))
            assert reducer.residual is not None
            residuals.append(reducer.residual)
        return results, grads, residuals

    return oktopk.run_local(size, work)


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(1, 5),
    numel=st.sampled_from([0, 1, 2, 7, TILE - 1, TILE, TILE + 1, 5000]),
    density=st.sampled_from([0.001, 0.01, 0.1, 1.0]),
    kind=st.sampled_from(["heavy", "ties", "one rank silent", "skewed", "grows"]),
)
def test_nothing_is_lost_and_all_ranks_get_the_same(size: int, numel: int, density: float, kind: str) -> None:
    def gradient(rank: int, step: int) -> Tensor:
        grad = heavy_tailed(rank, step, numel)
        if kind == "ties":
            grad = grad.sign()
        if kind == "one rank silent" and rank == 0:
            grad = torch.zeros(numel)
        if kind == "skewed":
            grad[numel // 10 :] *= 1e-3
        if kind == "grows" and step == 2:
            grad *= 100
        return grad

    ranks = reduce_steps(size, 4, density, gradient)
    before = torch.zeros(numel, dtype=torch.float64)
    for step in range(4):
        results = [rank[0][step] for rank in ranks]
        assert all(torch.equal(result, results[0]) for result in results)
        delivered = results[0].double() * size
        after = sum((rank[2][step].double() for rank in ranks), torch.zeros(numel, dtype=torch.float64))
        came = before + sum((rank[1][step].double() for rank in ranks), torch.zeros(numel, dtype=torch.float64))
        scale = sum((rank[1][step].abs().max().item() for rank in ranks if numel), 1.0) * 101
        torch.testing.assert_close(delivered + after, came, rtol=0, atol=scale * 2e-6)
        assert density < 1 or not any(bool(rank[2][step].any()) for rank in ranks)
        before = after


@pytest.mark.parametrize("size", [1, 3])
def test_where_large_ones_lie_close_together_all_have_their_turn(size: int) -> None:
    """A row of an embedding, say: more in one tile than it has slots, step after step."""
    same = torch.cat([torch.linspace(1, 2, TILE), torch.zeros(30 * TILE)])
    results, _, residuals = reduce_steps(size, 40, 0.02, lambda *_: same)[0]
    counts = torch.stack(results)[:, :TILE].count_nonzero(0)
    assert int(counts.min()) >= 4
    assert float(residuals[-1].max()) < 20


@pytest.mark.parametrize(("size", "alike"), [(1, False), (3, True)])
def test_counts_and_traffic_stay_in_their_bounds(size: int, alike: bool) -> None:
    """Whether gradients are new at every step or resemble each other, so that residuals pile up below the threshold."""
    numel, density = 50_000, 0.02
    k = int(numel * density)
    capacity = math.ceil(1.25 * k / size)

    def work(comm: oktopk.Comm) -> list[tuple[int, int, int]]:
        reducer, seen = oktopk.Reducer(oktopk.OkTopk(density=density, **PLAIN), comm), []
        for step in range(60):
            same = 3 * heavy_tailed(comm.rank, 999, numel) if alike else 0
            reducer.all_reduce(heavy_tailed(comm.rank, step, numel) + same)
            assert reducer.last is not None
            seen.append((reducer.last.selected, reducer.last.nnz, reducer.last.sent_bytes))
        return seen

    for seen in oktopk.run_local(size, work):
        for selected, nnz, sent in seen[20:]:
            assert 0.8 * k <= selected <= 1.25 * k + size
            assert 0.7 * k <= nnz <= 1.25 * k + size
            assert sent <= 2 * (size - 1) * (2 * capacity + HEADER_WORDS) * 4


def test_regions_follow_the_gradient() -> None:
    """All that is large lies in a tenth of the vector: once the cuts are fairer, all owners have their share."""

    def work(comm: oktopk.Comm) -> tuple[int, ...]:
        reducer = oktopk.Reducer(oktopk.OkTopk(density=0.02, **PLAIN), comm)
        for step in range(40):
            grad = heavy_tailed(comm.rank, step, 40_000)
            grad[4000:] *= 1e-4
            reducer.all_reduce(grad)
        return tuple(reducer.state_dict()["state"]["cuts"].tolist())

    cuts = oktopk.run_local(4, work)
    assert len(set(cuts)) == 1
    assert cuts[0][3] <= 4500


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
def test_a_step_that_is_not_finite_changes_nothing(on_nonfinite: str) -> None:
    def work(comm: oktopk.Comm) -> None:
        reducer = oktopk.Reducer(oktopk.OkTopk(density=0.1, **PLAIN), comm, on_nonfinite=on_nonfinite)
        reducer.all_reduce(heavy_tailed(comm.rank, 0, 3000))
        before = reducer.residual
        grad = heavy_tailed(comm.rank, 1, 3000)
        if comm.rank == 1:
            grad[1234] = math.nan
        assert not bool(reducer.all_reduce(grad).any())
        assert before is not None
        assert reducer.residual is not None
        assert torch.equal(reducer.residual, before)
        if comm.rank == 0:  # who asks, and who does not, learns of it in the same step
            assert reducer.last is not None
            assert (reducer.last.step, reducer.last.skipped) == (1, True)
        reducer.all_reduce(heavy_tailed(comm.rank, 2, 3000))
        if on_nonfinite == "raise":
            before = reducer.residual
            with pytest.raises(oktopk.NonFiniteError, match="step 1: a rank's gradient"):
                reducer.all_reduce(grad)
            assert torch.equal(reducer.residual, before)
        reducer.all_reduce(heavy_tailed(comm.rank, 3, 3000))
        assert reducer.last is not None
        assert (reducer.last.step, reducer.last.skipped) == (3, False)

    oktopk.run_local(3, work)


def test_going_on_from_a_checkpoint_is_never_having_stopped() -> None:
    def work(comm: oktopk.Comm) -> tuple[Tensor, Tensor]:
        whole = oktopk.Reducer(oktopk.OkTopk(density=0.05, **PLAIN), comm)
        for step in range(7):
            whole.all_reduce(heavy_tailed(comm.rank, step))
        saved = whole.state_dict()
        again = oktopk.Reducer(oktopk.OkTopk(density=0.05, **PLAIN), comm)
        again.load_state_dict(saved)
        results = []
        for reducer in (whole, again):
            for step in range(7, 20):
                last = reducer.all_reduce(heavy_tailed(comm.rank, step))
            assert reducer.residual is not None
            results.append(torch.cat([last, reducer.residual]))
        return results[0], results[1]

    for one, other in oktopk.run_local(3, work):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("word", "written"),
    [(0, -1), (0, MOST), (2, -1), (3, MOST), *((HEADER_WORDS, index) for index in (-1, MOST, 2000))],
)
@pytest.mark.parametrize("phase", ["all_to_all", "all_gather"])
def test_a_block_that_cannot_be_refuses_the_step_on_all_ranks(phase: str, word: int, written: int) -> None:
    """Its pairs are written nowhere, and nobody cuts regions by what it says."""

    class Spoilt:
        """A comm in which what rank 1 sends as its first block is spoilt, once."""

        def __init__(self, comm: oktopk.Comm) -> None:
            self.comm, self.spoils = comm, False

        def __getattr__(self, name: str) -> object:
            return getattr(self.comm, name)

        def all_to_all(self, blocks: Tensor) -> Tensor:
            return self._spoilt("all_to_all", self.comm.all_to_all(blocks))

        def all_gather(self, block: Tensor) -> Tensor:
            return self._spoilt("all_gather", self.comm.all_gather(block))

        def _spoilt(self, name: str, blocks: Tensor) -> Tensor:
            if self.spoils and name == phase and blocks.dtype == torch.int32:
                blocks[1, word] = written
            return blocks

    def work(comm: oktopk.Comm) -> None:
        spoilt = Spoilt(comm)
        reducer = oktopk.Reducer(oktopk.OkTopk(density=0.1, **PLAIN), spoilt, on_nonfinite="skip")
        for step in range(16):
            reducer.all_reduce(heavy_tailed(comm.rank, step, 3000))
        before = reducer.state_dict()
        spoilt.spoils = True
        assert not bool(reducer.all_reduce(heavy_tailed(comm.rank, 16, 3000)).any())
        assert reducer.last is not None
        assert reducer.last.skipped
        after = reducer.state_dict()
        assert torch.equal(after["residual"], before["residual"])
        assert torch.equal(after["state"]["cuts"], before["state"]["cuts"])
        spoilt.spoils = False
        assert bool(reducer.all_reduce(heavy_tailed(comm.rank, 17, 3000)).any())

    oktopk.run_local(3, work)
