"""One step of Ok-Topk as the paper has it (Algorithm 1), in its order.

    n     length of the vector                   P     ranks
    k     elements wanted                        acc   gradient + residual
    tau   steps between repartitions             tau'  steps between exact thresholds
    region i = [cuts[i], cuts[i + 1]), owner = rank i

`docs/paper-map.md` leads from the paper's lines to these functions, `docs/differences.md` says where we depart and why.
"""

from collections import deque
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

import torch
from torch import Tensor

from oktopk.algorithms.base import InputStatus, OkTopkSettings, OkTopkState, Reduced, StepInput, taken_of, with_sweep
from oktopk.codec import Codec, join_errors, leftover
from oktopk.comm.base import Comm, Pending
from oktopk.errors import check_counts, within
from oktopk.partition import balanced_cuts, consensus, even_cuts
from oktopk.selection import (
    BAND,
    at_least,
    exact_threshold,
    in_band,
    in_turn,
    kth_largest_by_sketch,
    kth_largest_of_all,
    num_selected,
    sampled_threshold,
    swept_first_,
    turns_first_,
)
from oktopk.sparse import Sparse, merge

BUCKET_PAIRS = 1 << 16
"""Pairs in one message of split-and-reduce: a bucket is unpacked while the next one travels."""


@dataclass(frozen=True, kw_only=True)
class OkTopkPaper(OkTopkSettings):
    """Ok-Topk in the paper's six steps: at most 6k(P-1)/P words in the median of a stationary run.

    density, ranking, wire, rescale_every   see `OkTopkSettings`
    rethreshold_every                       steps between exact thresholds (tau')
    repartition_every                       steps between partitions of the index space (tau)
    cap                                     no step selects more than cap * k pairs; the rest stays in the residual
    """

    rethreshold_every: int = 32
    repartition_every: int = 64
    cap: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("rethreshold_every", self.rethreshold_every, 1)
        within("repartition_every", self.repartition_every, 1)
        within("cap", self.cap, 1)

    def reduce_step(self, acc: Tensor, state: OkTopkState, comm: Comm, inputs: StepInput) -> Reduced:
        """Return about k pairs: the largest of the sum of what the ranks selected, at most cap * k."""
        InputStatus.agree(inputs.status, acc.device, comm, acc.numel())
        k, codec = num_selected(state.numel, self.density), self.codec(state.numel)
        cap, rethreshold = int(self.cap * k), state.step % self.rethreshold_every == 0
        with comm.phase("agree"):
            if inputs.measured is not None:
                state.ranking.rescale_(comm.all_reduce(inputs.measured.to(acc.device)).cpu() / comm.size)
        with comm.phase("select"):
            sweep = state.sweep(k, even_cuts(state.numel, 1), comm, acc.device)
            selected = _select_locally(acc, state, k, cap, rethreshold, sweep)
            sent = selected.index
        with comm.phase("agree"):
            if state.step % self.repartition_every == 0:
                state.cuts = consensus(balanced_cuts(sent, state.numel, comm.size).to(acc.device), comm).cpu()
        region, lost = _split_and_reduce(selected, state.cuts, cap, codec, comm)
        with comm.phase("agree"):
            kept, sizes = _select_globally(region, state, k, cap, rethreshold, sweep, comm)
        total, returned = _balance_and_allgather(kept, sizes, codec, comm)
        with comm.phase("apply"):
            taken, rounding = taken_of(sent, lost, total)
        reduced = Reduced(total, taken, returned, len(sent), state.threshold, state.global_threshold, rounding)
        state.ranking.commit_()
        state.step += 1
        return reduced


def _select_locally(
    acc: Tensor, state: OkTopkState, k: int, cap: int, rethreshold: bool, sweep: Tensor | None
) -> Sparse:
    """Return the elements that reach the local threshold, at most the `cap` largest, and the sweep.

    The threshold is exact every tau' steps, and reused while its count is in the band.
    """
    if rethreshold:
        state.threshold = exact_threshold(acc, k, state.ranking)
    index = at_least(acc, state.threshold, state.ranking)
    if not rethreshold and not in_band(len(index), k):
        state.threshold = sampled_threshold(acc, k, state.ranking, seed=state.step)
        index = at_least(acc, state.threshold, state.ranking)
    limit = cap if sweep is None else max(min(cap, int(BAND[1] * k)) - len(sweep), 0)
    return with_sweep(state.fitting(Sparse.pick(acc, index), limit), acc, sweep)


