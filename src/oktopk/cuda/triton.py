"""The kernels of a step that never leaves the GPU, in triton: `reference` says what each does, with the same bits.

`accumulate_compact` is one pass: it reads the gradient and the residual once and writes their sum once, 12 bytes an
element, which is the least there is. Only the last tile is masked: a mask on every one would keep the loads from being
wide.
"""

# mypy: ignore-errors
# triton's language is not Python's: what is called here is compiled, and has no types that mypy knows.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from oktopk.cuda import reference
from oktopk.cuda.reference import Found, Rows, group_of, rescale, sample_of
from oktopk.cuda.triton_codec import decode, encode
from oktopk.cuda.triton_launch import kernel

__all__ = ["accumulate_compact", "compact", "decode", "deliver", "encode", "gather_zero", "measure_rows"]
__all__ += ["pack_blocks", "refuse_malformed", "rollback_if", "sample_threshold", "scatter_add", "select_threshold"]

TILE, RUN, LANES = constexpr(reference.TILE), constexpr(reference.RUN), constexpr(Found.LANES)
HEADER, LARGEST = constexpr(reference.HEADER_WORDS), constexpr(reference.LARGEST)
SHIFT_0, SHIFT_1, SHIFT_2 = map(constexpr, reference.SHIFTS)
BINS_0, BINS_1, BINS_2 = map(constexpr, reference.BINS)
CHUNK = constexpr(1024)
SLOTS = constexpr(16)
"""Slots of each tile that are packed at a time."""

PLANNED = constexpr(6)
"""Numbers that are planned for each region, see `_plan`."""

PROGRAMS = 1024
"""Programs of a kernel that walks along a whole vector, if it does anything at all."""


def _grid(numel):
    return max(triton.cdiv(numel, CHUNK.value), 1)


def sample_threshold(
    grad: Tensor, held: Tensor, rows: Rows | None, turn: Tensor, stride: int, wanted: Tensor, counts: Tensor,
    out: Tensor, adds: bool = True,
) -> None:  # fmt: skip
    sample = sample_of(len(held), stride)
    starts, scale, last, halvings = _flat(rows, held)
    for digit in range(3):
        _count(
            (_grid(sample),), grad, held, starts, scale, wanted, counts, turn, stride, sample, last,
            digit, adds, rows is not None, halvings,
        )  # fmt: skip
    _pick((1,), wanted, counts, out)


def select_threshold(score: Tensor, wanted: Tensor, counts: Tensor, out: Tensor) -> None:
    sample_threshold(score, score, None, wanted, 1, wanted, counts, out, adds=False)


def _flat(rows, anything):
    return (anything, anything, 0, 0) if rows is None else (rows.starts, rows.scale, len(rows.scale) - 1, rows.in_all)


def measure_rows(grad: Tensor, rows: Rows) -> None:
    pieces = torch.empty(len(rows.edges) - 1, device=grad.device)
    if len(pieces):
        _squares((len(pieces),), grad, rows.edges, pieces)
        rescale(pieces, rows)


def accumulate_compact(
    grad: Tensor, held: Tensor, acc: Tensor, threshold: Tensor, turn: Tensor, found: Found, rows: Rows | None = None,
    adds: bool = True,
) -> None:  # fmt: skip
    tiles, room = found.place.shape
    found.counters.zero_()
    starts, scale, _, _ = _flat(rows, held)
    first, halvings = (held, 0) if rows is None else (rows.first, rows.in_tile)
    if tiles:
        _find(
            (tiles,), grad, held, acc, threshold, turn, starts, scale, first, found.place, found.value, found.count,
            found.bad, found.groups, held.numel(), adds, rows is not None, halvings, group_of(tiles), room,
        )  # fmt: skip


def compact(total: Tensor, threshold: Tensor, turn: Tensor, found: Found, rows: Rows | None = None) -> None:
    accumulate_compact(total, total, total, threshold, turn, found, rows, adds=False)


