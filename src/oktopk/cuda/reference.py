"""The kernels of the device step in plain torch: the meaning of each, and the oracle of the Triton ones.

All shapes are known beforehand. Counts and other data-dependent numbers stay in tensors, and the host never reads them.
A vector is cut into tiles of `TILE` elements. A tile's slots hold its large elements in the order of their indices, so
that positions in a message follow from sums over counts and are the same in every run. Where slots are short, the
largest elements get them; among equals `turn`, the number of the step, decides.

The codec's blocks are what travels (`encode`, `decode`); the other kernels work on these, unpacked:

    words of a block    0 how many pairs; 1 not zero if its rank met a NaN or Inf, or if `refuse_malformed` refused it
                        2, 3 how many pairs its rank wanted to send
                        then room for `capacity` indices, counted from the start of the region; then for as many values;
                        what may follow is not looked at here
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.codec import Layout, values
from oktopk.codec.indices import PLAIN
from oktopk.cuda.packing import Packing
from oktopk.kernels import REFERENCE
from oktopk.kernels.reference import EXPONENTS, bits_of, running, scales_of
from oktopk.words import HEADER_WORDS

TILE = 1024
LEAST_ROOM = 4
"""Elements of a tile for each slot, at most: a tile has slots for a quarter of its elements or more."""

LOW = (1 << 31) - 1
NOTHING = -0.0
"""A sum of no pairs: it changes nothing that is added to it, and no sum of pairs is it, since none of them is zero."""

LARGEST = torch.finfo(torch.float32).max
SHIFTS, BINS = (23, 17, 11), (1 << 8, 1 << 6, 1 << 6)
"""Lowest bits and sizes of a threshold's digits: its exponent, and twice six bits more. It is right to 1 in 4096."""

RUN = 8
"""Elements of a sample that lie side by side: a GPU reads as many at a time."""

PIECE = 1 << 16
"""Elements of a row whose squares are summed at a time."""


def room_for(density: float) -> int:
    """Return how many slots a tile has: four times what it needs where all tiles are alike, a power of two.

    >>> [room_for(density) for density in (0.001, 0.01, 0.1, 1.0)]
    [256, 256, 512, 1024]
    """
    room = TILE // LEAST_ROOM
    while room < min(4 * density, 1) * TILE:
        room *= 2
    return room


