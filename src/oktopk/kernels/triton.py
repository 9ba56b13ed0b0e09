"""The kernels of a step that never leaves the GPU, in triton; `blocks` says what each means, and gives the same bits.

`find` is one pass: it reads the gradient and the residual once and writes their sum once, 12 bytes an element, which is
the least there is. Only the last tile is masked: a mask on every one would keep the loads from being wide.
"""

# mypy: ignore-errors
# triton's language is not Python's: what is called here is compiled, and has no types that mypy knows.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oktopk.kernels.blocks import HEADER_WORDS, TILE, Found, group_of

NAME = "gpu (triton)"
LANES = Found.LANES
CHUNK = 1024
SLOTS = 16
"""Of each tile that are packed at a time."""

PROGRAMS = 1024
"""Of a kernel that walks along a whole vector, if it does anything at all."""


def find(grad: Tensor, held: Tensor, acc: Tensor, threshold: Tensor, found: Found) -> None:
    """Write held + grad into `acc`, and what of it reaches the threshold (one number, on the device) into `found`."""
    _launch_find(grad, held, acc, threshold, found, held, adds=True, ends=False)


def find_in(total: Tensor, threshold: Tensor, found: Found, length: Tensor | None = None) -> None:
    """Write what reaches the threshold into `found`; behind `length`, on the device, there is nothing but zeros."""
    end = total if length is None else length
    _launch_find(total, total, total, threshold, found, end, adds=False, ends=length is not None)


def _launch_find(grad, held, acc, threshold, found, length, adds, ends):
    tiles, room = found.place.shape
    found.counters.zero_()
    if tiles:
        _find[(tiles,)](
            grad, held, acc, threshold, found.place, found.value, found.count, found.bad, found.groups, length,
            held.numel(), adds, ends, group_of(tiles), TILE, room, LANES, num_warps=4,
        )  # fmt: skip


def send(found: Found, cuts: Tensor, turn: int, blocks: Tensor, capacity: int) -> None:
    """Write what was found into a block for each region, as much as it has room for, and the headers."""
    tiles, room = found.place.shape
    size, words = blocks.shape
    group = group_of(tiles)
    plan = torch.empty(3, size + 1, dtype=torch.int64, device=cuts.device)
    _measure[(size,)](
        found.place, found.count, found.groups, cuts, found.bad, plan, blocks, words, capacity, turn, tiles,
        size, group, TILE, room, LANES, num_warps=4,
    )  # fmt: skip
    if tiles:
        _send[(len(found.groups),)](
            found.place, found.value, found.count, found.groups, cuts, plan, blocks, words, capacity, tiles,
            size, group, SLOTS, TILE, room, HEADER_WORDS, num_warps=4,
        )  # fmt: skip


def add(block: Tensor, capacity: int, region: Tensor, sign: int = 1) -> None:
    """Add a block's pairs to the region (sign 1), or make it zero where they are (sign 0)."""
    if capacity:
        _add[(triton.cdiv(capacity, CHUNK),)](block, capacity, region, sign, HEADER_WORDS, CHUNK)


def deliver(
    gathered: Tensor, sent: Tensor, cuts: Tensor, capacity: int, out: Tensor, acc: Tensor, held: Tensor
) -> None:
    """Write the mean over ranks of what all owners kept into `out`, zeros elsewhere; make `acc` what remains."""
    size, words = gathered.shape
    out.zero_()
    if not capacity or not out.numel():
        return
    grid = (triton.cdiv(capacity, CHUNK), size)
    limit = torch.finfo(out.dtype).max
    narrow = out.dtype != torch.float32
    steps = capacity.bit_length()
    _deliver[grid](gathered, sent, cuts, out, acc, words, capacity, limit, size, narrow, steps, HEADER_WORDS, CHUNK)
    _undo[(PROGRAMS,)](gathered, held, acc, acc.numel(), words, size, CHUNK)


