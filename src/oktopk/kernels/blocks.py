"""The kernels of a step that never leaves the device, in plain torch: what each means, and the oracle of the fast ones.

All shapes are known beforehand; what depends on the data, counts among them, stays in tensors and is never asked for.
A vector is cut into tiles of `TILE` elements. What is large in a tile lies in that tile's slots, in the order of the
indices, as far as there is room; so places in a message follow from sums over counts, and are the same in every run.

    words of a block    0 how many pairs; 1 how many NaN or Inf their rank met; 2, 3 how many pairs it wanted to send
                        then room for `capacity` indices, counted from the start of the region; then for as many values
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 1024
HEADER_WORDS = 4
LEAST_ROOM = 8
"""A tile has slots for at least one in so many of its elements."""

LOW = (1 << 31) - 1


def room_for(density: float) -> int:
    """Return how many slots a tile has: four times what it needs where all tiles are alike, a power of two.

    >>> [room_for(density) for density in (0.001, 0.01, 0.1, 1.0)]
    [128, 128, 512, 1024]
    """
    room = TILE // LEAST_ROOM
    while room < min(4 * density, 1) * TILE:
        room *= 2
    return room


@dataclass(frozen=True)
class Found:
    """What is large in each tile: `place` in the tile and `value`, for the first `count` slots.

    `bad` is how many NaN or Inf there are, cut into lanes, to be summed, so that not all tiles add to the same number.
    `groups` has the counts of so many tiles together. Both lie in `counters`.
    """

    place: Tensor
    value: Tensor
    count: Tensor
    bad: Tensor
    groups: Tensor
    counters: Tensor

    LANES = 64

    @staticmethod
    def make(numel: int, room: int, device: torch.device) -> Found:
        """Return room for what is found in a vector of `numel`."""
        tiles = -(-numel // TILE)
        counters = torch.zeros(Found.LANES + -(-tiles // group_of(tiles)), dtype=torch.int32, device=device)
        return Found(
            torch.zeros(tiles, room, dtype=torch.int32, device=device),
            torch.zeros(tiles, room, dtype=torch.float32, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
            counters[: Found.LANES],
            counters[Found.LANES :],
            counters,
        )


def group_of(tiles: int) -> int:
    """Return how many tiles are counted together: few enough that they are packed at once, unless there are many."""
    return 16 if tiles <= 1 << 16 else 64


def find(grad: Tensor, held: Tensor, acc: Tensor, threshold: Tensor, found: Found) -> None:
    """Write held + grad into `acc`, and what of it reaches the threshold (one number, on the device) into `found`.

    Zeros are never found.
    """
    torch.add(held, grad, out=acc)
    find_in(acc, threshold, found)


def find_in(total: Tensor, threshold: Tensor, found: Found, length: Tensor | None = None) -> None:
    """Write what reaches the threshold into `found`; behind `length`, on the device, there is nothing but zeros."""
    del length  # there is no need to know it here
    tiles, room = found.place.shape
    rows = torch.nn.functional.pad(total, (0, tiles * TILE - len(total))).view(tiles, TILE)
    size = rows.abs()
    hit = (size >= threshold) & (size > 0)
    rank = hit.cumsum(1)
    fits = hit & (rank <= room)
    row = torch.arange(tiles, device=total.device)[:, None] * room
    beyond = torch.full_like(rank, tiles * room)
    slot = torch.where(fits, row + rank - 1, beyond).view(-1)
    _scatter_(found.place, slot, torch.arange(TILE, dtype=torch.int32, device=total.device).expand(tiles, TILE))
    _scatter_(found.value, slot, rows)
    found.count.copy_(fits.sum(1))
    group = group_of(tiles)
    padded = torch.nn.functional.pad(found.count, (0, len(found.groups) * group - tiles))
    found.groups.copy_(padded.view(-1, group).sum(1))
    found.bad.zero_()
    found.bad[0] = (~total.isfinite()).sum()


def send(found: Found, cuts: Tensor, turn: int, blocks: Tensor, capacity: int) -> None:
    """Write what was found into a block for each region, as much as it has room for, and the headers.

    Where there is more, `turn` says with what to begin, so that nothing waits for ever; the order stays.
    """
    tiles, room = found.place.shape
    slots = torch.arange(room, device=found.place.device)
    there = slots < found.count[:, None]
    start = found.count.long().cumsum(0) - found.count
    index = (torch.arange(tiles, device=slots.device) * TILE)[:, None] + found.place
    position = start[:, None] + slots
    region = torch.bucketize(index, cuts[1:-1], right=True)
    base = torch.stack([(there & (index < cut)).sum() for cut in cuts])
    demand = base.diff()
    place = position - base[region]
    begin = torch.where(demand > capacity, turn * capacity % demand.clamp(min=1), 0)[region]
    wrapped = (begin + capacity - demand[region]).clamp(min=0)
    fits = there & ((demand[region] <= capacity) | (place < wrapped) | ((place >= begin) & (place < begin + capacity)))
    slot = torch.where((demand[region] > capacity) & (place >= begin), place - begin + wrapped, place)
    words = blocks.shape[1]
    beyond = torch.full_like(slot, blocks.numel())
    first = torch.where(fits, region * words + HEADER_WORDS + slot, beyond).view(-1)
    _scatter_(blocks, first, (index - cuts[region]).int())
    second = torch.where(fits, first.view_as(slot) + capacity, beyond).view(-1)
    _scatter_(blocks, second, found.value.view(torch.int32))
    bad = found.bad.sum().expand_as(demand)
    header = torch.stack([demand.clamp(max=capacity), bad, demand & LOW, demand >> 31], 1)
    blocks[:, :HEADER_WORDS] = header.int()


def add(block: Tensor, capacity: int, region: Tensor, sign: int = 1) -> None:
    """Add a block's pairs to the region (sign 1), or make it zero where they are (sign 0)."""
    there = torch.arange(capacity, device=block.device) < block[0]
    index = torch.where(there, block[HEADER_WORDS : HEADER_WORDS + capacity].long(), 0)
    value = block[HEADER_WORDS + capacity : HEADER_WORDS + 2 * capacity].view(torch.float32)
    if sign:
        _scatter_(region, torch.where(there, index, len(region)), region[index] + value)
    else:
        _scatter_(region, torch.where(there, index, len(region)), torch.zeros_like(value))


