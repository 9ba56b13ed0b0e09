"""Ok-Topk (Li & Hoefler, PPoPP 2022) with messages of fixed capacity: two collectives of known size on any input.

Error feedback sends later what is not sent now, so a message may have a capacity, and what does not fit stays in the
residual.

    1  select     threshold from a sample of acc, or of its prefiltered candidates; at most slack k pairs
    2  exchange   all_to_all: at most c = ceil(slack k/P) pairs to each owner
    3  reduce     the owner sums in rank order and keeps the largest: its share of k, which is demand/P, at most c
    4  gather     all_gather: at most c pairs from each owner

Demand is the number of pairs that the ranks wanted to send to a region; each rank wants about k, so all demands add up
to about P k. No sizes are exchanged, and no block is moved to balance others. The headers carry each rank's input
status and the demands. From these all ranks cut fairer regions alike when a region's demand exceeds its capacity.
A rank sends 4 c (P-1) words and its headers, always; packed, fewer, as the lengths of the regions say.

Two rules bound the wait of every element (docs/learning.md). In every sixteenth step half of an owner's share goes in
turn, so that sums which are small, or zero, are delivered. In every eighth step all ranks also send the same elements
(`sweep_of`), so that these leave all ranks together. `oktopk_paper.py` has the paper's six steps.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from oktopk.algorithms.base import InputStatus, OkTopkSettings, OkTopkState, Reduced, StepInput, taken_of, with_sweep
from oktopk.codec import Codec, join_errors, leftover
from oktopk.comm.base import Comm
from oktopk.errors import check_counts, within
from oktopk.feedback import Prefilter
from oktopk.kernels import kernels_for
from oktopk.partition import even_cuts, rebalanced_cuts, sweep_width
from oktopk.selection import at_least, kth_largest, num_selected, sampled_threshold, swept_first_, top_k, turns_first_
from oktopk.sparse import Sparse, merge

WIDE = 1.2
"""Factor on k: the floor aims at 1.2 k candidates, so that acc may shrink by that much between steps."""

FALL = 0.98
"""Factor on the floor after a step with fewer candidates than that, or without a floor."""

LEAST_SAMPLE = 8
"""Minimum of pairs in a block for new cuts, because the demand for fewer varies more than slack allows for."""

SPARSE_ENOUGH = 1 / 32
"""Largest density at which noting candidates costs less than a second pass over acc."""

CANDIDATE_SAMPLE = 1 << 15
"""Candidates that the threshold is estimated from, which gives a count within about 1 % of k."""


@dataclass(frozen=True, kw_only=True)
class OkTopk(OkTopkSettings):
    """Ok-Topk with messages of fixed capacity, in two collectives a step.

    density, ranking, wire, rescale_every   see `OkTopkSettings`
    slack                                   room in a message for one destination, over the k / P it needs on average

    The defaults are those that learned as fast as dense, or nearly (`docs/learning.md`).
    """

    slack: float = 1.25

    def __post_init__(self) -> None:
        super().__post_init__()
        within("slack", self.slack, 1)

    def prefilter(self, state: OkTopkState) -> Prefilter | None:
        """Return the place for the next acc's elements above the floor, if there is a floor."""
        if self.density > SPARSE_ENOUGH or not state.floor:
            return None
        return Prefilter(state.ranking.bounds.numpy(), state.ranking.thresholds(state.floor))

    def reduce_step(self, acc: Tensor, state: OkTopkState, comm: Comm, inputs: StepInput) -> Reduced:
        """Return about k pairs: the largest, in each owner's region, of the sum of what the ranks selected.

        The input statuses ride in the headers of the messages.
        """
        k, codec = num_selected(state.numel, self.density), self.codec(state.numel)
        capacity = capacity_of(k, self.slack, comm.size)
        if k == state.numel:  # all of it fits into even regions alone
            state.cuts = even_cuts(state.numel, comm.size)
        codec = replace(codec, span=int(state.cuts.diff().max()))
        sweep = state.sweep(k, state.cuts, comm, acc.device)
        width = sweep_width(k, comm.size) if sweep is not None else 0
        with comm.phase("select"):
            wanted = _select_locally(acc, state, inputs, k, int(self.slack * k))
        with comm.phase("pack"):
            shown = sweep if inputs.status == InputStatus.FINE else None
            demands, parts = _fit(wanted, capacity - width, acc, state, shown)
            blocks, sent, lost = _pack(parts, demands, capacity, inputs.status, codec, state.cuts)
        with comm.phase("exchange"):
            arrived = comm.all_to_all(blocks)
        with comm.phase("reduce"):
            region, demand = _sum(arrived, capacity, state, codec, acc.dtype, comm.rank)
            share = region.nnz if k == state.numel else math.ceil(demand / comm.size) + width
            kept = _largest(region, min(share, capacity), state, sweep)
            block, error = codec.encode(kept, capacity, note=demand, start=int(state.cuts[comm.rank]))
        with comm.phase("gather"):
            gathered = comm.all_gather(block)
        with comm.phase("apply"):
            total, demands = _unpack(gathered, capacity, state.cuts, codec, acc.dtype)
            taken, rounding = taken_of(sent, lost, total)
            if max(demands) > capacity * comm.size and may_rebalance(capacity, k, state.numel):
                state.cuts = rebalanced_cuts(state.cuts, total.index, demands)
            score = state.ranking.score(total.value, total.index)
            least = float(score.min()) if total.nnz else None  # the global threshold that this step amounts to
        state.ranking.commit_()
        state.step += 1
        return Reduced(total, taken, leftover(kept, error), len(sent), state.threshold, least, rounding)