def _split_and_reduce(
    selected: Sparse, cuts: Tensor, cap: int, codec: Codec, comm: Comm
) -> tuple[Sparse, Tensor | None]:
    """Return the sum, in rank order, of all that was selected in this rank's region (indices are the whole vector's).

    And what rounding took from what this rank selected.

    Rank r sends to r + 1, r + 2, ... and receives from r - 1, r - 2, ..., so that nobody is everybody's next.
    """
    rank, size, ones = comm.rank, comm.size, [1] * comm.size
    with comm.phase("pack"):
        parts = selected.between(cuts)
        low, high = cuts[rank : rank + 2].tolist()
    with comm.phase("exchange"):
        counts = torch.tensor([part.nnz for part in parts], device=selected.index.device)
        arriving = check_counts(comm.all_to_all_single(counts, ones, ones).tolist(), [min(high - low, cap)] * size)
        received: list[list[Sparse]] = [[] for _ in range(size)]
        errors: list[list[Tensor | None]] = [[] for _ in range(size)]
        mine, error = codec.round(parts[rank])
        received[rank].append(mine)
        errors[rank].append(error)
        travelling: deque[tuple[int, Pending]] = deque()

        def unpack_(most_travelling: int) -> None:
            while len(travelling) > most_travelling:
                source, pending = travelling.popleft()
                block = pending.wait()
                if len(block):
                    part, _ = codec.decode(block, selected.value.dtype, source=source, between=(low, high))
                    received[source].append(part)

        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            for out, into in zip_longest(_buckets(parts[to].nnz), _buckets(arriving[source])):
                block, error = (None, None) if out is None else codec.encode(parts[to][out])
                errors[to].append(error)
                words = 0 if into is None else codec.words(into.stop - into.start)
                travelling.append((source, comm.sendrecv(block, to, source, words, counts.device)))
                unpack_(most_travelling=1)
        unpack_(most_travelling=0)
    with comm.phase("reduce"):
        in_rank_order = [part.shift(-low, high - low) for row in received for part in row]
        return merge(in_rank_order).shift(low, selected.numel), join_errors(error for row in errors for error in row)


def _buckets(count: int) -> list[slice]:
    return [slice(first, min(first + BUCKET_PAIRS, count)) for first in range(0, count, BUCKET_PAIRS)]


