"""The codec on the GPU, in triton: `reference.encode` and `decode` say what these do, with the same bits.

A block is packed without atomics: each word gathers the bits of the pairs that reach into it, which the sorted indices
tell. It is unpacked by the place of the ones in its bit vector: sums over counts of ones say which index a one is.
"""

# mypy: ignore-errors
# triton's language is not Python's: what is called here is compiled, and has no types that mypy knows.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from oktopk import codec
from oktopk.codec import values
from oktopk.cuda import reference
from oktopk.cuda.packing import Packing
from oktopk.cuda.triton_launch import kernel
from oktopk.kernels import reference as plain

HEADER, FIELDS = constexpr(reference.HEADER_WORDS), constexpr(len(codec.Layout._fields))
GROUP, STEPS = constexpr(plain.GROUP), constexpr(float(plain.STEPS))
LEAST_EXPONENT, MOST_EXPONENT = map(constexpr, plain.EXPONENTS)
LARGEST_BF16 = constexpr(torch.finfo(torch.bfloat16).max)
LARGEST, LOW = constexpr(reference.LARGEST), constexpr(reference.LOW)
CHUNK = constexpr(1024)
"""Values that a program packs: a few groups."""

WORDS = constexpr(128)
"""Words of indices that a program packs or unpacks, because a lane goes through the ones of its word."""

ROUNDER = constexpr(1.5 * 2**23)
"""A number whose sum with a float32 below 2**22 is rounded to an integer, to even."""


def encode(pairs: Tensor, blocks: Tensor, layouts: Tensor, packing: Packing) -> None:
    capacity, size = packing.capacity, len(blocks)
    programs = max(triton.cdiv(capacity, CHUNK.value), 1), triton.cdiv(packing.most_lows, WORDS.value)
    most = sum(programs) + triton.cdiv(packing.most_highs, WORDS.value)
    _encode(
        (most, size), pairs, blocks, layouts, pairs.shape[1], blocks.shape[1], capacity, *programs,
        _width(packing), len(layouts) == 1, capacity.bit_length(),
    )  # fmt: skip


def decode(blocks: Tensor, pairs: Tensor, layouts: Tensor, packing: Packing) -> None:
    capacity, size = packing.capacity, len(blocks)
    value_programs = triton.cdiv(capacity, CHUNK.value)
    programs = max(triton.cdiv(packing.most_highs, WORDS.value), 1)
    ones = torch.empty(size, programs, dtype=torch.int32, device=blocks.device)
    settings = layouts, pairs.shape[1], blocks.shape[1]
    _count_ones((programs, size), blocks, pairs, ones, *settings, programs, len(layouts) == 1)
    _decode(
        (value_programs + programs, size), blocks, pairs, ones, *settings, capacity, value_programs, programs,
        _width(packing), len(layouts) == 1,
    )  # fmt: skip


def _width(packing):
    return 8 * values.WIRES[packing.wire].itemsize