def may_rebalance(capacity: int, k: int, numel: int) -> bool:
    """Whether cuts may move: not where everything travels, or where the pairs delivered are too few to cut by."""
    return capacity >= LEAST_SAMPLE and k < numel


def capacity_of(k: int, slack: float, size: int) -> int:
    """Return c, the number of pairs that fit into a block."""
    return math.ceil(slack * k / size)


def _select_locally(acc: Tensor, state: OkTopkState, inputs: StepInput, k: int, limit: int) -> Sparse:
    """Set this step's threshold, and return the elements that reach it; none of a refused input."""
    prefilter = inputs.prefilter
    if inputs.status != InputStatus.FINE:
        return Sparse.empty(state.numel, acc)
    if inputs.measured is not None:
        # Each rank's own scales: an owner alone decides what it keeps, so nothing has to be agreed upon.
        state.ranking.rescale_(inputs.measured)
        prefilter = None  # above floors of other scales
    found = None if prefilter is None else _among_candidates(prefilter, state, k)
    if found is None:
        state.threshold = sampled_threshold(acc, k, state.ranking, seed=state.step)
        state.floor = FALL * state.threshold
        found = Sparse.pick(acc, at_least(acc, state.threshold, state.ranking))
    return state.fitting(found, limit)


def _among_candidates(prefilter: Prefilter, state: OkTopkState, k: int) -> Sparse | None:
    """Set the threshold and the next floor; return the elements that reach it, None if there are too few candidates."""
    whole = prefilter.all_of(state.numel)
    if whole is None or len(whole[0]) < k:
        return None
    index, value = whole
    stride = len(value) // CANDIDATE_SAMPLE + 1
    first = state.step % stride
    sample = state.ranking.score(value[first::stride].contiguous(), index[first::stride].contiguous())
    state.threshold = kth_largest(sample, max(round(k / stride), 1))
    state.floor = kth_largest(sample, round(WIDE * k / stride)) or FALL * state.floor
    score = value if state.ranking.is_magnitude else state.ranking.score(value, index)  # |value| is compared
    chosen = kernels_for(score).at_least(score, [0, len(score)], [state.threshold])
    return Sparse(index.index_select(0, chosen), value.index_select(0, chosen), state.numel)


def _fit(
    wanted: Sparse, capacity: int, acc: Tensor, state: OkTopkState, sweep: Tensor | None
) -> tuple[list[int], list[Sparse]]:
    """Return how many pairs are wanted of each region, and the largest `capacity` of them, with the sweep."""
    parts = wanted.between(state.cuts)
    fits = [state.fitting(part, capacity) for part in parts]
    if sweep is not None:
        fits = with_sweep(Sparse.join(fits), acc, sweep).between(state.cuts)
    return [part.nnz for part in parts], fits


def _pack(
    parts: list[Sparse], demands: list[int], capacity: int, status: int, codec: Codec, cuts: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a block for each owner, the indices that are in them, and what rounding takes from their values."""
    blocks = torch.zeros(len(parts), codec.words(capacity), dtype=torch.int32, device=parts[0].index.device)
    errors = [
        codec.encode_into_(block, part, capacity, status or InputStatus.of(InputStatus.FINE, demand), low)
        for block, part, demand, low in zip(blocks, parts, demands, cuts[:-1].tolist(), strict=True)
    ]
    return blocks, torch.cat([part.index for part in parts]), join_errors(errors)


def _sum(
    arrived: Tensor, capacity: int, state: OkTopkState, codec: Codec, dtype: torch.dtype, rank: int
) -> tuple[Sparse, int]:
    """Return the sum of this rank's region, in rank order, and how many pairs the ranks wanted to send to it."""
    low, high = state.cuts[rank : rank + 2].tolist()
    decoded = [
        codec.decode(block, dtype, capacity, source=source, start=low, between=(low, high))
        for source, block in enumerate(arrived)
    ]
    demands = InputStatus.details([note for _, note in decoded], state.numel)
    return merge([part for part, _ in decoded]), sum(check_counts(demands, [high - low] * len(demands)))


def _largest(region: Sparse, share: int, state: OkTopkState, sweep: Tensor | None) -> Sparse:
    """Return the `share` largest of the region, a sweep's or some in turn first; ties by index."""
    if region.nnz <= share:
        return region
    score = turns_first_(state.ranking.score(region.value, region.index), share, state.step)
    return region[top_k(swept_first_(score, region.index, sweep), share)]


def _unpack(
    gathered: Tensor, capacity: int, cuts: Tensor, codec: Codec, dtype: torch.dtype
) -> tuple[Sparse, list[int]]:
    """Return the pairs that all owners kept, and the demand for each region."""
    regions = list(pairwise(cuts.tolist()))
    decoded = [
        codec.decode(block, dtype, capacity, source=owner, start=region[0], between=region, sums=True)
        for owner, (block, region) in enumerate(zip(gathered, regions, strict=True))
    ]
    most = [len(regions) * (high - low) for low, high in regions]
    return Sparse.join([part for part, _ in decoded]), check_counts([demand for _, demand in decoded], most)
