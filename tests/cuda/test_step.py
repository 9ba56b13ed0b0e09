"""The laws, for the step that stays on the device: with the plain kernels, on any machine."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oktopk
from oktopk.cuda.reference import HEADER_WORDS, TILE
from tests.cases import PLAIN, Case, device_step, trace
from tests.ddp.harness import on_threads
from tests.laws import check_conserved, check_record, check_same_result

MOST = 2**31 - 1


@pytest.fixture(autouse=True)
def _on_device():
    with device_step() as seen:
        yield
    assert seen.runs


def heavy_tailed(rank, step, numel=3000):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + step)).pow_(3)


def make_reducer(comm, density, **settings):
    return oktopk.Reducer(oktopk.OkTopk(density=density, **PLAIN), comm, **settings)


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(1, 5),
    numel=st.sampled_from([0, 1, 2, 7, TILE - 1, TILE, TILE + 1, 5000]),
    density=st.sampled_from([0.001, 0.01, 0.1, 1.0]),
    kind=st.sampled_from(["heavy tails", "ties", "one rank zero", "skew", "growing"]),
)
def test_nothing_is_lost_and_all_ranks_get_the_same(size, numel, density, kind):
    case = Case(oktopk.OkTopk(density=density, **PLAIN), size, numel, kind)
    for number, steps in enumerate(zip(*oktopk.run_local(size, partial(trace, case=case)), strict=True)):
        check_conserved(case, steps)
        check_same_result(steps)
        check_record(case, number, steps)
        assert density < 1 or not any(bool(step.residual.any()) for step in steps)


@on_threads(1, 3)
def test_where_large_ones_lie_close_together_all_have_their_turn(comm):
    """A row of an embedding, say: more in one tile than it has slots, step after step."""
    same = torch.cat([torch.linspace(1, 2, TILE), torch.zeros(30 * TILE)])
    reducer = make_reducer(comm, 0.02)
    results = torch.stack([reducer.all_reduce(same) for _ in range(40)])
    assert int(results[:, :TILE].count_nonzero(0).min()) >= 4
    assert float(reducer.residual.max()) < 20


@on_threads(1, 3)
def test_counts_and_traffic_stay_in_their_bounds(comm):
    """On three ranks gradients are alike from step to step, so that residuals pile up below the threshold."""
    numel, density, size = 50_000, 0.02, comm.size
    k = int(numel * density)
    capacity = math.ceil(1.25 * k / size)
    reducer, same = make_reducer(comm, density), 3 * heavy_tailed(comm.rank, 999, numel) * (size > 1)
    for step in range(60):
        reducer.all_reduce(heavy_tailed(comm.rank, step, numel) + same)
        if step >= 20:
            record = reducer.last
            assert 0.8 * k <= record.selected <= 1.25 * k + size
            assert 0.7 * k <= record.nnz <= 1.25 * k + size
            assert record.sent_bytes <= 2 * (size - 1) * (2 * capacity + HEADER_WORDS) * 4


@on_threads(4)
def test_regions_follow_the_gradient(comm):
    """All that is large lies in a tenth of the vector: once the cuts are fairer, all owners have their share."""
    reducer = make_reducer(comm, 0.02)
    for step in range(40):
        grad = heavy_tailed(comm.rank, step, 40_000)
        grad[4000:] *= 1e-4
        reducer.all_reduce(grad)
    cuts = comm.all_gather(reducer.state_dict()["state"]["cuts"])
    assert torch.equal(cuts, cuts[:1].expand_as(cuts))
    assert int(cuts[0, 3]) <= 4500


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
@on_threads(3)
def test_a_step_that_is_not_finite_changes_nothing(comm, on_nonfinite):
    reducer = make_reducer(comm, 0.1, on_nonfinite=on_nonfinite)
    reducer.all_reduce(heavy_tailed(comm.rank, 0))
    before = reducer.residual
    grad = heavy_tailed(comm.rank, 1)
    if comm.rank == 1:
        grad[1234] = math.nan
    assert not bool(reducer.all_reduce(grad).any())
    assert torch.equal(reducer.residual, before)
    if comm.rank == 0:  # who asks, and who does not, learns of it in the same step
        assert (reducer.last.step, reducer.last.skipped) == (1, True)
    reducer.all_reduce(heavy_tailed(comm.rank, 2))
    if on_nonfinite == "raise":
        before = reducer.residual
        with pytest.raises(oktopk.NonFiniteError, match="step 1: a rank's gradient"):
            reducer.all_reduce(grad)
        assert torch.equal(reducer.residual, before)
    reducer.all_reduce(heavy_tailed(comm.rank, 3))
    assert (reducer.last.step, reducer.last.skipped) == (3, False)


@on_threads(3)
def test_going_on_from_a_checkpoint_is_never_having_stopped(comm):
    whole, again = make_reducer(comm, 0.05), make_reducer(comm, 0.05)
    for step in range(20):
        grad = heavy_tailed(comm.rank, step, 20_000)
        mean = whole.all_reduce(grad)
        assert step < 7 or torch.equal(again.all_reduce(grad), mean)
        if step == 6:
            again.load_state_dict(whole.state_dict())
    assert torch.equal(whole.residual, again.residual)


class Spoilt:
    """A comm in which, while it `spoils`, a word of what rank 1 sends as its first block is another one."""

    def __init__(self, comm, spoilt, word, written):
        self.comm, self.spoilt, self.word, self.written, self.spoils = comm, spoilt, word, written, False

    def __getattr__(self, name):
        collective = getattr(self.comm, name)

        def received(blocks):
            came = collective(blocks)
            if self.spoils and came.dtype == torch.int32:
                came[1, self.word] = self.written
            return came

        return received if name == self.spoilt else collective


@pytest.mark.parametrize(
    ("word", "written"),
    [(0, -1), (0, MOST), (2, -1), (3, MOST), *((HEADER_WORDS, index) for index in (-1, MOST, 2000))],
)
@pytest.mark.parametrize("phase", ["all_to_all", "all_gather"])
@on_threads(3)
def test_a_block_that_cannot_be_refuses_the_step_on_all_ranks(comm, phase, word, written):
    """Its pairs are written nowhere, and nobody cuts regions by what it says."""
    spoilt = Spoilt(comm, phase, word, written)
    reducer = make_reducer(spoilt, 0.1, on_nonfinite="skip")
    for step in range(16):
        reducer.all_reduce(heavy_tailed(comm.rank, step))
    before = reducer.state_dict()
    spoilt.spoils = True
    assert not bool(reducer.all_reduce(heavy_tailed(comm.rank, 16)).any())
    assert reducer.last.skipped
    after = reducer.state_dict()
    assert torch.equal(after["residual"], before["residual"])
    assert torch.equal(after["state"]["cuts"], before["state"]["cuts"])
    spoilt.spoils = False
    assert bool(reducer.all_reduce(heavy_tailed(comm.rank, 17)).any())