def pack_blocks(
    found: Found, cuts: Tensor, turn: Tensor, blocks: Tensor, capacity: int, rooms: Tensor, rows: Rows | None = None
) -> None:
    tiles, room = found.place.shape
    size, words = blocks.shape
    groups = len(found.groups)
    plan = torch.empty(PLANNED.value * size + groups + 2 * size * groups, dtype=torch.int64, device=cuts.device)
    starts, scale, last, halvings = _flat(rows, found.value)
    constants = size, rows is not None, halvings, group_of(tiles), room
    _plan(
        (size + 1,), found.place, found.value, found.count, found.groups, starts, scale, cuts, found.bad, turn, plan,
        blocks, rooms, rooms.stride(0), words, tiles, groups, last, *constants,
    )  # fmt: skip
    if tiles:
        _send(
            (groups,), found.place, found.value, found.count, starts, scale, cuts, plan, blocks, words, capacity, tiles,
            groups, last, *constants,
        )  # fmt: skip


def refuse_malformed(blocks: Tensor, cuts: Tensor, capacity: int, is_sorted: bool) -> None:
    size, words = blocks.shape
    _refuse((_grid(capacity), size), blocks, cuts, words, capacity, size, len(cuts) == 2, is_sorted)


def scatter_add(block: Tensor, capacity: int, region: Tensor) -> None:
    if capacity:
        _add((_grid(capacity),), block, region, region, capacity, region.numel(), False)


def gather_zero(block: Tensor, capacity: int, region: Tensor, value: Tensor) -> None:
    if capacity:
        _add((_grid(capacity),), block, region, value, capacity, region.numel(), True)


def deliver(
    gathered: Tensor, sent: Tensor, cuts: Tensor, capacity: int, out: Tensor, acc: Tensor, held: Tensor, told: Tensor,
    kept: Tensor | None = None, rank: int = 0,
) -> None:  # fmt: skip
    size, words = gathered.shape
    out.zero_()
    _deliver(
        (_grid(capacity), size), gathered, sent, sent if kept is None else kept, cuts, out, acc, held, told,
        acc.numel(), words, sent.shape[1], capacity, rank, torch.finfo(out.dtype).max, size,
        out.dtype != torch.float32, kept is not None, capacity.bit_length(), len(told),
    )  # fmt: skip


def rollback_if(bad: Tensor, acc: Tensor, held: Tensor, out: Tensor, filling: float) -> None:
    _settle((PROGRAMS,), bad, acc, held, out, acc.numel(), filling)


@triton.jit
def _row_of(starts, low, high, place, HALVINGS: constexpr):
    """The row of each place: the last one that begins there or before, between two that are given.

    low <= middle <= high at every halving, so that `starts` is read between these two alone: `Rows` made them.
    """
    low += tl.zeros_like(place)
    high += tl.zeros_like(place)
    for _ in tl.static_range(HALVINGS):
        middle = (low + high + 1) >> 1
        before = tl.load(starts + middle) <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def _digit(counts, wanted, BINS: constexpr):
    """The largest digit that `wanted` reach, and how many are above it."""
    each = tl.arange(0, BINS)
    count = tl.load(counts + each)
    reach = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    digit = tl.maximum(tl.sum((reach >= wanted).to(tl.int32), 0) - 1, 0)
    return digit, tl.sum(tl.where(each > digit, count, 0), 0)


