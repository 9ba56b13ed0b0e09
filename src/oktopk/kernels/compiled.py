"""The kernels for CPUs, compiled by numba: each reads memory once, and makes nothing that it does not return.

At 27.6 M elements on one core `accumulate` takes as long as the addition alone (10 ms), `accumulate_seeing` 14 ms,
`at_least` 7, `kth_largest` 25. One thread: the ranks of a machine share its cores already. What was compiled is kept on
disk for the next process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from oktopk.kernels import reference

NAME = "cpu (numba)"
LINE, CHUNK = 8, 128
"""Elements that are passed over together where none of them reaches the threshold; elements that are compared first.

A comparison is a byte, so that a line of them is one 64-bit word: zero, for most.
"""

BYTE_BITS = 8
BINS_LOG2 = 12
LIKELY = 16
"""At most one element in so many is expected to reach its threshold; where more do, a second pass makes room."""


def accumulate(grad: Tensor, held: Tensor, out: Tensor, scale: float = 1.0, decay: float = 1.0) -> int:
    """Write decay * held + scale * grad into `out`; return the index of its first NaN or Inf, or -1."""
    if grad.dtype != out.dtype or scale != 1 or decay != 1:
        return reference.accumulate(grad, held, out, scale, decay)
    finite = _add(grad.numpy(), held.numpy(), out.numpy())
    return -1 if finite else reference.first_nonfinite(out)


def accumulate_seeing(grad: Tensor, held: Tensor, out: Tensor, floor: float) -> tuple[int, Tensor, Tensor]:
    """Write held + grad into `out`; return what `accumulate` would, and where |out| >= floor, and what is there."""
    if grad.dtype != out.dtype:
        return reference.accumulate_seeing(grad, held, out, floor)
    total = out.numpy()
    index, value = np.empty(len(total) // LIKELY + LINE, np.int64), np.empty(len(total) // LIKELY + LINE, total.dtype)
    least = total.dtype.type(reference.held_by(out.dtype, floor))
    bits, key, magnitude, _ = _ordered(total, least)
    count = _add_seeing(grad.numpy(), held.numpy(), total, bits, key, magnitude, index, value)
    if count < len(index) - LINE and np.isfinite(value[:count]).all():
        return -1, torch.from_numpy(index[:count]), torch.from_numpy(value[:count])
    where = at_least(out, [0, len(total)], [floor])  # there may have been no room for all of them, or NaN among them
    return reference.first_nonfinite(out), where, out.index_select(0, where)


def at_least(acc: Tensor, bounds: list[int], thresholds: list[float]) -> Tensor:
    """Return the sorted indices where |acc| >= the threshold of its segment, zeros never."""
    array = acc.numpy()
    for room in (len(array) // LIKELY, len(array)):
        index, count = np.empty(room + LINE, np.int64), 0
        for low, high, threshold in zip(bounds, bounds[1:], thresholds, strict=False):
            floor = array.dtype.type(reference.held_by(acc.dtype, threshold))
            count = int(_at_least(*_ordered(array[low:high], floor), index, count, low))
            if count > room:
                break
        else:
            return torch.from_numpy(index[:count])
    raise AssertionError("there is room for every element")


def kth_largest(score: Tensor, k: int) -> float:
    """Return the k-th largest of the scores, which are not negative; 1 <= k <= len(score).

    A histogram of their leading bits tells which of them to sort: a few in a hundred.
    """
    array = score.numpy()
    bits, *_ = _ordered(array, array.dtype.type(0))
    shift = bits.dtype.itemsize * BYTE_BITS - 1 - BINS_LOG2
    counts = np.zeros(1 << BINS_LOG2, np.int64)
    _count(bits, shift, counts)
    above = np.cumsum(counts[::-1])
    place = int(np.searchsorted(above, k))
    bin_, rank = len(counts) - 1 - place, k - (int(above[place - 1]) if place else 0)
    members = np.empty(counts[bin_], array.dtype)
    _members(bits, array, shift, bin_, members)
    return float(np.partition(members, -rank)[-rank])


def is_increasing(index: Tensor) -> bool:
    """Whether every index is larger than the one before it."""
    return bool(_is_increasing(index.numpy()))


def merge(index: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of sparse vectors, added in their order: sorted indices, and their values."""
    if len(index) == 1:
        return index[0], value[0]
    at, total = index[0].numpy(), value[0].numpy()
    for i, v in zip(index[1:], value[1:], strict=True):
        where, what = np.empty(len(at) + len(i), np.int64), np.empty(len(at) + len(i), total.dtype)
        count = _merge(at, total, i.numpy(), v.numpy(), where, what)
        at, total = where[:count], what[:count]
    return torch.from_numpy(at), torch.from_numpy(total)