def _scatter_(target: Tensor, slot: Tensor, source: Tensor) -> None:
    """Write each of `source` into its slot of `target`; the slot behind the last one takes what has no place."""
    flat = torch.cat([target.reshape(-1), target.new_zeros(1)])
    flat[slot] = source.reshape(-1).to(target.dtype)
    target.copy_(flat[:-1].view_as(target))


def deliver(
    gathered: Tensor, sent: Tensor, cuts: Tensor, capacity: int, out: Tensor, acc: Tensor, held: Tensor
) -> None:
    """Write the mean over ranks of what all owners kept into `out`, zeros elsewhere; make `acc` what remains.

    Where this rank `sent` what was delivered nothing remains, but for what `out`'s dtype cannot hold. If any owner met
    a NaN or Inf, on its own or among what it was sent, `out` is zero and `acc` as it was `held`.
    """
    size = len(gathered)
    bad = (gathered[:, 1] != 0).any()
    slots = torch.arange(capacity, device=out.device)
    there = (slots < gathered[:, :1]) & ~bad
    index = gathered[:, HEADER_WORDS : HEADER_WORDS + capacity].long() + cuts[:-1, None]
    value = gathered[:, HEADER_WORDS + capacity : HEADER_WORDS + 2 * capacity].contiguous().view(torch.float32)
    mine = torch.where(
        slots < sent[:, :1], sent[:, HEADER_WORDS : HEADER_WORDS + capacity].long() + cuts[:-1, None], -1
    )
    taken = there & torch.isin(index, mine)
    mean = value / torch.tensor(float(size), device=value.device)  # by a number, a GPU would multiply by its inverse
    rounded = mean.clamp(-torch.finfo(out.dtype).max, torch.finfo(out.dtype).max).to(out.dtype)
    lost = mean - rounded.float()
    where = torch.where(there, index, len(acc)).view(-1)
    kept = torch.where(taken, 0.0, acc[torch.where(there, index, 0)]) + lost
    out.zero_()
    _scatter_(out, where, rounded)
    _scatter_(acc, where, kept)
    acc.copy_(torch.where(bad, held, acc))