class Found:
    """The large elements of each tile of a vector: `place` in the tile and `value`, in the first `count` slots.

    `bad` counts NaN and Inf in several counters, so that not all tiles add to the same address.
    `groups` has the counts of `group_of` tiles together. Both lie in `counters`.
    """

    LANES = 64

    def __init__(self, numel: int, room: int, device: torch.device) -> None:
        tiles = -(-numel // TILE)
        self.place = torch.zeros(tiles, room, dtype=torch.int32, device=device)
        self.value = torch.zeros(tiles, room, dtype=torch.float32, device=device)
        self.count = torch.zeros(tiles, dtype=torch.int32, device=device)
        groups = -(-tiles // group_of(tiles))
        self.counters = torch.zeros(self.LANES + groups, dtype=torch.int32, device=device)
        self.bad, self.groups = self.counters[: self.LANES], self.counters[self.LANES :]


class Rows:
    """The rows between `bounds` (first 0, last numel), with a scale each, with which their thresholds are multiplied.

    starts         the first element of each row
    squares        running means of the squared gradient, of which the scales are made
    first          the row that each tile begins in, then the last one
    in_tile        how often a range of rows must be halved to find one, in a tile; `in_all`: in the vector
    edges, ends    edges cut the rows into pieces; row r is pieces ends[r] to ends[r + 1]
    """

    def __init__(self, bounds: Tensor, squares: Tensor, scale: Tensor, device: torch.device) -> None:
        tiles = -(-int(bounds[-1]) // TILE)
        first = torch.searchsorted(bounds, torch.arange(tiles) * TILE, right=True) - 1
        first = torch.cat([first, torch.tensor([len(bounds) - 2])])
        pieces = -(-bounds.diff() // PIECE)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), pieces.cumsum(0)])
        within = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(pieces)
        edges = bounds[:-1].repeat_interleave(pieces) + within * PIECE
        self.starts, self.first = bounds[:-1].int().to(device), first.int().to(device)
        self.squares, self.scale = squares.float().to(device), scale.float().to(device)
        self.in_tile, self.in_all = int(first.diff().max() if tiles else 0).bit_length(), len(scale).bit_length()
        self.edges, self.ends = torch.cat([edges, bounds[-1:]]).to(device), ends.to(device)

    def scale_at(self, index: Tensor) -> Tensor:
        """Return the scale of each index."""
        return self.scale[torch.searchsorted(self.starts, index.int(), right=True) - 1]

    def score(self, size: Tensor, index: Tensor) -> Tensor:
        """Return how large elements of these magnitudes are: finite, if they are."""
        return (size / self.scale_at(index)).clamp(max=LARGEST)


def group_of(tiles: int) -> int:
    """Return how many tiles are counted together: few enough that they are packed at once, unless there are many."""
    return 32 if tiles <= 1 << 16 else 64


def sample_of(numel: int, stride: int) -> int:
    """Return how many elements `sample_threshold` reads: RUN of each stride * RUN; all where the stride is 1.

    >>> sample_of(1000, 3), sample_of(7, 1)
    (328, 7)
    """
    return numel // (stride * RUN) * RUN if stride > 1 else numel


def bins(device: torch.device) -> Tensor:
    """Return the counters that `sample_threshold` works with: all zero between any two calls."""
    return torch.zeros(sum(BINS), dtype=torch.int32, device=device)


def sample_threshold(
    grad: Tensor, held: Tensor, rows: Rows | None, turn: Tensor, stride: int, wanted: Tensor, counts: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Write a threshold into `out` that `wanted` (one number, on the device) of a sample of held + grad reach.

    The sample is one in `stride` elements, a few side by side, beginning elsewhere at every turn. The threshold is the
    score of one of them, but for its last bits, which are zero. It is zero if fewer scores are above zero.
    """
    number = torch.arange(sample_of(len(held), stride), device=held.device)
    places = (number // RUN * stride + turn % stride) * RUN + number % RUN
    total = held[places] + grad[places].float()
    select_threshold(total.abs() if rows is None else rows.score(total.abs(), places), wanted, counts, out)


def select_threshold(score: Tensor, wanted: Tensor, counts: Tensor, out: Tensor) -> None:  # noqa: ARG001
    """Write a threshold into `out` that `wanted` of these scores, none of them negative, reach."""
    left, found = score.view(torch.int32) & LOW, torch.zeros_like(out, dtype=torch.int64)
    for shift, base in zip(SHIFTS, BINS, strict=True):
        digits = (left >> shift) % base
        counted = torch.bincount(digits, minlength=base)
        reach = counted.flip(0).cumsum(0).flip(0)  # how many have this digit or a larger one
        digit = ((reach >= wanted).sum() - 1).clamp(min=0).view(1)
        left, wanted, found = left[digits == digit], wanted - reach[digit] + counted[digit], found | digit << shift
    out.copy_(found.int().view(torch.float32))


def measure_rows(grad: Tensor, rows: Rows) -> None:
    """Take the squares of this gradient into the running means of the rows where they are finite; make all scales."""
    rescale(_sums(grad.float().square(), rows.edges), rows)


def rescale(pieces: Tensor, rows: Rows) -> None:
    """Make the scales, of the sums of squares of all pieces."""
    lengths = rows.edges[rows.ends].diff()
    rows.squares.copy_(running(rows.squares, _sums(pieces, rows.ends) / lengths.clamp(min=1)))
    rows.scale.copy_(scales_of(rows.squares, lengths))


def _sums(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", offsets=offsets, unsafe=True, initial=0.0)  # to check would be to wait


def accumulate_compact(
    grad: Tensor, held: Tensor, acc: Tensor, threshold: Tensor, turn: Tensor, found: Found, rows: Rows | None = None
) -> None:
    """Write held + grad into `acc`, and its elements but zeros that reach the threshold, a tensor, into `found`."""
    torch.add(held, grad, out=acc)
    compact(acc, threshold, turn, found, rows)


def compact(total: Tensor, threshold: Tensor, turn: Tensor, found: Found, rows: Rows | None = None) -> None:
    """Write what reaches the threshold into `found`."""
    tiles, room = found.place.shape
    padded = torch.nn.functional.pad(total, (0, tiles * TILE - len(total)))
    each = torch.arange(tiles * TILE, device=total.device)
    size = score = padded.abs()
    if rows is not None:
        inside = each.clamp(max=len(total) - 1)
        threshold, score = threshold * rows.scale_at(inside), rows.score(size, inside)
    hit = (size >= threshold) & (size > 0)
    fits, slot = _fit(score, hit, each // TILE, tiles, room, turn)
    slot = torch.where(fits, each // TILE * room + slot, tiles * room)
    _scatter_(found.place, slot, (each % TILE).int())
    _scatter_(found.value, slot, padded)
    found.count.copy_(fits.view(tiles, TILE).sum(1))
    group = group_of(tiles)
    counts = torch.nn.functional.pad(found.count, (0, len(found.groups) * group - tiles))
    found.groups.copy_(counts.view(-1, group).sum(1))
    found.bad.zero_()
    found.bad[0] = (~total.isfinite()).sum()


def pack_blocks(
    found: Found, cuts: Tensor, turn: Tensor, blocks: Tensor, capacity: int, rooms: Tensor, rows: Rows | None = None
) -> None:
    """Write what was found into a block for each region, as much as it has room for, and the headers.

    There is room for `rooms` pairs in each, which is at most `capacity`.
    """
    tiles, room = found.place.shape
    size, words = blocks.shape
    there = (torch.arange(room, device=found.place.device) < found.count[:, None]).view(-1)
    index = ((torch.arange(tiles, device=there.device) * TILE)[:, None] + found.place).view(-1)
    value = found.value.view(-1)
    region = torch.bucketize(index, cuts[1:-1], right=True)
    score = value.abs() if rows is None else rows.score(value.abs(), index)
    fits, slot = _fit(score, there, region, size, rooms.long(), turn)
    first = torch.where(fits, region * words + HEADER_WORDS + slot, blocks.numel())
    _scatter_(blocks, first, (index - cuts[region]).int())
    _scatter_(blocks, torch.where(fits, first + capacity, blocks.numel()), value.view(torch.int32))
    demand = _count_by(region, there, size)
    bad = found.bad.sum().expand_as(demand)
    header = torch.stack([torch.minimum(demand, rooms), bad, demand & LOW, demand >> 31], 1)
    blocks[:, :HEADER_WORDS] = header.int()


def _fit(
    score: Tensor, there: Tensor, group: Tensor, groups: int, room: int | Tensor, turn: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which of those that are `there` have room, `room` in each group, and their slots in the order they lie in.

    The largest have it, and of those that equal the last of them those whose turn it is.
    """
    key = torch.where(there, score, -1.0)
    order = key.sort(descending=True, stable=True).indices
    order = order[group[order].sort(stable=True).indices]
    last = torch.searchsorted(group[order], torch.arange(groups, device=group.device)) + room - 1
    over = _count_by(group, there, groups) > room
    least = torch.where(over, torch.cat([key[order], key.new_zeros(1)])[last.clamp(0, len(key))], -1.0)[group]
    larger, equal = there & (key > least), there & (key == least)
    free = room - _count_by(group, larger, groups)
    rank, ties = _rank_in(group, equal, groups), _count_by(group, equal, groups)
    fits = larger | (equal & _in_turn(rank, ties[group], turn, free[group]))
    return fits, _rank_in(group, fits, groups)


def _count_by(group: Tensor, mask: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=torch.int64, device=group.device).index_add_(0, group, mask.long())


def _rank_in(group: Tensor, mask: Tensor, groups: int) -> Tensor:
    """Return how many of its group, of those in the mask, lie before each element."""
    counts = _count_by(group, mask, groups)
    return mask.cumsum(0) - mask.long() - (counts.cumsum(0) - counts)[group]


def _in_turn(rank: Tensor, demand: Tensor, turn: Tensor, room: Tensor) -> Tensor:
    """Return which of `demand` have room, by their ranks: all, or those from the turn's one on, and then the first."""
    over = demand > room
    begin = torch.where(over, turn.long() * room % demand.clamp(min=1), 0)
    wrapped = torch.where(over, (begin + room - demand).clamp(min=0), 0)
    return (rank < wrapped) | ((rank >= begin) & (rank - begin < room))


def refuse_malformed(blocks: Tensor, cuts: Tensor, capacity: int, is_sorted: bool) -> None:
    """Mark each block whose count, indices or demand cannot be, so that the step is refused.

    Block i is of region i between the cuts; all are of the only one if these are two. Where `is_sorted`, the indices of
    each must increase.
    """
    count, told, length = blocks[:, :1], blocks[:, 2:HEADER_WORDS].long(), cuts.diff()[:, None]
    index = blocks[:, HEADER_WORDS : HEADER_WORDS + capacity]
    there = torch.arange(capacity, device=blocks.device) < count
    least = torch.zeros_like(index)
    if is_sorted:
        least[:, 1:] = index[:, :-1] + 1
    outside = (there & ((index < least) | (index >= length))).any(1, keepdim=True)
    wanted = told[:, :1] + (told[:, 1:] << 31)
    head = (count < 0) | (count > capacity) | (told < 0).any(1, keepdim=True) | (wanted > length * len(blocks))
    blocks[:, 1:2] = torch.where(head | outside, 1, blocks[:, 1:2])


def scatter_add(block: Tensor, capacity: int, region: Tensor) -> None:
    """Add a block's pairs to the region, which is NOTHING where there is no pair; but none that lies outside it."""
    there, index = _pairs(block, capacity, len(region))
    value = block[HEADER_WORDS + capacity : HEADER_WORDS + 2 * capacity].view(torch.float32)
    _scatter_(region, torch.where(there, index, len(region)), region[index] + value)


def gather_zero(block: Tensor, capacity: int, region: Tensor, value: Tensor) -> None:
    """Write what the region has for each of a block's pairs into `value`, and NOTHING there: it is had once."""
    there, index = _pairs(block, capacity, len(region))
    value.copy_(torch.where(there, region[index], NOTHING))
    _scatter_(region, torch.where(there, index, len(region)), torch.full_like(value, NOTHING))


def _pairs(block: Tensor, capacity: int, length: int) -> tuple[Tensor, Tensor]:
    """Return which slots have a pair, and its index in a region of `length` elements; 0 where there is none."""
    index = block[HEADER_WORDS : HEADER_WORDS + capacity].long()
    there = (torch.arange(capacity, device=block.device) < block[0]) & (index >= 0) & (index < length)
    return there, torch.where(there, index, 0)


def _scatter_(target: Tensor, slot: Tensor, source: Tensor) -> None:
    """Write each of `source` into its slot of `target`; the slot behind the last one takes what has no place."""
    flat = torch.cat([target.reshape(-1), target.new_zeros(1)])
    flat[slot] = source.reshape(-1).to(target.dtype)
    target.copy_(flat[:-1].view_as(target))


def deliver(
    gathered: Tensor, sent: Tensor, cuts: Tensor, capacity: int, out: Tensor, acc: Tensor, held: Tensor, told: Tensor,
    kept: Tensor | None = None, rank: int = 0,
) -> None:  # fmt: skip
    """Write the mean over ranks of what all owners kept into `out`, zeros elsewhere; make `acc` what remains.

    Where this rank `sent` what was delivered nothing remains, but for what `out`'s dtype cannot hold. If any owner met
    a NaN or Inf, on its own or among what it was sent, `out` is zero and `acc` as it was `held`. The first words of
    `told` become how many pairs were sent and delivered, and whether all was finite (0); its last one counts the steps.

    If the blocks were rounded, `sent` has the rounding errors in place of the values, and so has `kept`, the block of
    this `rank` as an owner: these remain, too. A rank that is alone has kept what it sent, and rounded it once.
    """
    size = len(gathered)
    bad = (gathered[:, 1] != 0).any()
    slots = torch.arange(capacity, device=out.device)
    index = gathered[:, HEADER_WORDS : HEADER_WORDS + capacity].long() + cuts[:-1, None]
    there = (slots < gathered[:, :1]) & (index >= cuts[:-1, None]) & (index < cuts[1:, None]) & ~bad
    value = gathered[:, HEADER_WORDS + capacity : HEADER_WORDS + 2 * capacity].contiguous().view(torch.float32)
    own = sent[:, HEADER_WORDS : HEADER_WORDS + capacity].long() + cuts[:-1, None]
    mine = torch.where(slots < sent[:, :1], own, -1)
    taken = there & torch.isin(index, mine)
    mean = value / torch.tensor(float(size), device=value.device)  # by a number, a GPU would multiply by its inverse
    rounded, remains = mean, torch.where(taken, 0.0, acc[torch.where(there, index, 0)])
    if kept is not None:
        remains = torch.where(taken, _errors_at(index, mine, sent, capacity), remains)
        if size > 1:
            remains[rank] = torch.where(there[rank], remains[rank] + _values_in(kept, capacity)[0], remains[rank])
    if out.dtype != torch.float32:  # float32 loses nothing, of a NaN either
        rounded = mean.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max).to(out.dtype)
        remains += mean - rounded.float()
    where = torch.where(there, index, len(acc)).view(-1)
    out.zero_()
    _scatter_(out, where, rounded)
    _scatter_(acc, where, remains)
    acc.copy_(torch.where(bad, held, acc))
    told[:3] = torch.stack([sent[:, 0].sum(), gathered[:, 0].sum(), bad.long()])
    told[-1:] += 1


def _values_in(blocks: Tensor, capacity: int) -> Tensor:
    return blocks[:, HEADER_WORDS + capacity : HEADER_WORDS + 2 * capacity].contiguous().view(torch.float32)


def _errors_at(index: Tensor, mine: Tensor, sent: Tensor, capacity: int) -> Tensor:
    """Return the rounding error of the value that this rank sent of each index; of any other where it sent none."""
    ranked, order = mine.view(-1).sort(stable=True)
    place = torch.searchsorted(ranked, index).clamp(max=max(len(ranked) - 1, 0))
    return _values_in(sent, capacity).view(-1)[order[place]] if len(order) else index.float()


def encode(pairs: Tensor, blocks: Tensor, layouts: Tensor, packing: Packing) -> None:
    """Write the codec's blocks of these pairs; put the rounding errors in the place of the values.

    Row i of `layouts` is the `Layout` of block i; all blocks have the only one if there is one. The note is a status as
    `InputStatus` has it: 1 where word 1 of the pairs is not zero, otherwise four times the number of pairs wanted.
    """
    capacity, wire = packing.capacity, packing.wire
    for pair, block, layout in zip(pairs, blocks, _layouts(layouts, len(blocks)), strict=True):
        count, bad, low, high = pair[:HEADER_WORDS].tolist()
        index, value = pair[HEADER_WORDS:][:count], pair[HEADER_WORDS + capacity :][:count].view(torch.float32)
        words = block[: words_of(layout, wire)].zero_()
        if layout.low_bits == PLAIN:
            words[HEADER_WORDS : HEADER_WORDS + count] = index
        elif count:
            lows, highs = words[HEADER_WORDS : layout.highs_at], words[layout.highs_at : layout.scales_at]
            REFERENCE.pack_(index.long(), 0, layout.low_bits, lows, highs)
        error = values.write_(wire, words[layout.scales_at :], value)
        note = 1 if bad else (low + (high << 31)) << 2
        words[:HEADER_WORDS] = torch.tensor([count, layout.low_bits, note & LOW, note >> 31], dtype=torch.int32)
        value.copy_(error)


def words_of(layout: Layout, wire: str) -> int:
    """Return the words of a block of this layout."""
    return layout.scales_at + values.num_words(wire, layout.capacity)


def decode(blocks: Tensor, pairs: Tensor, layouts: Tensor, packing: Packing) -> None:
    """Write the pairs that these blocks hold, as `encode` wrote them: the values as they arrived.

    Of words that `encode` cannot have written, pairs come that mean nothing, but none outside their block, and word 1
    is not zero; `refuse_malformed` looks at the indices.
    """
    capacity, wire = packing.capacity, packing.wire
    for block, pair, layout in zip(blocks, pairs, _layouts(layouts, len(blocks)), strict=True):
        count, low_bits, low, high = block[:HEADER_WORDS].tolist()
        most = min(max(count, 0), layout.capacity)
        note = max(high, 0) << 31 | max(low, 0)
        is_bad = note & 3 != 0 or count != most or low_bits != layout.low_bits or min(low, high) < 0
        index, is_whole = _unpacked(block, most, layout)
        value, is_known = _read(block, most, layout, wire)
        pair[HEADER_WORDS : HEADER_WORDS + most] = index
        pair[HEADER_WORDS + capacity : HEADER_WORDS + capacity + most] = value.view(torch.int32)
        head = [count, int(is_bad or not is_whole or not is_known), note >> 2 & LOW, note >> 33]
        pair[:HEADER_WORDS] = torch.tensor(head, dtype=torch.int32)


def _layouts(layouts: Tensor, blocks: int) -> Sequence[Layout]:
    rows = [Layout(*row) for row in layouts.tolist()]
    return rows * blocks if len(rows) == 1 else rows


def _unpacked(block: Tensor, count: int, layout: Layout) -> tuple[Tensor, bool]:
    """Return `count` indices of a block, and whether it has that many."""
    if layout.low_bits == PLAIN:
        return block[HEADER_WORDS : HEADER_WORDS + count], True
    place = bits_of(block[layout.highs_at : layout.scales_at]).nonzero().view(-1)
    high = torch.full((count,), -1, device=block.device)
    high[: len(place)] = place[:count] - torch.arange(min(count, len(place)), device=block.device)
    bits = torch.arange(layout.low_bits, device=block.device)
    lows = bits_of(block[HEADER_WORDS : layout.highs_at])[: count * layout.low_bits].view(count, layout.low_bits)
    index = high << layout.low_bits | (lows << bits).sum(1)
    return torch.where((high < 0) | (index > LOW), -1, index).int(), len(place) == count


def _read(block: Tensor, count: int, layout: Layout, wire: str) -> tuple[Tensor, bool]:
    """Return `count` values, and whether they can be: finite, and none of their scales too small."""
    scale = block[layout.scales_at : layout.steps_at].view(torch.float32)[: values.num_scales(wire, count)]
    steps = block[layout.steps_at : words_of(layout, wire)].view(values.WIRES[wire])[:count]
    value = values.scaled(steps, scale, torch.float32) if len(scale) else steps.float()
    return value, bool((scale >= 2.0 ** EXPONENTS[0]).all() & value.isfinite().all())


def rollback_if(bad: Tensor, acc: Tensor, held: Tensor, out: Tensor, filling: float) -> None:
    """If `bad`, a scalar tensor, is not zero: copy `held` into `acc`, and fill `out` with `filling`."""
    acc.copy_(torch.where(bad != 0, held, acc))
    out.copy_(torch.where(bad != 0, torch.full_like(out, filling), out))