@triton.jit
def _ones_in(word):
    """How many bits of each word are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0xFF


@kernel("row", "words", "capacity", "value_programs", "low_programs")
def _encode(
    pairs, blocks, layouts, row, words, capacity, value_programs, low_programs,
    WIDTH: constexpr, SHARED: constexpr, HALVINGS: constexpr,
):  # fmt: skip
    """Pack some values, or make some words of low bits, or of the bit vector. Each word is written by one program.

    Of a block's own row in `layouts` all is true: the fields lie one behind the other, within the block.
    """
    program, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair, block, layout = pairs + number * row, blocks + number * words, layouts
    if not SHARED:
        layout = layouts + number * FIELDS
    room, low_bits, highs_at = tl.load(layout), tl.load(layout + 1), tl.load(layout + 2)
    scales_at, steps_at = tl.load(layout + 3), tl.load(layout + 4)
    count = tl.minimum(tl.load(pair), room)  # this rank's own; room <= capacity, so that slots below it are in the row
    if program < value_programs:
        if program == 0:
            _encode_head(pair, block, count, low_bits)
        _encode_values(pair + HEADER + capacity, block, program, count, room, scales_at, steps_at, WIDTH)
    elif program < value_programs + low_programs:
        number_words = highs_at - HEADER
        which = program - value_programs
        if low_bits == 0:
            _copy_indices(pair + HEADER, block + HEADER, which, count, number_words)
        else:
            _encode_lows(pair + HEADER, block + HEADER, which, count, number_words, low_bits)
    else:
        first = (program - value_programs - low_programs) * WORDS
        _encode_highs(pair + HEADER, block + highs_at, first, count, scales_at - highs_at, low_bits, HALVINGS)


@triton.jit
def _encode_head(pair, block, count, low_bits):
    wanted = tl.load(pair + 2).to(tl.int64) + (tl.load(pair + 3).to(tl.int64) << 31)
    note = tl.where(tl.load(pair + 1) != 0, 1, wanted << 2)
    tl.store(block, count)
    tl.store(block + 1, low_bits)
    tl.store(block + 2, (note & LOW).to(tl.int32))
    tl.store(block + 3, (note >> 31).to(tl.int32))


@triton.jit
def _encode_values(value, block, program, count, room, scales_at, steps_at, WIDTH: constexpr):
    """Pack some values, and put what rounding takes from them in their place."""
    slot = program * CHUNK + tl.arange(0, CHUNK)
    there = slot < count
    x = tl.load(value + slot, there, other=0).to(tl.float32, bitcast=True)
    if WIDTH == 16:
        near = tl.minimum(tl.maximum(x, -LARGEST_BF16), LARGEST_BF16)
        bits = tl.where(tl.abs(x) > LARGEST, x, near).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to even
        lost = x - (bits << 16).to(tl.float32, bitcast=True)
    else:
        groups = tl.reshape(x, (CHUNK // GROUP, GROUP))
        scale = _scale_of(tl.max(tl.abs(groups), 1))
        steps = tl.div_rn(groups, scale[:, None] + tl.zeros_like(groups))
        steps = tl.where(steps == steps, steps, 1.0)
        steps = tl.minimum(tl.maximum(steps, -STEPS), STEPS)
        steps = (steps + ROUNDER) - ROUNDER
        arrives = steps * scale[:, None]
        # no NaN beside an infinity
        arrives = tl.where((scale[:, None] > LARGEST) & (steps == 0), steps, arrives)
        lost = tl.reshape(groups - arrives, (CHUNK,))
        bits = tl.reshape(steps.to(tl.int32), (CHUNK,))
        group = program * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        known = tl.where(group * GROUP < count, scale.to(tl.int32, bitcast=True), 0)
        tl.store(block + scales_at + group, known, group < steps_at - scales_at)
    tl.store(value + slot, lost.to(tl.int32, bitcast=True), there)
    parts = tl.reshape(bits & ((1 << WIDTH) - 1), (CHUNK * WIDTH // 32, 32 // WIDTH))
    packed = tl.sum(parts << (tl.arange(0, 32 // WIDTH) * WIDTH)[None, :], 1)
    word = program * (CHUNK * WIDTH // 32) + tl.arange(0, CHUNK * WIDTH // 32)
    tl.store(block + steps_at + word, packed, word < (room * WIDTH + 31) // 32)


@triton.jit
def _scale_of(largest):
    """The least power of two of which STEPS reach the largest of a group; 1 where that is nothing."""
    ratio = tl.div_rn(largest, tl.full(largest.shape, STEPS, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (ratio >> 23) - 127 + ((ratio & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, LEAST_EXPONENT), MOST_EXPONENT)
    bits = tl.where(ratio == 0, 127, exponent + 127) << 23
    return tl.where(ratio >= 0x7F800000, 0x7F800000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _copy_indices(index, words, program, count, number_words):
    """Copy the indices: a block of so few pairs has them as they are."""
    word = program * WORDS + tl.arange(0, WORDS)
    tl.store(words + word, tl.load(index + word, word < count, other=0), word < number_words)


@triton.jit
def _encode_lows(index, lows, program, count, number_words, low_bits):
    """Gather the low bits of the indices that reach into each of these words."""
    lane = tl.arange(0, WORDS)
    word = program * WORDS + lane
    first_bit = program.to(tl.int64) * (WORDS * 32)
    first_slot = first_bit // low_bits
    first = ((first_bit - first_slot * low_bits).to(tl.int32) + lane * 32) // low_bits
    made = tl.zeros((WORDS,), tl.int32)
    near = 0
    while near < 31 // low_bits + 2:
        slot = first_slot + first + near
        shift = (slot * low_bits - (first_bit + lane * 32)).to(tl.int32)  # -31 and more
        there = (slot < count) & (shift < 32)
        low = tl.load(index + slot, there, other=0) & ((1 << low_bits) - 1)
        part = tl.where(shift < 0, low >> tl.maximum(-shift, 0), low << tl.minimum(tl.maximum(shift, 0), 31))
        made |= tl.where(there, part, 0)
        near += 1
    tl.store(lows + word, made, word < number_words)


@triton.jit
def _encode_highs(index, highs, first, count, number_words, low_bits, HALVINGS: constexpr):
    """Set the bits of the indices whose places lie in each of these words: the first of them is searched for."""
    word = first + tl.arange(0, WORDS)
    start = word.to(tl.int64) * 32
    low = tl.zeros((WORDS,), tl.int32)
    high = tl.zeros((WORDS,), tl.int32) + count
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        at = tl.load(index + middle, low < high, other=0)  # below high <= count
        less = (at >> low_bits).to(tl.int64) + middle < start
        low, high = tl.where(less & (low < high), middle + 1, low), tl.where(less | (low >= high), high, middle)
    made = tl.zeros((WORDS,), tl.int32)
    for near in range(32):
        slot = low + near
        there = slot < count
        place = (tl.load(index + slot, there, other=0) >> low_bits).to(tl.int64) + slot - start
        made |= tl.where(there & (place < 32), 1 << (place & 31).to(tl.int32), 0)
    tl.store(highs + word, made, word < number_words)


@kernel("row", "words", "programs")
def _count_ones(blocks, pairs, ones, layouts, row, words, programs, SHARED: constexpr):
    """Count the ones in some words of a bit vector; read the head of a block, which may be anything."""
    program, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair, block, layout = pairs + number * row, blocks + number * words, layouts
    if not SHARED:
        layout = layouts + number * FIELDS
    highs_at, scales_at = tl.load(layout + 2), tl.load(layout + 3)
    word = program * WORDS + tl.arange(0, WORDS)
    found = tl.load(block + highs_at + word, word < scales_at - highs_at, other=0)
    tl.store(ones + number * programs + program, tl.sum(_ones_in(found), 0))
    if program == 0:
        count, low, high = tl.load(block), tl.load(block + 2), tl.load(block + 3)
        wrong = (count < 0) | (count > tl.load(layout)) | (tl.load(block + 1) != tl.load(layout + 1))
        wrong = wrong | (low < 0) | (high < 0)
        note = tl.maximum(low, 0).to(tl.int64) | (tl.maximum(high, 0).to(tl.int64) << 31)
        tl.store(pair, count)
        tl.store(pair + 1, (wrong | ((note & 3) != 0)).to(tl.int32))
        tl.store(pair + 2, ((note >> 2) & LOW).to(tl.int32))
        tl.store(pair + 3, (note >> 33).to(tl.int32))


@kernel("row", "words", "capacity", "value_programs", "programs")
def _decode(
    blocks, pairs, ones, layouts, row, words, capacity, value_programs, programs, WIDTH: constexpr, SHARED: constexpr
):
    """Unpack some values, or the indices in some words of the bit vector; mark a block that cannot be.

    `count` is at most the room in the block, which is at most the capacity: slots below it lie in the row of pairs.
    """
    program, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair, block, layout = pairs + number * row, blocks + number * words, layouts
    if not SHARED:
        layout = layouts + number * FIELDS
    low_bits, highs_at = tl.load(layout + 1), tl.load(layout + 2)
    scales_at, steps_at = tl.load(layout + 3), tl.load(layout + 4)
    said = tl.load(block)
    count = tl.maximum(tl.minimum(said, tl.load(layout)), 0)
    if program < value_programs:
        if low_bits == 0:
            slot = program * CHUNK + tl.arange(0, CHUNK)
            tl.store(pair + HEADER + slot, tl.load(block + HEADER + slot, slot < count, other=0), slot < count)
        _decode_values(pair, block, program, count, capacity, scales_at, steps_at, WIDTH)
    elif low_bits != 0:
        which = program - value_programs
        before = _ones_before(ones + number * programs, which)
        word = which * WORDS + tl.arange(0, WORDS)
        found = tl.load(block + highs_at + word, word < scales_at - highs_at, other=0)
        total = before + tl.sum(_ones_in(found).to(tl.int64), 0)
        if (which == programs - 1) & (total != said):
            tl.store(pair + 1, 1)
        _decode_indices(
            pair + HEADER, block + HEADER, found, word, before, count, highs_at - HEADER, low_bits
        )  # fmt: skip


@triton.jit
def _decode_values(pair, block, program, count, capacity, scales_at, steps_at, WIDTH: constexpr):
    slot = program * CHUNK + tl.arange(0, CHUNK)
    there = slot < count
    word = tl.load(block + steps_at + slot // (32 // WIDTH), there, other=0)
    shifted = word << (32 - WIDTH - slot % (32 // WIDTH) * WIDTH)  # its sign is the word's then
    if WIDTH == 16:
        x = (shifted & ~0xFFFF).to(tl.float32, bitcast=True)
        wrong = there & (((shifted >> 23) & 0xFF) == 0xFF)
    else:
        steps = (shifted >> (32 - WIDTH)).to(tl.float32)
        bits = tl.load(block + scales_at + slot // GROUP, there, other=0x3F800000)
        scale = bits.to(tl.float32, bitcast=True)
        x = tl.where((bits == 0x7F800000) & (steps == 0), steps, steps * scale)
        # below the least scale lie the negative ones, too; above infinity lies NaN
        too_small = (bits < ((LEAST_EXPONENT + 127) << 23)) | (bits > 0x7F800000)
        wrong = there & (too_small | ((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000))
    tl.store(pair + HEADER + capacity + slot, x.to(tl.int32, bitcast=True), there)
    if tl.max(wrong.to(tl.int32), 0) != 0:
        tl.store(pair + 1, 1)


@triton.jit
def _ones_before(ones, program):
    """How many ones are in the words of the programs before this one."""
    at = tl.arange(0, CHUNK)
    sums = tl.zeros((CHUNK,), tl.int64)
    left = program
    while left > 0:
        sums += tl.load(ones + at, at < program, other=0)
        at += CHUNK
        left -= CHUNK
    return tl.sum(sums, 0)


@triton.jit
def _decode_indices(index, lows, found, word, before, count, number_words, low_bits):
    """Write the indices whose ones are in these words, one of each word at a time."""
    ones = _ones_in(found)
    slot = before + (tl.cumsum(ones, 0) - ones)
    left = tl.max(ones, 0)
    mask = (1 << low_bits) - 1
    while left > 0:
        there = (found != 0) & (slot < count)
        place = word.to(tl.int64) * 32 + _ones_in((found & -found) - 1)
        bit = slot * low_bits
        at, shift = bit >> 5, bit & 31
        near = tl.load(lows + at, there & (at < number_words), other=0).to(tl.int64) & 0xFFFFFFFF
        far = tl.load(lows + at + 1, there & (at + 1 < number_words), other=0).to(tl.int64) & 0xFFFFFFFF
        low = ((near | (far << 32)) >> shift).to(tl.int32) & mask
        high = place - slot
        whole = ((high << low_bits) | low).to(tl.int32)
        tl.store(index + slot, tl.where(high > (LOW >> low_bits), -1, whole), there)
        found &= found - 1
        slot += 1
        left -= 1
