"""`CudaStep`: one step of Ok-Topk on the device, of which the host reads no count, threshold or status.

The steps are those of `algorithms/oktopk.py`, but an owner keeps elements by a threshold, and so also those that equal
it, up to the capacity.

    0  sample_threshold     from a sample of residual + gradient; now and then `measure_rows` for the scales
    1  accumulate_compact   acc = residual + gradient; the elements that reach the threshold, tile by tile: one pass
    2  pack_blocks          a block for each owner: at most c = ceil(slack k/P) pairs; `encode` makes it the codec's
    3  exchange             all_to_all
    4  own                  the owner sums in rank order and keeps its share of the largest, at most c
    5  gather               all_gather
    6  deliver              the mean into the result; the delivered part is taken out of the residual, all but what
                            rounding took from its values, and what the owner's rounding took from its sums

The elements behind the sparse ones, the dense tail, travel in the same messages: each block has a slice of the tail
behind its pairs, which the owner sums.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oktopk.algorithms.base import AUTO, OkTopkState
from oktopk.algorithms.oktopk import OkTopk, capacity_of, may_rebalance
from oktopk.codec.values import round_to
from oktopk.comm.base import Comm
from oktopk.cuda import reference
from oktopk.cuda.packing import Packing
from oktopk.cuda.reference import LARGEST, NOTHING, TILE, Found, Rows, bins, room_for, sample_of
from oktopk.partition import SWEEP_EVERY, even_cuts, is_sweep, sweep_stride, sweep_width
from oktopk.selection import SAMPLE_HITS, TURN_EVERY, num_selected
from oktopk.words import HEADER_WORDS

REBALANCE_EVERY = 16
MOST_INDEX = (1 << 31) - 1
MOST_NUMEL = (1 << 31) - TILE
"""Elements of a vector: places in it are 32 bits wide."""

LEAST_TRITON = (3, 4)


class CudaStep:
    """The buffers and the state of a vector's steps, all on its device; `dense_tail` elements follow the sparse ones.

    `words` has the stats of a step, see `DeviceStats`; the thresholds live there, and the number of the step.
    """

    def __init__(
        self, algorithm: OkTopk, state: OkTopkState, comm: Comm, device: torch.device, dense_tail: int = 0
    ) -> None:
        numel, size, ranking = state.numel, comm.size, state.ranking
        wanted = num_selected(numel, algorithm.density)
        capacity = capacity_of(wanted, algorithm.slack, size)
        stride = max(wanted // SAMPLE_HITS, 1) | 1  # odd, unlike the length of most rows
        hits = max(round(wanted * sample_of(numel, stride) / max(numel, 1)), 1)
        known = (0.0, 0.0) if wanted == numel else (state.threshold, state.global_threshold)
        thresholds = torch.tensor(known).view(torch.int32).tolist()
        self.numel, self.dense_tail, self.comm, self.step = numel, dense_tail, comm, state.step
        self.wanted, self.capacity, self.stride = wanted, capacity, stride
        self.rescale_every = algorithm.rescale_every
        self.kernels = step_kernels(device)
        self.rows = None if ranking.is_magnitude else Rows(ranking.bounds, ranking.squares, ranking.scale, device)
        self.found = Found(numel, room_for(algorithm.density), device)
        self.packing = Packing(as_on_device(algorithm).codec(numel), capacity, size, device)
        self.outbox = _Outbox(self.packing, size, -(-dense_tail // size), device)
        self.pairs = None if self.packing.is_plain else self.outbox.pairs.clone()  # of the blocks that arrived
        self.owner = _Owner(numel, size, self.packing, -(-dense_tail // size), device) if size > 1 else None
        self.cuts = (even_cuts(numel, size) if wanted == numel else state.cuts).to(device)
        self.packing.follow_(self.cuts)
        self.words = torch.tensor([0, 0, 0, *thresholds, state.step], dtype=torch.int32, device=device)
        self.threshold = self.words[3:4].view(torch.float32)  # of what is sent
        self.kept_threshold = self.words[4:5].view(torch.float32)  # of what this rank, as an owner, keeps
        self.turn = self.words[5:6]  # the number of the step, by which turns rotate
        self.sample_wanted = torch.tensor([hits], device=device)
        self.counts = bins(device)

    @property
    def kind(self) -> StepKind:
        """The kind of the next step."""
        measures = self.rows is not None and self.step % self.rescale_every == 0
        return StepKind(measures, self.owner is not None and is_sweep(self.step, self.wanted, self.numel))

    def select_(self, kind: StepKind, grad: Tensor, held: Tensor, acc: Tensor, out: Tensor) -> None:
        """Make acc, and the blocks to send; a rank that is alone is done then, since what it sends is delivered.

        The threshold is measured on a sample, which begins elsewhere at every step: one that is moved by what it let
        through has a loop, and swings where gradients resemble each other.
        """
        kernels, aims = self.kernels, (self.stride, self.sample_wanted, self.counts, self.threshold)
        sparse = grad[: self.numel], held[: self.numel]
        if self.rows is not None and kind.measures:
            kernels.measure_rows(sparse[0], self.rows)
        if self.wanted < self.numel:  # else it is zero
            kernels.sample_threshold(*sparse, self.rows, self.turn, *aims)
        parts = acc[: self.numel], self.threshold, self.turn, self.found, self.rows
        swept = self._raise_swept_(*sparse) if kind.sweeps else None
        try:
            kernels.accumulate_compact(*sparse, *parts)
            pairs = self.outbox.pairs
            kernels.pack_blocks(
                self.found, self.cuts, self.turn, pairs, self.capacity, self.packing.rooms, self.rows
            )  # fmt: skip
        finally:
            if swept is not None:  # or the residual would keep the raised values
                self._lower_swept_(*swept, held, acc)
        if self.dense_tail:
            torch.add(held[self.numel :], grad[self.numel :], out=acc[self.numel :])
            slices = self._slices(self.outbox.blocks)
            padded = torch.nn.functional.pad(acc[self.numel :], (0, slices.numel() - self.dense_tail))
            slices.copy_(padded.view_as(slices))
            self.outbox.pairs[:, 1] += _bad_in(padded)
        self.outbox.encode_(kernels, self.packing.rows)
        if self.owner is None:
            self._deliver_(self.outbox.blocks, held, acc, out)

    def _raise_swept_(self, grad: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make acc the largest at the elements of `partition.sweep_of`; return their indices, held and acc."""
        stride, offset = self._sweep()
        places = torch.arange(sweep_width(self.wanted, self.comm.size), device=held.device)
        last = self.cuts[1:, None] - 1  # for places beyond a region's end
        index = torch.minimum((self.cuts[:-1] + offset)[:, None] + places * stride[:, None], last)
        index = index.clamp(min=0).view(-1)
        before, fresh = held[index], grad[index].float()
        total = before + fresh
        large = torch.full_like(total, LARGEST / 2).copysign(-fresh)  # with any gradient the sum is finite
        held.index_copy_(0, index, torch.where(total.isfinite() & (total != 0), large, before))
        return index, before, total

    def _lower_swept_(self, index: Tensor, before: Tensor, total: Tensor, held: Tensor, acc: Tensor) -> None:
        """Undo `_raise_swept_`, in the blocks, too."""
        held.index_copy_(0, index, before)
        acc.index_copy_(0, index, total)
        pairs = self.outbox.pairs
        place, value = (pairs[:, HEADER_WORDS + i * self.capacity :][:, : self.capacity] for i in range(2))
        there = torch.arange(self.capacity, device=acc.device) < pairs[:, :1]
        whole = acc[torch.where(there, place + self.cuts[:-1, None], 0)].view(torch.int32)
        value.copy_(torch.where(there, whole, value))

    def _sweep(self) -> tuple[Tensor, Tensor]:
        """Return stride and offset of the sweep in each region."""
        stride = sweep_stride(self.wanted, self.cuts)
        return stride, self.turn // SWEEP_EVERY % stride

    def _slices(self, blocks: Tensor) -> Tensor:
        """Return the slices of the dense tail in these blocks."""
        return blocks[:, self.packing.words :].view(torch.float32)

    def _decoded(self, blocks: Tensor, layouts: Tensor) -> Tensor:
        """Return the pairs of blocks that arrived, with these layouts; only until it is called again."""
        if self.pairs is None:
            return blocks
        self.kernels.decode(blocks, self.pairs, layouts, self.packing)
        return self.pairs

    def exchange_(self, held: Tensor, acc: Tensor, out: Tensor) -> None:
        """Do what follows `select_`, with the other ranks if there are any: the step is over then."""
        comm = self.comm
        if self.owner is not None:
            with comm.phase("exchange"):
                arrived = comm.all_to_all(self.outbox.blocks)
            with comm.phase("reduce"):
                block = self._own(arrived, self.owner)
            with comm.phase("gather"):
                gathered = comm.all_gather(block.view(-1))
            with comm.phase("apply"):
                pairs = self._deliver_(gathered, held, acc, out)
                if self.step % REBALANCE_EVERY == 0 and may_rebalance(self.capacity, self.wanted, self.numel):
                    self._rebalance_(pairs)
        self.step += 1

    def _deliver_(self, gathered: Tensor, held: Tensor, acc: Tensor, out: Tensor) -> Tensor:
        """Write the mean of these blocks, and what remains; return their pairs."""
        pairs, sent = self._decoded(gathered, self.packing.rows), self.outbox.pairs
        if self.owner is not None:
            self.kernels.refuse_malformed(pairs, self.cuts, self.capacity, not self.packing.is_plain)
        kept = None if self.packing.is_plain else sent if self.owner is None else self.owner.outbox.pairs
        sparse = (each[: self.numel] for each in (out, acc, held))
        self.kernels.deliver(
            pairs, sent, self.cuts, self.capacity, *sparse, self.words, kept, self.comm.rank
        )  # fmt: skip
        if self.dense_tail:
            mean = self._slices(gathered).reshape(-1)[: self.dense_tail] / self.comm.size
            out[self.numel :] = round_to(mean, out.dtype)
            torch.sub(mean, out[self.numel :], out=acc[self.numel :])
        return pairs

    def _own(self, blocks: Tensor, owner: _Owner) -> Tensor:
        """Return the block of what this rank, as an owner, keeps of what arrived: its share of the largest sums."""
        kernels, size, capacity = self.kernels, self.comm.size, self.capacity
        layout = self.packing.rows[self.comm.rank : self.comm.rank + 1]
        arrived = self._decoded(blocks, layout)
        cuts = self.cuts[self.comm.rank : self.comm.rank + 2]
        kernels.refuse_malformed(arrived, cuts, capacity, not self.packing.is_plain)
        for block in arrived:
            kernels.scatter_add(block, capacity, owner.region)
        for block, total in zip(arrived, owner.total, strict=True):
            kernels.gather_zero(block, capacity, owner.region, total)  # the first rank that sent an index has its sum
        index, total = arrived[:, HEADER_WORDS : HEADER_WORDS + capacity].reshape(-1), owner.total.view(-1)
        demand = _demands(arrived).sum()
        score = self._score(index, total)
        if self.wanted < self.numel:
            share = torch.minimum(((demand + size - 1) // size).clamp(min=1), layout[0, 0])  # of what the ranks wanted
            if self.kind.sweeps:
                self._let_swept_be_first_(score, index, total)
            else:
                self._let_turns_be_first_(score, total, share)
            kernels.select_threshold(score, share.view(1), self.counts, self.kept_threshold)
        kernels.compact(score, self.kept_threshold, self.turn, owner.found)
        kernels.pack_blocks(owner.found, owner.cuts, self.turn, owner.outbox.pairs, capacity, layout[:, 0])
        summed = self._slices(blocks).sum(0)
        self._slices(owner.outbox.blocks).copy_(summed[None])
        bad = (arrived[:, 1] != 0).any() | _bad_in(summed) | _bad_in(total)
        owner.fill_(index, total, bad, demand)
        owner.outbox.encode_(kernels, layout)
        return owner.outbox.blocks

    def _score(self, index: Tensor, total: Tensor) -> Tensor:
        """Return how large each of these sums in this rank's region is: above zero where there is one, even if it is 0.

        A sum that cancels is delivered, too, where there is room for it, and holds no slot any longer.
        """
        score = total.abs()
        if self.rows is not None:
            score = self.rows.score(score, index + self.cuts[self.comm.rank])
        return torch.where(_is_nothing(total), 0.0, score.clamp(min=torch.finfo(score.dtype).tiny))

    def _let_turns_be_first_(self, score: Tensor, total: Tensor, share: Tensor) -> None:
        """Make the scores of those whose turn it is the largest, as `select.turns_first_` does."""
        limit = torch.where(self.turn % TURN_EVERY == TURN_EVERY - 1, (share // 2).clamp(min=1), 0)
        there = ~_is_nothing(total)
        count = there.sum()
        rank = (there.cumsum(0) - 1 - self.turn // TURN_EVERY * limit) % count.clamp(min=1)
        score.copy_(torch.where(there & (rank < limit), LARGEST, score))

    def _let_swept_be_first_(self, score: Tensor, place: Tensor, total: Tensor) -> None:
        """Make the scores of the sweep's elements the largest, by their places in this rank's region."""
        stride, offset = (each[self.comm.rank] for each in self._sweep())
        score.copy_(torch.where(~_is_nothing(total) & (place % stride == offset), LARGEST, score))

    def _rebalance_(self, gathered: Tensor) -> None:
        """Cut fairer regions if one was asked for more than fits: all ranks have the same `gathered`, and agree."""
        size, capacity = self.comm.size, self.capacity
        there = torch.arange(capacity, device=gathered.device) < gathered[:, :1]
        index = gathered[:, HEADER_WORDS : HEADER_WORDS + capacity] + self.cuts[:-1, None]
        demand = _demands(gathered)
        weight = torch.where(there, ((demand << 16) // gathered[:, 0].clamp(min=1))[:, None], 0)
        sorted_index, order = index.view(-1).sort()
        mass = weight.view(-1)[order].cumsum(0)
        goals = mass[-1] * torch.arange(1, size, device=mass.device) // size
        fairer = sorted_index[torch.searchsorted(mass, goals, right=True).clamp(max=len(mass) - 1)]
        fine = (gathered[:, 1] == 0).all()  # else these may be no demands, and no indices
        unfair = fine & (demand > self.packing.rooms * size).any() & (mass[-1] > 0)
        self.cuts[1:-1] = torch.where(unfair, fairer, self.cuts[1:-1])
        self.packing.follow_(self.cuts)

    def save_(self, state: OkTopkState) -> None:
        """Bring the state to the host: for a checkpoint."""
        state.step, state.cuts = self.step, self.cuts.cpu()
        state.threshold, state.global_threshold = float(self.threshold), float(self.kept_threshold)
        if self.rows is not None:
            ranking = state.ranking
            ranking.squares, ranking.scale = (each.double().cpu() for each in (self.rows.squares, self.rows.scale))


class StepKind(NamedTuple):
    """The choices of a step that the host makes by its number: steps of one kind launch the same kernels."""

    measures: bool
    sweeps: bool


class _Outbox:
    """A rank's messages: `blocks` as they travel, and `pairs`, which they are made of.

    A block has its slice of the dense tail behind its words. Where blocks travel as they are, the two are one.
    """

    def __init__(self, packing: Packing, size: int, tail: int, device: torch.device) -> None:
        self._packing = packing
        self.blocks = torch.zeros(size, packing.words + tail, dtype=torch.int32, device=device)
        self.pairs = self.blocks
        if not packing.is_plain:
            self.pairs = self.blocks.new_zeros(size, HEADER_WORDS + 2 * packing.capacity)

    def encode_(self, kernels: Any, layouts: Tensor) -> None:
        """Write the pairs as they travel; their values become the rounding errors."""
        if not self._packing.is_plain:
            kernels.encode(self.pairs, self.blocks, layouts, self._packing)


class _Owner:
    """The buffers of a rank as the owner of a region.

    region    the sums, one for each element; all NOTHING between any two steps
    total     the sum for each pair that arrived, for the first of those with the same index; NOTHING for the others
    found     what is large among these, and `cuts`, one region of all of them
    outbox    the block it makes of that
    """

    def __init__(self, numel: int, size: int, packing: Packing, tail: int, device: torch.device) -> None:
        self.region = torch.full((numel,), NOTHING, device=device)
        self.total = torch.zeros(size, packing.capacity, device=device)
        self.found = Found(size * packing.capacity, TILE, device)
        self.cuts = torch.tensor([0, size * packing.capacity], device=device)
        self.outbox = _Outbox(packing, 1, tail, device)
        self.sorts = not packing.is_plain

    def fill_(self, index: Tensor, total: Tensor, bad: Tensor, demand: Tensor) -> None:
        """Make the block's pairs, which are places among what arrived, the pairs that are there.

        Where they will be packed they are sorted, and there are none in a step that is refused: the indices of a block
        that cannot be may be any.
        """
        block = self.outbox.pairs[0]
        count, head = block[:1], block[:HEADER_WORDS]
        bad = bad | (head[1:2] != 0)
        if self.sorts:
            count.masked_fill_(bad, 0)
        places, values = block[HEADER_WORDS : HEADER_WORDS + 2 * self.total.shape[1]].chunk(2)
        there = torch.arange(len(places), device=places.device) < count
        place = torch.where(there, places, 0)
        taken = index[place]
        if self.sorts:
            taken, order = torch.where(there, taken, MOST_INDEX).sort()
            place = place[order]
        places.copy_(taken)
        values.copy_(total[place].view(torch.int32))
        head[1:2] = bad  # a flag: a sum of counts might come to 2^32, which is none
        head[2:4] = torch.stack([demand & reference.LOW, demand >> 31])  # for all to cut fairer regions by


def as_on_device(algorithm: OkTopk) -> OkTopk:
    """Return the algorithm with the wire of its device steps.

    "auto" is float32 there, because the packed blocks have not been timed on a GPU; when they have, it is `algorithm`.
    """
    return replace(algorithm, wire="fp32") if algorithm.wire == AUTO else algorithm


def supports_device_step(algorithm: Any, numel: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a device step for this algorithm and vector: `OkTopk` with any wire, but no float64."""
    if not isinstance(algorithm, OkTopk) or device.type != "cuda" or dtype == torch.float64:
        return False
    most = numel * max(2 * algorithm.slack * algorithm.density, 1)  # elements, or words of all blocks
    return most < MOST_NUMEL and _has_triton()


def _is_nothing(total: Tensor) -> Tensor:
    return (total == 0) & total.signbit()


def _bad_in(dense_tail: Tensor) -> Tensor:
    return (~dense_tail.isfinite()).any()


def _demands(heads: Tensor) -> Tensor:
    """Return how many pairs each block's sender wanted to send."""
    return heads[:, 2].long() + (heads[:, 3].long() << 31)


def step_kernels(device: torch.device) -> Any:
    """Return the kernels of such steps for a device."""
    if device.type == "cpu":
        return reference
    from oktopk.cuda import triton  # which needs triton

    return triton


@cache
def _has_triton() -> bool:
    """Whether triton is installed, in a version whose histograms can be masked."""
    return find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) >= LEAST_TRITON