@kernel("stride", "sample", "last")
def _count(
    grad, held, starts, scale, wanted, counts, turn, stride, sample, last, DIGIT: constexpr, ADDS: constexpr,
    SCALED: constexpr, HALVINGS: constexpr,
):  # fmt: skip
    """Count the digits of a sample of scores: of those that share the threshold's digits before."""
    number = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    there = number < sample
    place = ((number // RUN).to(tl.int64) * stride + tl.load(turn) % stride) * RUN + number % RUN
    x = tl.load(held + place, there, other=0.0)
    if ADDS:
        x = x + tl.load(grad + place, there, other=0.0).to(tl.float32)
    x = tl.abs(x)
    if SCALED:
        row = _row_of(starts, 0, last, tl.where(there, place, 0).to(tl.int32), HALVINGS)
        x = tl.minimum(tl.div_rn(x, tl.load(scale + row)), LARGEST)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if DIGIT == 0:
        _histogram(counts, bits >> SHIFT_0, there, BINS_0)
    else:
        first, above = _digit(counts, tl.load(wanted), BINS_0)
        there = there & (bits >> SHIFT_0 == first)
        if DIGIT == 1:
            _histogram(counts + BINS_0, (bits >> SHIFT_1) & (BINS_1 - 1), there, BINS_1)
        else:
            second, _ = _digit(counts + BINS_0, tl.load(wanted) - above, BINS_1)
            there = there & ((bits >> SHIFT_1) & (BINS_1 - 1) == second)
            _histogram(counts + BINS_0 + BINS_1, (bits >> SHIFT_2) & (BINS_2 - 1), there, BINS_2)


@triton.jit
def _histogram(counts, digit, there, BINS: constexpr):
    """Count digits below BINS: they are cut to its bits, of which the first have no sign, whatever the score is."""
    made = tl.histogram(digit, BINS, mask=there)
    tl.atomic_add(counts + tl.arange(0, BINS), made, made != 0, sem="relaxed")


@kernel()
def _pick(wanted, counts, out):
    """Put the threshold's digits together, and make all counts zero."""
    left = tl.load(wanted)
    first, above = _digit(counts, left, BINS_0)
    left -= above
    second, above = _digit(counts + BINS_0, left, BINS_1)
    third, _ = _digit(counts + BINS_0 + BINS_1, left - above, BINS_2)
    bits = (first << SHIFT_0) | (second << SHIFT_1) | (third << SHIFT_2)
    tl.store(out, bits.to(tl.float32, bitcast=True))
    tl.debug_barrier()
    tl.store(counts + tl.arange(0, BINS_0), tl.zeros((BINS_0,), tl.int32))
    tl.store(counts + BINS_0 + tl.arange(0, BINS_1), tl.zeros((BINS_1,), tl.int32))
    tl.store(counts + BINS_0 + BINS_1 + tl.arange(0, BINS_2), tl.zeros((BINS_2,), tl.int32))


@kernel()
def _squares(grad, edges, pieces):
    """Sum the squares of a piece of a row."""
    piece = tl.program_id(0)
    start, end = tl.load(edges + piece), tl.load(edges + piece + 1)
    total = tl.zeros((CHUNK,), tl.float32)
    while start < end:
        at = start + tl.arange(0, CHUNK)
        x = tl.load(grad + at, at < end, other=0.0).to(tl.float32)
        total += x * x
        start += CHUNK
    tl.store(pieces + piece, tl.sum(total, 0))


@triton.jit
def _in_turn(turn, demand, room):
    """The first of `demand` equals to have room in this turn, and how many have it that come before all others."""
    over = demand > room
    begin = tl.where(over, turn.to(tl.int64) * room % tl.maximum(demand, 1), 0)
    return begin, tl.where(over, tl.maximum(begin + room - demand, 0), 0)


@triton.jit
def _has_turn(rank, begin, wrapped, room):
    """Whether the one of this rank has room then."""
    return (rank < wrapped) | ((rank >= begin) & (rank - begin < room))


@kernel("numel")
def _find(
    grad, held, acc, threshold, turn, starts, scale, first, place, value, count, bad, groups, numel,
    ADDS: constexpr, SCALED: constexpr, HALVINGS: constexpr, GROUP: constexpr, ROOM: constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    local = tl.arange(0, TILE)
    start = tile.to(tl.int64) * TILE
    limit = tl.load(threshold)
    if SCALED:
        row = _row_of(starts, tl.load(first + tile), tl.load(first + tile + 1), tile * TILE + local, HALVINGS)
        limit = limit * tl.load(scale + row)
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
    hit = (size >= limit) & (size > 0)  # of a NaN neither
    hits = hit.to(tl.int32)
    found = tl.sum(hits, 0)
    slot = tl.cumsum(hits, 0) - 1
    if found > ROOM:  # the largest have room, and of those that equal the last of them those whose turn it is
        score = size
        if SCALED:
            score = tl.minimum(tl.div_rn(size, tl.load(scale + row)), LARGEST)
        bits = tl.where(hit, score.to(tl.int32, bitcast=True), -1)
        least = 0
        for digit in range(31):
            higher = least | (1 << (30 - digit))
            least = tl.where(tl.sum((bits >= higher).to(tl.int32), 0) >= ROOM, higher, least)
        equal = bits == least
        free = ROOM - tl.sum((bits > least).to(tl.int32), 0)
        ties = equal.to(tl.int32)
        begin, wrapped = _in_turn(tl.load(turn), tl.sum(ties, 0), free)
        hit = (bits > least) | (equal & _has_turn(tl.cumsum(ties, 0) - 1, begin, wrapped, free))
        slot = tl.cumsum(hit.to(tl.int32), 0) - 1
    # 0 <= slot < ROOM where `hit`: it counts hits, of which there are at most ROOM, or ROOM were chosen.
    slots = tile.to(tl.int64) * ROOM + slot
    tl.store(place + slots, local, hit)
    tl.store(value + slots, x, hit)
    largest = tl.max(size.to(tl.int32, bitcast=True), 0)
    tl.store(count + tile, tl.minimum(found, ROOM))
    tl.atomic_add(groups + tile // GROUP, tl.minimum(found, ROOM), sem="relaxed")
    if largest >= 0x7F800000:
        infinite = tl.sum((size.to(tl.int32, bitcast=True) >= 0x7F800000).to(tl.int32), 0)
        tl.atomic_add(bad + tile % LANES, infinite, sem="relaxed")


@triton.jit
def _before(place, count, cut, tile, tiles, GROUP: constexpr, ROOM: constexpr):
    """How many of what was found in the cut's group of tiles lie before the cut."""
    each = tile // GROUP * GROUP + tl.arange(0, GROUP)
    before = tl.sum(tl.load(count + each, each < tile, other=0), 0)
    if tile < tiles:
        slot = tl.arange(0, ROOM)
        there = slot < tl.load(count + tile)
        at = tl.load(place + tile * ROOM + slot, there, other=0)
        before += tl.sum((there & (tile * TILE + at < cut)).to(tl.int32), 0)
    return before


@triton.jit
def _plan_groups(groups, starts, num_groups):
    """Write how many are found before each group."""
    at = tl.arange(0, CHUNK)
    before = tl.full((), 0, tl.int64)
    left = num_groups
    while left > 0:
        counts = tl.load(groups + at, at < num_groups, other=0).to(tl.int64)
        tl.store(starts + at, before + tl.cumsum(counts, 0) - counts, at < num_groups)
        before += tl.sum(counts, 0)
        at += CHUNK
        left -= CHUNK


@triton.jit
def _slots(
    place, value, starts, scale, tile, held, done, low_cut, high_cut, last,
    SCALED: constexpr, HALVINGS: constexpr, ROOM: constexpr,
):  # fmt: skip
    """Some slots of each of these tiles: their indices, values, and the bits of their scores; -1 out of the region."""
    slot = done + tl.arange(0, SLOTS)[None, :]
    there = slot < held[:, None]  # held <= ROOM, so that no slot is another tile's
    at = tile.to(tl.int64)[:, None] * ROOM + slot
    index = tile[:, None] * TILE + tl.load(place + at, there, other=0)
    x = tl.load(value + at, there, other=0.0)
    score = tl.abs(x)
    there = there & (index >= low_cut) & (index < high_cut)
    if SCALED:
        row = _row_of(starts, 0, last, tl.where(there, index, 0), HALVINGS)
        score = tl.minimum(tl.div_rn(score, tl.load(scale + row)), LARGEST)
    return index, x, tl.where(there, score.to(tl.int32, bitcast=True), -1)


@triton.jit
def _least(
    place, value, count, starts, scale, low_cut, high_cut, capacity, first_group, end_group, tiles, last,
    SCALED: constexpr, HALVINGS: constexpr, GROUP: constexpr, ROOM: constexpr,
):  # fmt: skip
    """The bits of the least score that has room in a region that was asked for more: by four digits of eight bits."""
    each = tl.arange(0, 256)
    least, wanted = tl.full((), 0, tl.int32), capacity
    for digit in range(4):
        shift = 24 - 8 * digit
        counts = tl.zeros((256,), tl.int32)
        group = first_group
        while group < end_group:
            tile = group * GROUP + tl.arange(0, GROUP)
            held = tl.load(count + tile, tile < tiles, other=0)
            most, done = tl.max(held, 0), 0
            while done < most:
                _, _, bits = _slots(
                    place, value, starts, scale, tile, held, done, low_cut, high_cut, last, SCALED, HALVINGS, ROOM
                )
                bits = tl.reshape(bits, (GROUP * SLOTS,))
                same = (bits >= 0) & ((bits >> shift) >> 8 == (least >> shift) >> 8)  # in the digits before this one
                counts += tl.histogram((bits >> shift) & 255, 256, mask=same)
                done += SLOTS
            group += 1
        reach = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        chosen = tl.maximum(tl.sum((reach >= wanted).to(tl.int32), 0) - 1, 0)
        wanted -= tl.sum(tl.where(each > chosen, counts, 0), 0)
        least |= chosen << shift
    return least


@triton.jit
def _plan_largest(
    place, value, count, starts, scale, turn, plan, region, low_cut, high_cut, capacity, first_group, end_group,
    tiles, num_groups, last, SIZE: constexpr, SCALED: constexpr, HALVINGS: constexpr, GROUP: constexpr, ROOM: constexpr,
):  # fmt: skip
    """Plan who has room in a region that was asked for more, which is seldom: the bits of the least score that has it,
    which equals have their turn, and for each group how many larger and how many equal ones lie before it.
    """
    least = _least(
        place, value, count, starts, scale, low_cut, high_cut, capacity, first_group, end_group, tiles, last,
        SCALED, HALVINGS, GROUP, ROOM,
    )  # fmt: skip
    before = plan + PLANNED * SIZE + num_groups + region.to(tl.int64) * 2 * num_groups
    larger, equal = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    group = first_group
    while group < end_group:
        tl.store(before + group, larger)
        tl.store(before + num_groups + group, equal)
        tile = group * GROUP + tl.arange(0, GROUP)
        held = tl.load(count + tile, tile < tiles, other=0)
        most, done = tl.max(held, 0), 0
        while done < most:
            _, _, bits = _slots(
                place, value, starts, scale, tile, held, done, low_cut, high_cut, last, SCALED, HALVINGS, ROOM
            )
            larger += tl.sum(tl.sum((bits > least).to(tl.int32), 1), 0)
            equal += tl.sum(tl.sum((bits == least).to(tl.int32), 1), 0)
            done += SLOTS
        group += 1
    begin, wrapped = _in_turn(tl.load(turn), equal, capacity - larger)
    tl.store(plan + 2 * SIZE + region, least.to(tl.int64))
    tl.store(plan + 3 * SIZE + region, begin)
    tl.store(plan + 4 * SIZE + region, wrapped)
    tl.store(plan + 5 * SIZE + region, capacity - larger)


@kernel("apart", "words", "tiles", "num_groups", "last")
def _plan(
    place, value, count, groups, starts, scale, cuts, bad, turn, plan, blocks, rooms, apart, words, tiles, num_groups,
    last,
    SIZE: constexpr, SCALED: constexpr, HALVINGS: constexpr, GROUP: constexpr, ROOM: constexpr,
):  # fmt: skip
    """Plan for each region where it begins among what was found, and write its block's head. One program more plans
    where each group of tiles begins. The rooms of two regions lie `apart` numbers from each other.
    """
    region = tl.program_id(0)
    if region == SIZE:
        _plan_groups(groups, plan + PLANNED * SIZE, num_groups)
        return
    low_cut, high_cut, capacity = tl.load(cuts + region), tl.load(cuts + region + 1), tl.load(rooms + region * apart)
    low_tile, high_tile = tl.minimum(low_cut // TILE, tiles), tl.minimum(high_cut // TILE, tiles)
    at = tl.arange(0, CHUNK).to(tl.int64)
    low_sum, high_sum = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
    left = high_tile // GROUP
    while left > 0:
        counts = tl.load(groups + at, at < high_tile // GROUP, other=0)
        high_sum += counts
        low_sum += tl.where(at < low_tile // GROUP, counts, 0)
        at += CHUNK
        left -= CHUNK
    low = tl.sum(low_sum, 0) + _before(place, count, low_cut, low_tile, tiles, GROUP, ROOM)
    demand = tl.sum(high_sum, 0) + _before(place, count, high_cut, high_tile, tiles, GROUP, ROOM) - low
    tl.store(plan + region, low)
    tl.store(plan + SIZE + region, (demand > capacity).to(tl.int64))
    block = blocks + region.to(tl.int64) * words
    tl.store(block, tl.minimum(demand, capacity).to(tl.int32))
    tl.store(block + 1, tl.sum(tl.load(bad + tl.arange(0, LANES)), 0))
    tl.store(block + 2, (demand & 0x7FFFFFFF).to(tl.int32))
    tl.store(block + 3, (demand >> 31).to(tl.int32))
    if demand > capacity:
        _plan_largest(
            place, value, count, starts, scale, turn, plan, region, low_cut, high_cut, capacity,
            (low_tile // GROUP).to(tl.int32), tl.minimum(high_tile // GROUP + 1, num_groups).to(tl.int32),
            tiles, num_groups, last, SIZE, SCALED, HALVINGS, GROUP, ROOM,
        )  # fmt: skip


@kernel("words", "capacity", "tiles", "num_groups", "last")
def _send(
    place, value, count, starts, scale, cuts, plan, blocks, words, capacity, tiles, num_groups, last,
    SIZE: constexpr, SCALED: constexpr, HALVINGS: constexpr, GROUP: constexpr, ROOM: constexpr,
):  # fmt: skip
    """Copy the pairs of a group of tiles, region by region, of which there is nearly always one, and a few slots of
    each tile at a time: most tiles have few.
    """
    group = tl.program_id(0)
    tile = group * GROUP + tl.arange(0, GROUP)
    held = tl.load(count + tile, tile < tiles, other=0)
    start = tl.load(plan + PLANNED * SIZE + group) + tl.cumsum(held, 0) - held
    most = tl.max(held, 0)
    row = tile.to(tl.int64)[:, None] * ROOM
    region = tl.full((), 0, tl.int32)
    for cut in range(1, SIZE):
        region += (tl.load(cuts + cut) <= group * GROUP * TILE).to(tl.int32)
    low_cut = tl.load(cuts + region)
    while (region < SIZE) & (low_cut < (group + 1).to(tl.int64) * GROUP * TILE):
        high_cut = tl.load(cuts + region + 1)
        block = blocks + region.to(tl.int64) * words + HEADER
        if tl.load(plan + SIZE + region) != 0:
            _send_largest(
                place, value, starts, scale, plan, block, tile, held, low_cut, high_cut, region, group, capacity,
                num_groups, last, SIZE, SCALED, HALVINGS, ROOM,
            )  # fmt: skip
        else:
            first = (start - tl.load(plan + region)).to(tl.int32)[:, None]
            done = 0
            while done < most:
                slot = done + tl.arange(0, SLOTS)[None, :]
                there = slot < held[:, None]
                index = tile[:, None] * TILE + tl.load(place + row + slot, there, other=0)
                # ranks in the region are below its demand, which is at most the capacity here
                fits = there & (index >= low_cut) & (index < high_cut)
                to = block + first + slot
                tl.store(to, (index - low_cut).to(tl.int32), fits)
                bits = tl.load(value + row + slot, there, other=0.0).to(tl.int32, bitcast=True)
                tl.store(to + capacity, bits, fits)
                done += SLOTS
        region += 1
        low_cut = high_cut


@triton.jit
def _send_largest(
    place, value, starts, scale, plan, block, tile, held, low_cut, high_cut, region, group, capacity, num_groups, last,
    SIZE: constexpr, SCALED: constexpr, HALVINGS: constexpr, ROOM: constexpr,
):  # fmt: skip
    """Copy those pairs of a group of tiles that have room in a region which was asked for more, see `_plan_largest`."""
    least = tl.load(plan + 2 * SIZE + region).to(tl.int32)
    begin, wrapped = tl.load(plan + 3 * SIZE + region), tl.load(plan + 4 * SIZE + region)
    free = tl.load(plan + 5 * SIZE + region)
    before = plan + PLANNED * SIZE + num_groups + region.to(tl.int64) * 2 * num_groups
    most = tl.max(held, 0)
    larger, equal = tl.zeros_like(held).to(tl.int64), tl.zeros_like(held).to(tl.int64)
    done = 0
    while done < most:
        _, _, bits = _slots(
            place, value, starts, scale, tile, held, done, low_cut, high_cut, last, SCALED, HALVINGS, ROOM
        )
        larger += tl.sum((bits > least).to(tl.int32), 1)
        equal += tl.sum((bits == least).to(tl.int32), 1)
        done += SLOTS
    # how many larger and equal ones lie before each tile, then before each of its slots
    larger = tl.load(before + group) + tl.cumsum(larger, 0) - larger
    equal = tl.load(before + num_groups + group) + tl.cumsum(equal, 0) - equal
    done = 0
    while done < most:
        index, x, bits = _slots(
            place, value, starts, scale, tile, held, done, low_cut, high_cut, last, SCALED, HALVINGS, ROOM
        )
        above, ties = (bits > least).to(tl.int32), (bits == least).to(tl.int32)
        larger_rank = larger[:, None] + tl.cumsum(above, 1) - above
        rank = equal[:, None] + tl.cumsum(ties, 1) - ties
        # before this one lie its larger ones, and those equal ones that have room: below `wrapped`, and from `begin` on
        slot = larger_rank + tl.minimum(rank, wrapped) + tl.minimum(tl.maximum(rank - begin, 0), free - wrapped)
        fits = (above != 0) | ((ties != 0) & _has_turn(rank, begin, wrapped, free))
        fits = fits & (slot < capacity)
        tl.store(block + slot, (index - low_cut).to(tl.int32), fits)
        tl.store(block + capacity + slot, x.to(tl.int32, bitcast=True), fits)
        larger += tl.sum(above, 1)
        equal += tl.sum(ties, 1)
        done += SLOTS


@kernel("words", "capacity")
def _refuse(blocks, cuts, words, capacity, SIZE: constexpr, SHARED: constexpr, SORTED: constexpr):
    """Look at a few slots of a block, and at its head; word 1, which is written, is read by nobody here."""
    block = blocks + tl.program_id(1).to(tl.int64) * words
    region = cuts
    if not SHARED:
        region = cuts + tl.program_id(1)
    length = tl.load(region + 1) - tl.load(region)
    count, low, high = tl.load(block), tl.load(block + 2), tl.load(block + 3)
    wanted = low.to(tl.int64) + (high.to(tl.int64) << 31)
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    there = (slot < count) & (slot < capacity)
    at = tl.load(block + HEADER + slot, there, other=0)
    wrong = (at < 0) | (at >= length)
    if SORTED:
        wrong = wrong | (at <= tl.load(block + HEADER + slot - 1, there & (slot > 0), other=-1))
    outside = tl.max((there & wrong).to(tl.int32), 0)
    head = (count < 0) | (count > capacity) | (low < 0) | (high < 0) | (wanted > length * SIZE)
    if head | (outside != 0):
        tl.store(block + 1, 1)


@kernel("capacity", "numel")
def _add(block, region, value, capacity, numel, CLAIMS: constexpr):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    there = (slot < tl.load(block)) & (slot < capacity)  # what a block says of itself may be anything
    at = tl.load(block + HEADER + slot, there, other=0)
    there = there & (at >= 0) & (at < numel)
    total = tl.load(region + at, there, other=0.0)
    if CLAIMS:
        # -0.0, by its bits: a literal loses its sign
        nothing = tl.full((CHUNK,), -(2**31), tl.int32).to(tl.float32, bitcast=True)
        tl.store(value + slot, tl.where(there, total, nothing), slot < capacity)
        tl.store(region + at, nothing, there)
    else:
        pair = tl.load(block + HEADER + capacity + slot, there, other=0).to(tl.float32, bitcast=True)
        tl.store(region + at, total + pair, there)


@kernel("numel", "words", "sent_words", "capacity", "rank", "limit")
def _deliver(
    gathered, sent, kept, cuts, out, acc, held, told, numel, words, sent_words, capacity, rank, limit,
    SIZE: constexpr, NARROW: constexpr, ROUNDS: constexpr, HALVINGS: constexpr, TOLD: constexpr,
):  # fmt: skip
    num_sent, num_kept, bad = 0, 0, 0
    for owner in range(SIZE):
        num_sent += tl.load(sent + owner * sent_words)
        num_kept += tl.load(gathered + owner * words)
        bad |= (tl.load(gathered + owner * words + 1) != 0).to(tl.int32)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(told, num_sent)
        tl.store(told + 1, num_kept)
        tl.store(told + 2, bad)
        tl.store(told + TOLD - 1, tl.load(told + TOLD - 1) + 1)
    if bad != 0:
        program = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
        _copy(held, acc, numel, program, tl.num_programs(0) * tl.num_programs(1))
        return
    owner = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    block, own = gathered + owner * words, sent + owner * sent_words
    there = (slot < tl.load(block)) & (slot < capacity)  # what a block says of itself may be anything
    at = tl.load(block + HEADER + slot, there, other=0)
    there = there & (at >= 0) & (at < tl.load(cuts + owner + 1) - tl.load(cuts + owner))
    pair = tl.load(block + HEADER + capacity + slot, there, other=0).to(tl.float32, bitcast=True)
    taken, low = there, slot
    if SIZE > 1:  # was it this rank's, too? What it sent is sorted
        count = tl.load(own)  # at most `capacity`: this rank's `_plan` wrote it, and no other's
        low = tl.zeros((CHUNK,), tl.int32)
        high = tl.zeros((CHUNK,), tl.int32) + count
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            here = tl.load(own + HEADER + middle, there & (low < high), other=0)
            less = here < at
            low, high = tl.where(less & (low < high), middle + 1, low), tl.where(less | (low >= high), high, middle)
        taken = there & (low < count) & (tl.load(own + HEADER + low, there & (low < count), other=-1) == at)
    where = tl.load(cuts + owner) + at
    mean = tl.div_rn(pair, tl.full((CHUNK,), SIZE, tl.float32))
    if NARROW or ROUNDS:
        left = tl.load(acc + where, there, other=0.0)
        remains = tl.where(taken, 0.0, left)
        if ROUNDS:  # low < count, or slot: where `taken` there is an error of this rank's
            error = tl.load(own + HEADER + capacity + low, taken, other=0).to(tl.float32, bitcast=True)
            remains = tl.where(taken, error, left)
            if SIZE > 1:  # noqa: SIM102 - known when it is compiled, and the next is not
                if owner == rank:  # slots are the same as in the block that this rank kept
                    remains += tl.load(kept + HEADER + capacity + slot, there, other=0).to(tl.float32, bitcast=True)
        rounded = mean
        if NARROW:
            rounded = tl.minimum(tl.maximum(mean, -limit), limit).to(out.dtype.element_ty)
            remains += mean - rounded.to(tl.float32)
        tl.store(out + where, rounded, there)
        tl.store(acc + where, remains, there)
    else:
        tl.store(out + where, mean, there)
        tl.store(acc + where, tl.zeros((CHUNK,), tl.float32), taken)


@triton.jit
def _copy(source, to, numel, program, programs):
    start = program.to(tl.int64) * CHUNK
    while start < numel:
        at = start + tl.arange(0, CHUNK)
        tl.store(to + at, tl.load(source + at, at < numel, other=0.0), at < numel)
        start += programs.to(tl.int64) * CHUNK


@kernel("numel", "filling")
def _settle(bad, acc, held, out, numel, filling):
    if tl.load(bad) != 0:
        _copy(held, acc, numel, tl.program_id(0), tl.num_programs(0))
        start = tl.program_id(0).to(tl.int64) * CHUNK
        while start < numel:
            at = start + tl.arange(0, CHUNK)
            tl.store(out + at, (tl.zeros((CHUNK,), tl.float32) + filling).to(out.dtype.element_ty), at < numel)
            start += tl.num_programs(0).to(tl.int64) * CHUNK