@triton.jit
def _find(
    grad, held, acc, threshold, place, value, count, bad, groups, length, numel,
    ADDS: tl.constexpr, ENDS: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, ROOM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    local = tl.arange(0, TILE)
    start = tile.to(tl.int64) * TILE
    limit = tl.load(threshold)
    if ENDS:  # noqa: SIM102 the inner one is asked on the GPU
        if start >= tl.load(length):
            tl.store(count + tile, 0)
            return
    if start + TILE <= numel:
        x = tl.load(held + start + local)
        if ADDS:
            x = x + tl.load(grad + start + local).to(tl.float32)
            tl.store(acc + start + local, x)
    else:
        inside = start + local < numel
        x = tl.load(held + start + local, inside, other=0.0)
        if ADDS:
            x = x + tl.load(grad + start + local, inside, other=0.0).to(tl.float32)
            tl.store(acc + start + local, x, inside)
    size = tl.abs(x)
    hit = (size >= limit) & (size > 0)
    hits = hit.to(tl.int32)
    rank = tl.cumsum(hits, 0) - 1
    fits = hit & (rank < ROOM)
    slots = tile.to(tl.int64) * ROOM + rank
    tl.store(place + slots, local, fits)
    tl.store(value + slots, x, fits)
    found = tl.sum(hits, 0)
    largest = tl.max(size.to(tl.int32, bitcast=True), 0)
    tl.store(count + tile, tl.minimum(found, ROOM))
    tl.atomic_add(groups + tile // GROUP, tl.minimum(found, ROOM), sem="relaxed")
    if largest >= 0x7F800000:
        infinite = tl.sum((size.to(tl.int32, bitcast=True) >= 0x7F800000).to(tl.int32), 0)
        tl.atomic_add(bad + tile % LANES, infinite, sem="relaxed")


@triton.jit
def _groups_before(groups, end, CHUNK: tl.constexpr):
    """How many were found in the groups before `end`."""
    total = tl.zeros((CHUNK,), tl.int64)
    at = tl.arange(0, CHUNK).to(tl.int64)
    left = end
    while left > 0:
        total += tl.load(groups + at, at < end, other=0)
        at += CHUNK
        left -= CHUNK
    return tl.sum(total, 0)


@triton.jit
def _before(place, count, groups, cut, tiles, GROUP: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr):
    """How many of what was found lie before a cut."""
    tile = tl.minimum(cut // TILE, tiles)
    group = tile // GROUP
    each = group * GROUP + tl.arange(0, GROUP)
    before = _groups_before(groups, group, 1024) + tl.sum(tl.load(count + each, each < tile, other=0), 0)
    if tile < tiles:
        slot = tl.arange(0, ROOM)
        there = slot < tl.load(count + tile)
        at = tl.load(place + tile * ROOM + slot, there, other=0)
        before += tl.sum((there & (tile * TILE + at < cut)).to(tl.int64), 0)
    return before


@triton.jit(do_not_specialize=["turn"])
def _measure(
    place, count, groups, cuts, bad, plan, blocks, words, capacity, turn, tiles,
    SIZE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Plan for each region where it begins among what was found, and which part of it fits; write its block's head."""
    region = tl.program_id(0)
    low = _before(place, count, groups, tl.load(cuts + region), tiles, GROUP, TILE, ROOM)
    demand = _before(place, count, groups, tl.load(cuts + region + 1), tiles, GROUP, TILE, ROOM) - low
    over = demand > capacity
    begin = tl.where(over, turn.to(tl.int64) * capacity % tl.maximum(demand, 1), 0)
    wrapped = tl.where(over, tl.maximum(begin + capacity - demand, 0), 0)
    row = plan + region
    tl.store(row, low)
    tl.store(row + SIZE + 1, begin)
    tl.store(row + 2 * (SIZE + 1), wrapped)
    block = blocks + region.to(tl.int64) * words
    tl.store(block, tl.minimum(demand, capacity).to(tl.int32))
    tl.store(block + 1, tl.sum(tl.load(bad + tl.arange(0, LANES)), 0))
    tl.store(block + 2, (demand & 0x7FFFFFFF).to(tl.int32))
    tl.store(block + 3, (demand >> 31).to(tl.int32))


@triton.jit
def _send(
    place, value, count, groups, cuts, plan, blocks, words, capacity, tiles,
    SIZE: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
    HEADER: tl.constexpr,
):  # fmt: skip
    """Copy the pairs of a group of tiles, a few slots of each at a time: most tiles have few."""
    group = tl.program_id(0)
    tile = group.to(tl.int64) * GROUP + tl.arange(0, GROUP)
    held = tl.load(count + tile, tile < tiles, other=0)
    start = _groups_before(groups, group, 1024) + tl.cumsum(held, 0) - held
    left = tl.max(held, 0)
    slot = tl.arange(0, SLOTS)
    while left > 0:
        there = slot[None, :] < held[:, None]
        at = tile[:, None] * ROOM + slot[None, :]
        index = tile[:, None] * TILE + tl.load(place + at, there, other=0)
        pair = tl.load(value + at, there, other=0.0)
        region = tl.zeros((GROUP, SLOTS), tl.int32)
        for cut in range(1, SIZE):
            region += (index >= tl.load(cuts + cut)).to(tl.int32)
        rank = start[:, None] + slot[None, :] - tl.load(plan + region, there, other=0)
        begin = tl.load(plan + SIZE + 1 + region, there, other=0)
        wrapped = tl.load(plan + 2 * (SIZE + 1) + region, there, other=0)
        late = rank >= begin
        fits = there & ((rank < wrapped) | (late & (rank < begin + capacity)))
        to = region.to(tl.int64) * words + HEADER + tl.where(late, rank - begin + wrapped, rank)
        tl.store(blocks + to, (index - tl.load(cuts + region, there, other=0)).to(tl.int32), fits)
        tl.store(blocks + to + capacity, pair.to(tl.int32, bitcast=True), fits)
        slot += SLOTS
        left -= SLOTS


@triton.jit
def _add(block, capacity, region, SIGN: tl.constexpr, HEADER: tl.constexpr, CHUNK: tl.constexpr):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    there = slot < tl.load(block)
    at = tl.load(block + HEADER + slot, there, other=0)
    if SIGN:
        pair = tl.load(block + HEADER + capacity + slot, there, other=0).to(tl.float32, bitcast=True)
        tl.store(region + at, tl.load(region + at, there, other=0.0) + pair, there)
    else:
        tl.store(region + at, tl.zeros((CHUNK,), tl.float32), there)


@triton.jit
def _any_bad(gathered, words, SIZE: tl.constexpr):
    bad = 0
    for owner in range(SIZE):
        bad |= tl.load(gathered + owner * words + 1)
    return bad != 0


@triton.jit
def _deliver(
    gathered, sent, cuts, out, acc, words, capacity, limit,
    SIZE: tl.constexpr, NARROW: tl.constexpr, STEPS: tl.constexpr,
    HEADER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    if _any_bad(gathered, words, SIZE):
        return
    owner = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    block, own = gathered + owner * words, sent + owner * words
    there = slot < tl.load(block)
    at = tl.load(block + HEADER + slot, there, other=0)
    pair = tl.load(block + HEADER + capacity + slot, there, other=0).to(tl.float32, bitcast=True)
    # Was it this rank's, too? What it sent is sorted.
    num_sent = tl.load(own)
    low = tl.zeros((CHUNK,), tl.int32)
    high = tl.zeros((CHUNK,), tl.int32) + num_sent
    for _ in range(STEPS):
        middle = (low + high) // 2
        here = tl.load(own + HEADER + middle, there & (low < high), other=0)
        less = here < at
        low, high = tl.where(less & (low < high), middle + 1, low), tl.where(less | (low >= high), high, middle)
    taken = there & (low < num_sent) & (tl.load(own + HEADER + low, there & (low < num_sent), other=-1) == at)
    where = tl.load(cuts + owner) + at
    mean = tl.div_rn(pair, tl.full((CHUNK,), SIZE, tl.float32))
    if NARROW:
        rounded = tl.minimum(tl.maximum(mean, -limit), limit).to(out.dtype.element_ty)
        tl.store(out + where, rounded, there)
        held = tl.load(acc + where, there, other=0.0)
        tl.store(acc + where, tl.where(taken, 0.0, held) + (mean - rounded.to(tl.float32)), there)
    else:
        tl.store(out + where, mean, there)
        tl.store(acc + where, tl.zeros((CHUNK,), tl.float32), taken)


@triton.jit
def _undo(gathered, held, acc, numel, words, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """If the step is bad, the residual is what it was."""
    if _any_bad(gathered, words, SIZE):
        start = tl.program_id(0).to(tl.int64) * CHUNK
        while start < numel:
            at = start + tl.arange(0, CHUNK)
            tl.store(acc + at, tl.load(held + at, at < numel, other=0.0), at < numel)
            start += tl.num_programs(0).to(tl.int64) * CHUNK