def shared(held: Tensor, index: Tensor) -> Tensor:
    """Return the places, in `index`, of what `held` has, too; both are sorted."""
    places = np.empty(len(index) + 1, np.int64)
    return torch.from_numpy(places[: _shared(held.numpy(), index.numpy(), places)])


def pack(index: Tensor, width: int) -> tuple[Tensor, int]:
    """Return the gaps between sorted indices in slots of 8, 12 or 16 bits, as bytes, and how many slots they take."""
    array, marker = index.numpy(), reference.marker_of(width)
    most = len(array) + (int(array[-1]) // marker if len(array) else 0)
    packed = np.empty(-(-most * width // BYTE_BITS) + 1, np.uint8)
    slots = int(_pack(array, width, marker, packed))
    return torch.from_numpy(packed[: -(-slots * width // BYTE_BITS)]), slots


def unpack(packed: Tensor, num_slots: int, width: int) -> Tensor:
    """Return the indices that were packed into so many slots."""
    index = np.empty(num_slots + 1, np.int64)
    count = _unpack(packed.numpy(), num_slots, width, reference.marker_of(width), index)
    return torch.from_numpy(index[:count])


def _ordered(array: np.ndarray[Any, Any], floor: Any) -> tuple[Any, ...]:
    """Return the array and a floor as integers: without their sign bit these are in the order of the magnitudes.

    And that sign bit's complement, and the integer of infinity: only a NaN is above it.
    """
    kind = np.dtype(f"u{array.dtype.itemsize}").type
    infinity = array.dtype.type(np.inf)
    return array.view(kind), floor.view(kind), kind(np.iinfo(kind).max >> 1), infinity.view(kind)


def _compiled(fn: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, cache=True)(fn)
    except RuntimeError:  # there is nowhere to keep it: then each process compiles it for itself
        return njit(nogil=True)(fn)


@_compiled
def _add(grad: Any, held: Any, out: Any) -> Any:
    """Add, and return whether all of the sum is finite."""
    infinite = False
    for i in range(len(out)):
        x = grad[i] + held[i]
        out[i] = x
        infinite |= not (abs(x) < np.inf)
    return not infinite


@_compiled
def _add_seeing(grad: Any, held: Any, out: Any, bits: Any, floor: Any, magnitude: Any, index: Any, value: Any) -> Any:
    """Add, and note what reaches the floor, or is a NaN; return how many do, or that there was no room.

    Chunk by chunk, so that what was added is looked at while it is in the nearest cache.
    """
    count, room = np.uintp(0), np.uintp(len(index) - LINE)
    reaches = np.zeros(CHUNK, np.uint8)
    lines = reaches.view(np.uint64)
    whole = len(out) - len(out) % CHUNK
    for chunk in range(0, whole, CHUNK):
        for i in range(chunk, chunk + CHUNK):
            out[i] = grad[i] + held[i]
        for i in range(CHUNK):
            reaches[i] = np.uint8((bits[chunk + i] & magnitude) >= floor)
        for line in range(CHUNK // LINE):
            if lines[line]:
                count = min(count, room)
                for i in range(line * LINE, line * LINE + LINE):
                    index[count] = chunk + i
                    value[count] = out[chunk + i]
                    count += np.uintp(reaches[i])
    for i in range(whole, len(out)):
        out[i] = grad[i] + held[i]
        count = min(count, room)
        index[count] = i
        value[count] = out[i]
        count += np.uintp((bits[i] & magnitude) >= floor)
    return count


@_compiled
def _at_least(bits: Any, floor: Any, magnitude: Any, infinity: Any, index: Any, count: Any, start: Any) -> Any:
    """Append the places of what reaches the floor to `index`; return how many are there, too many if there is no room.

    Unsigned counters: for signed ones every access would ask whether it counts from the end.
    """
    count, room = np.uintp(count), np.uintp(len(index) - LINE)
    reaches = np.zeros(CHUNK, np.uint8)
    lines = reaches.view(np.uint64)
    whole = len(bits) - len(bits) % CHUNK
    for chunk in range(0, whole, CHUNK):
        for i in range(CHUNK):
            reaches[i] = np.uint8((bits[chunk + i] & magnitude) >= floor)
        for line in range(CHUNK // LINE):
            if lines[line]:
                if count > room:
                    return count
                for i in range(chunk + line * LINE, chunk + line * LINE + LINE):
                    index[count] = start + i
                    count += np.uintp(floor <= bits[i] & magnitude <= infinity)
    for i in range(whole, len(bits)):
        if count > room:
            return count
        index[count] = start + i
        count += np.uintp(floor <= bits[i] & magnitude <= infinity)
    return count


@_compiled
def _count(bits: Any, shift: Any, counts: Any) -> None:
    for i in range(len(bits)):
        counts[bits[i] >> shift] += 1


@_compiled
def _members(bits: Any, array: Any, shift: Any, wanted: Any, members: Any) -> None:
    count = 0
    for i in range(len(bits)):
        if bits[i] >> shift == wanted:
            members[count] = array[i]
            count += 1


@_compiled
def _is_increasing(index: Any) -> Any:
    falls = False
    for i in range(1, len(index)):
        falls |= index[i] <= index[i - 1]
    return not falls


@_compiled
def _merge(index: Any, value: Any, other_index: Any, other_value: Any, where: Any, what: Any) -> Any:
    """Write the sum of two sparse vectors into `where` and `what`; return its length."""
    i, j, count = 0, 0, 0
    while i < len(index) and j < len(other_index):
        if index[i] < other_index[j]:
            where[count], what[count] = index[i], value[i]
            i += 1
        elif other_index[j] < index[i]:
            where[count], what[count] = other_index[j], other_value[j]
            j += 1
        else:
            where[count], what[count] = index[i], value[i] + other_value[j]
            i, j = i + 1, j + 1
        count += 1
    rest = count + len(index) - i
    where[count:rest], what[count:rest] = index[i:], value[i:]
    end = rest + len(other_index) - j
    where[rest:end], what[rest:end] = other_index[j:], other_value[j:]
    return end


@_compiled
def _shared(held: Any, index: Any, places: Any) -> Any:
    """Walk along both, without a branch that depends on which is ahead: it could not be predicted."""
    i, j, count = 0, 0, 0
    while i < len(index) and j < len(held):
        ours, theirs = index[i], held[j]
        places[count] = i
        count += ours == theirs
        i += ours <= theirs
        j += theirs <= ours
    return count


@_compiled
def _pack(index: Any, width: Any, marker: Any, packed: Any) -> Any:
    """Write each gap's slots, lowest bits first; return how many slots there are."""
    bits, held, at, slots, last = np.uint64(0), 0, 0, 0, 0
    for i in range(len(index)):
        gap = index[i] - last
        last = index[i]
        while True:
            slot = min(gap, marker)
            bits |= np.uint64(slot) << np.uint64(held)
            held += width
            slots += 1
            while held >= BYTE_BITS:
                packed[at] = np.uint8(bits & np.uint64(255))
                bits >>= np.uint64(BYTE_BITS)
                at, held = at + 1, held - BYTE_BITS
            if slot < marker:
                break
            gap -= marker
    packed[at] = np.uint8(bits)
    return slots


@_compiled
def _unpack(packed: Any, num_slots: Any, width: Any, marker: Any, index: Any) -> Any:
    """Write the index that each slot ends at, over the last one if that was none; return how many there are."""
    bits, held, at, count, place = np.uint64(0), 0, 0, 0, 0
    for _ in range(num_slots):
        while held < width:
            bits |= np.uint64(packed[at]) << np.uint64(held)
            at, held = at + 1, held + BYTE_BITS
        slot: Any = np.int64(bits & np.uint64(marker))
        bits >>= np.uint64(width)
        held -= width
        place += slot
        index[count] = place
        count += slot != marker
    return count
