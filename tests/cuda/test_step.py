"""The laws, for the step that stays on the device: with the plain kernels, on any machine."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oktopk
from oktopk import Sparse
from oktopk.algorithms.base import InputStatus
from oktopk.algorithms.oktopk import capacity_of
from oktopk.codec import Codec
from oktopk.codec.values import WIRES
from oktopk.cost import predict
from oktopk.cuda.reference import TILE
from oktopk.selection import num_selected
from oktopk.words import HEADER_WORDS, WORD_BYTES
from tests.cases import Case, device_step, trace
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


def make_reducer(comm, density, wire="fp32", **settings):
    return oktopk.Reducer(oktopk.OkTopk(density=density, ranking="magnitude", wire=wire), comm, **settings)


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(1, 5),
    numel=st.sampled_from([0, 1, 2, 7, TILE - 1, TILE, TILE + 1, 5000]),
    density=st.sampled_from([0.001, 0.01, 0.1, 1.0]),
    kind=st.sampled_from(["heavy tails", "ties", "one rank zero", "skew", "growing", "denormal"]),
    wire=st.sampled_from([*WIRES]),
)
def test_nothing_is_lost_and_all_ranks_get_the_same(size, numel, density, kind, wire):
    case = Case(oktopk.OkTopk(density=density, ranking="magnitude", wire=wire), size, numel, kind)
    for number, steps in enumerate(zip(*oktopk.run_local(size, partial(trace, case=case)), strict=True)):
        check_conserved(case, steps)
        check_same_result(steps)
        check_record(case, number, steps)
        assert density < 1 or wire in ("bf16", "int8") or not any(bool(step.residual.any()) for step in steps)


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


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@on_threads(4)
def test_regions_follow_the_gradient(comm, wire):
    """All that is large lies in a tenth of the vector: once the cuts are fairer, all owners have their share.

    Packed blocks are as long as they were, though the indices of the last region are wider.
    """
    reducer = make_reducer(comm, 0.02, wire)
    for step in range(40):
        grad = heavy_tailed(comm.rank, step, 40_000)
        grad[4000:] *= 1e-4
        reducer.all_reduce(grad)
        assert reducer.last.sent_bytes == WORD_BYTES * predict(reducer.algorithm, 40_000, 4).least
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


@pytest.mark.parametrize("wire", ["auto", "int8", "bf16"])
@on_threads(2)
def test_the_wire_is_what_was_chosen_and_float32_by_default(comm, wire):
    """Until packed blocks have been timed on a GPU."""
    reducer = make_reducer(comm, 0.03, wire)
    reducer.all_reduce(heavy_tailed(comm.rank, 0))
    sent = replace(reducer.algorithm, wire="fp32" if wire == "auto" else wire)
    assert reducer.last.sent_bytes == WORD_BYTES * predict(sent, 3000, 2).least


@on_threads(2)
def test_sums_that_float32_cannot_hold_refuse_the_step_on_all_ranks(comm):
    """Also where scales make them comparable with the others: what was selected is finite, and its sum is not."""
    algorithm = oktopk.OkTopk(density=0.1, wire="fp32")
    reducer = oktopk.Reducer(algorithm, comm, segments=[100] * 20, on_nonfinite="skip")
    grad = torch.ones(2000)
    grad[7] = 3e38
    assert not reducer.all_reduce(grad).any()
    assert reducer.last.skipped


@on_threads(2)
def test_blocks_are_those_of_the_codec_and_travel_as_the_host_sends_them(comm):
    """As long as the host's, and the host's codec reads them: what arrives is the sum of what was sent."""
    numel, density, blocks = 5000, 0.03, []

    class Read:
        def __getattr__(self, name):
            collective = getattr(comm, name)
            if name not in ("all_to_all", "all_gather"):
                return collective
            return lambda words: blocks.append(collective(words)) or blocks[-1].clone()

    algorithm = oktopk.OkTopk(density=density, ranking="magnitude", wire="int8")
    reducer = oktopk.Reducer(algorithm, Read())
    mean = reducer.all_reduce(heavy_tailed(comm.rank, 0, numel))
    assert reducer.last.sent_bytes == WORD_BYTES * predict(algorithm, numel, comm.size).least
    capacity = capacity_of(num_selected(numel, density), algorithm.slack, comm.size)
    codec, regions = replace(algorithm.codec(numel), span=numel // 2), ((0, numel // 2), (numel // 2, numel))
    kept = [
        codec.decode(block, torch.float32, capacity, start=low, between=(low, high))[0]
        for block, (low, high) in zip(blocks[-1], regions, strict=True)
    ]
    assert torch.equal(Sparse.join(kept).to_dense() / 2, mean)
    grads = [heavy_tailed(rank, 0, numel) for rank in range(2)]
    region = regions[comm.rank]
    for block, grad in zip(blocks[-2], grads, strict=True):
        part, note = codec.decode(block, torch.float32, capacity, start=region[0], between=region)
        exact = Sparse(part.index, grad[part.index], numel)
        demand = part.nnz if part.nnz < capacity else note >> 2
        assert torch.equal(codec.encode(exact, capacity, InputStatus.of(InputStatus.FINE, demand), region[0])[0], block)


@on_threads(3)
def test_going_on_from_a_checkpoint_is_never_having_stopped(comm):
    whole, again = make_reducer(comm, 0.05, "int8"), make_reducer(comm, 0.05, "int8")
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


HEADS = [(0, -1), (0, MOST), (2, -1), (3, MOST)]
INDICES = [(HEADER_WORDS, index) for index in (-1, MOST, 2000)]
PACKED = [
    (0, 99),
    (1, 7),
    (Codec(1000, "int8").layout(125).highs_at, -1),
    (Codec(1000, "int8").layout(125).scales_at, 1),
]


@pytest.mark.parametrize(
    ("wire", "word", "written"),
    [*(("fp32", *each) for each in (*HEADS, *INDICES)), *(("int8", *each) for each in (*HEADS, *PACKED))],
)
@pytest.mark.parametrize("phase", ["all_to_all", "all_gather"])
@on_threads(3)
def test_a_block_that_cannot_be_refuses_the_step_on_all_ranks(comm, phase, wire, word, written):
    """Its pairs are written nowhere, and nobody cuts regions by what it says."""
    spoilt = Spoilt(comm, phase, word, written)
    reducer = make_reducer(spoilt, 0.1, wire, on_nonfinite="skip")
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