def _select_globally(
    region: Sparse, state: OkTopkState, k: int, cap: int, rethreshold: bool, sweep: Tensor | None, comm: Comm
) -> tuple[Sparse, list[int]]:
    """Return the pairs that this owner keeps, and how many each owner keeps.

    The global threshold is exact every tau' steps and reused while the count it gives, which all ranks know, is in the
    band.
    """
    score = state.ranking.score(region.value, region.index).float()
    turns_first_(score, k // comm.size, state.step)
    swept_first_(score, region.index, sweep)
    is_dense = k >= state.numel  # a threshold would only leave something out
    if rethreshold:
        state.global_threshold = 0.0 if is_dense else kth_largest_of_all(score, k, comm)
    kept, sizes = _keep(region, score, state, comm)
    if not rethreshold and not in_band(sum(sizes), k):
        state.global_threshold = 0.0 if is_dense else kth_largest_by_sketch(score, k, comm)
        kept, sizes = _keep(region, score, state, comm)
    return (kept, sizes) if sum(sizes) <= cap else _cap_largest(region, score, cap, state, comm)


def _cap_largest(region: Sparse, score: Tensor, cap: int, state: OkTopkState, comm: Comm) -> tuple[Sparse, list[int]]:
    """Return the pairs that this owner keeps, and how many each does, of the `cap` largest of all.

    Of those that equal the last one, others have their turn in every step; they lie in the order of the owners.
    """
    least = kth_largest_of_all(score, cap, comm)
    above, equal = score > least, (score == least).nonzero().view(-1)
    told = comm.all_gather(torch.tensor([int(above.sum()), len(equal)], device=score.device)).tolist()
    lengths = state.cuts.diff().tolist()
    larger, ties = (check_counts(list(each), lengths) for each in zip(*told, strict=True))
    ends = list(accumulate(ties, initial=0))
    chosen = in_turn(torch.arange(ends[-1]), cap - sum(larger), state.step)
    low, high = ends[comm.rank : comm.rank + 2]
    above[equal[(chosen[(chosen >= low) & (chosen < high)] - low).to(equal.device)]] = True
    tied = torch.searchsorted(chosen, torch.tensor(ends)).diff().tolist()
    return region[above], [one + other for one, other in zip(larger, tied, strict=True)]


def _keep(region: Sparse, score: Tensor, state: OkTopkState, comm: Comm) -> tuple[Sparse, list[int]]:
    kept = region[score >= state.global_threshold]
    sizes = comm.all_gather(torch.tensor([kept.nnz], device=score.device)).view(-1).tolist()
    return kept, check_counts(sizes, state.cuts.diff().tolist())


@dataclass(frozen=True)
class _Layout:
    """The pairs of all owners in a row: where each owner's lie, and how they would lie in equal blocks."""

    sizes: list[int]

    @property
    def block(self) -> int:
        """Pairs in an equal block."""
        return -(-sum(self.sizes) // len(self.sizes))

    def moves(self, rank: int) -> list[int]:
        """Return how many of this rank's pairs belong into each equal block: its neighbours', for most."""
        low = sum(self.sizes[:rank])
        high = low + self.sizes[rank]
        return [max(min(high, (i + 1) * self.block) - max(low, i * self.block), 0) for i in range(len(self.sizes))]

    def balancing_pays(self) -> bool:
        """Whether moving pieces, then gathering equal blocks, sends fewer pairs than blocks of the largest size."""
        size = len(self.sizes)
        moved = max(self.sizes[rank] - self.moves(rank)[rank] for rank in range(size))
        return moved + self.block * (size - 1) < max(self.sizes) * (size - 1)


def _balance_and_allgather(
    kept: Sparse, sizes: list[int], codec: Codec, comm: Comm
) -> tuple[Sparse, tuple[Sparse, ...]]:
    """Return all owners' pairs; pieces move to neighbours first, where that is cheaper than unequal blocks.

    And what this rank's own rounding lost, of its pairs and of those that it passed on.
    """
    layout = _Layout(sizes)
    room = max(sizes)
    lost: tuple[Sparse, ...] = ()
    with comm.phase("gather"):
        if layout.balancing_pays():
            room = layout.block
            kept, lost = _balance(kept, layout, codec, comm)
        block, error = codec.encode(kept, capacity=room)
        blocks = comm.all_gather(block)
    with comm.phase("apply"):
        parts = [
            codec.decode(block, kept.value.dtype, room, source=source, sums=True)[0]
            for source, block in enumerate(blocks)
        ]
        return Sparse.join(parts), lost + leftover(kept, error)


def _balance(kept: Sparse, layout: _Layout, codec: Codec, comm: Comm) -> tuple[Sparse, tuple[Sparse, ...]]:
    """Return this rank's equal block of the row of all owners' pairs, and what rounding took from those it moved."""
    ends = list(accumulate(layout.moves(comm.rank), initial=0))
    pieces = [kept[i:j] for i, j in pairwise(ends)]
    encoded = [codec.encode(piece) for piece in pieces if piece.nnz]
    counts = [layout.moves(other)[comm.rank] for other in range(comm.size)]
    send = [codec.words(piece.nnz) if piece.nnz else 0 for piece in pieces]
    receive = [codec.words(count) if count else 0 for count in counts]
    outgoing = torch.cat([kept.index.new_empty(0, dtype=torch.int32), *(block for block, _ in encoded)])
    arrived = torch.split(comm.all_to_all_single(outgoing, send, receive), receive)
    parts = [
        codec.decode(block, kept.value.dtype, counts[source], source=source, sums=True)[0]
        for source, block in enumerate(arrived)
        if len(block)
    ]
    moved = Sparse.join([Sparse.empty(kept.numel, kept.value), *parts])
    return moved, leftover(kept, join_errors(error for _, error in encoded))
