"""The kernels for CPUs, compiled by numba: each reads memory once and makes no temporary.

At 27.6 M elements on one core `accumulate` and `accumulate_above` take as long as the addition alone. They use one
thread, because the ranks of a machine share its cores. Compiled code is kept on disk for the next process.

Numba checks no bounds unless NUMBA_BOUNDSCHECK=1, under which the tests run all of it. So the functions that are called
from Python check lengths and edges, and a comment beside each data-dependent index says why it is inside.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# The compiled functions have no types: numba finds them by the arguments of each call.

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from oktopk.errors import MalformedError
from oktopk.kernels import reference
from oktopk.kernels.reference import EXPONENTS, GROUP, REFERENCE, STEPS, Ends, Floors, Kernels, Noted

CHUNK = 128
"""Elements that are added before they are compared: two words of comparisons, a bit for each element."""

BYTE_BITS = 8
HALF_BITS, LOW_HALF = 32, np.uint64(0xFFFFFFFF)  # of a 64-bit word
STREAM_BYTES = 32  # a vector register's
BINS_LOG2 = 12
WINDOW, WORD_BITS = 4096, 64
"""Elements whose sums are made together, because they take a page or two of the nearest cache."""

LIKELY = 16
"""Elements for each place that is allocated for candidates, because few reach their threshold; more take two passes."""


class NumbaKernels(Kernels):
    """The compiled kernels; what they are not made for goes to the reference's."""

    name = "cpu (numba)"

    def accumulate(self, grad: Tensor, held: Tensor, out: Tensor, scale: float = 1.0, decay: float = 1.0) -> int:
        if grad.dtype != out.dtype or scale != 1 or decay != 1:
            return REFERENCE.accumulate(grad, held, out, scale, decay)
        _check_alike(grad, held, out)
        finite = _add(grad.numpy(), held.numpy(), out.numpy())
        return -1 if finite else reference.first_nonfinite(out)

    def accumulate_above(
        self, grad: Tensor, held: Tensor, out: Tensor, bounds: Ends, floors: Floors, most: int
    ) -> tuple[int, Noted]:
        if grad.dtype != out.dtype or not (grad.is_contiguous() and held.is_contiguous() and _can_stream(out)):
            return REFERENCE.accumulate_above(grad, held, out, bounds, floors, most)
        _check_alike(grad, held, out)
        total, edges = out.numpy(), _edges(bounds, floors, len(out))
        room = min(most, len(total)) + 1 + WORD_BITS  # one more, so that too many show
        index, value = np.empty(room, np.int64), np.empty(room, total.dtype)
        _, keys, magnitude, _ = _ordered(total, reference.held_by(out.dtype, floors))
        sums = np.empty(CHUNK, total.dtype)
        where = (grad.numpy(), held.numpy(), total, sums, sums.view(keys.dtype), _lead(total))
        count = int(_add_seeing(*where, edges, keys, magnitude, index, value))
        if count > most:
            return -1 if reference.is_finite(out) else reference.first_nonfinite(out), None
        if np.isfinite(value[:count]).all():
            return -1, (torch.from_numpy(index[:count]), torch.from_numpy(value[:count]))
        found = self.at_least(out, bounds, floors)  # without the NaN among them
        return reference.first_nonfinite(out), (found, out.index_select(0, found))

    def at_least(self, acc: Tensor, bounds: Ends, thresholds: Floors) -> Tensor:
        array, edges = acc.numpy(), _edges(bounds, thresholds, len(acc))
        ordered = _ordered(array, reference.held_by(acc.dtype, thresholds))
        for room in (len(array) // LIKELY, len(array)):
            index = np.empty(room + WORD_BITS, np.int64)
            count = int(_at_least(*ordered, edges, index))
            if count <= room:
                return torch.from_numpy(index[:count])
        raise AssertionError("there is room for every element")

    def mean_squares(self, acc: Tensor, held: Tensor, bounds: Ends) -> Tensor:
        return torch.from_numpy(_mean_squares(acc.numpy(), held.numpy(), np.asarray(bounds, np.int64)))

    def kth_largest(self, score: Tensor, k: int) -> float:
        reference.check_k(k, len(score))
        array = score.numpy()
        bits, _, _, infinity = _ordered(array, array.dtype.type(0))
        shift = bits.dtype.itemsize * BYTE_BITS - 1 - BINS_LOG2
        counts = np.zeros(1 << BINS_LOG2, np.int64)
        _count(bits, shift, counts)
        if counts[int(infinity) >> shift :].any() and np.isnan(array).any():
            raise MalformedError(reference.NO_SCORE)
        above = np.cumsum(counts[::-1])
        place = int(np.searchsorted(above, k))
        bin_, rank = len(counts) - 1 - place, k - (int(above[place - 1]) if place else 0)
        members = np.empty(counts[bin_], array.dtype)
        _members(bits, array, shift, bin_, len(counts) - 1, members)
        return float(np.partition(members, -rank)[-rank])

    def first_at_least(self, score: Tensor, threshold: float, k: int) -> Tensor:
        bits, floor, magnitude, _ = _ordered(score.numpy(), reference.held_by(score.dtype, [threshold]))
        index = np.empty(k + 1, np.int64)
        count = int(_first_at_least(bits, floor[0], magnitude, index))
        if count > k:
            raise MalformedError(f"{count} scores are above {threshold:g}, which is not the {k}-th largest")
        return torch.from_numpy(index[:count])

    def is_increasing(self, index: Tensor) -> bool:
        return bool(_is_increasing(index.numpy()))

    def merge(self, index: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if [len(i) for i in index] != [len(v) for v in value]:
            raise MalformedError("there must be as many values as indices")
        if len(index) == 1:
            return index[0], value[0]
        ends = np.cumsum([0, *map(len, index)])
        where, what = np.empty(ends[-1], np.int64), np.empty(ends[-1], value[0].numpy().dtype)
        sums = np.full(WINDOW, -0.0, what.dtype)  # which changes nothing that is added to it
        count = _merge(torch.cat(list(index)).numpy(), torch.cat(list(value)).numpy(), ends, sums, where, what)
        return torch.from_numpy(where[:count]), torch.from_numpy(what[:count])

    def shared(self, held: Tensor, index: Tensor) -> Tensor:
        places = np.empty(len(index) + 1, np.int64)
        return torch.from_numpy(places[: _shared(held.numpy(), index.numpy(), places)])

    def put_(self, out: Tensor, index: Tensor, value: Tensor) -> None:
        _check_placed(int(_put(index.numpy(), value.numpy(), out.numpy())), index, value)

    def add_(self, out: Tensor, index: Tensor, value: Tensor) -> None:
        _check_placed(int(_put_sum(index.numpy(), value.numpy(), out.numpy())), index, value)

    def spread(self, index: Tensor, value: Tensor, out: Tensor, start: int = 0) -> None:
        if out.dtype not in (torch.float32, torch.float64) or not _can_stream(out):
            REFERENCE.spread(index, value, out, start)  # numpy has no bfloat16
            return
        if len(index) != len(value):
            raise MalformedError("there must be as many values as indices")
        where, result = index.numpy(), out.numpy()
        if len(where) and not (_is_increasing(where) and where[0] >= start and where[-1] < start + len(result)):
            raise MalformedError(f"indices must be strictly increasing, and within {start}..{start + len(result) - 1}")
        _spread(where, value.numpy(), start, result, np.zeros(WINDOW, result.dtype), _lead(result))

    def pack_(self, index: Tensor, start: int, low_bits: int, lows: Tensor, highs: Tensor) -> None:
        array = index.numpy()
        if not len(array):
            return
        if array[0] < start or not _is_increasing(array):
            raise MalformedError(reference.NOT_PACKABLE)
        reference.check_room(len(array), int(array[-1]) - start, low_bits, lows, highs)
        _pack(array, start, low_bits, lows.numpy().view(np.uint32), highs.numpy().view(np.uint32))

    def unpack(self, lows: Tensor, highs: Tensor, start: int, low_bits: int, count: int) -> Tensor:
        reference.check_lows(lows, low_bits, count)
        index = np.empty(count, np.int64)
        words = lows.numpy().view(np.uint32), highs.numpy().view(np.uint32)
        reference.check_ones(int(_unpack(*words, start, low_bits, index)), count)
        return torch.from_numpy(index)

    def quantise(self, value: Tensor) -> tuple[Tensor, Tensor]:
        array = value.numpy()
        steps, scale = np.empty(len(array), np.int8), np.empty(-(-len(array) // GROUP), np.float32)
        _quantise(array, array.view(np.uint32), steps, scale, scale.view(np.uint32))
        return torch.from_numpy(steps), torch.from_numpy(scale)

    def scaled(self, steps: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype not in (torch.float32, torch.float64):
            return REFERENCE.scaled(steps, scale, dtype)
        if len(scale) != -(-len(steps) // GROUP):
            raise MalformedError(f"{len(scale)} scales are not those of {len(steps)} values")
        value = np.empty(len(steps), np.float32 if dtype == torch.float32 else np.float64)
        _scaled(steps.numpy(), scale.numpy(), value)
        return torch.from_numpy(value)


def _check_placed(done: int, index: Tensor, value: Tensor) -> None:
    if not done == len(index) == len(value):
        raise MalformedError(f"{len(value)} values have {len(index)} indices, of which number {done} is not within")


def _check_alike(grad: Tensor, held: Tensor, out: Tensor) -> None:
    if not len(grad) == len(held) == len(out):
        raise MalformedError(f"{len(out)} sums cannot be made of {len(grad)} and {len(held)} numbers")


def _edges(bounds: Ends, floors: Floors, numel: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the bounds of the segments as an array, if they are within a vector of `numel`."""
    edges = np.asarray(bounds, np.int64)
    if len(edges) != len(floors) + 1 or edges[0] < 0 or edges[-1] > numel or (edges[1:] < edges[:-1]).any():
        raise MalformedError(f"{len(floors)} segments of {numel} elements need as many bounds and one, none falling")
    return edges


def _can_stream(out: Tensor) -> bool:
    """Whether `out` is contiguous and aligned to its elements, as `_stream` needs it."""
    return out.is_contiguous() and out.data_ptr() % out.element_size() == 0


def _ordered(array: np.ndarray[Any, Any], floors: Any) -> tuple[Any, ...]:
    """Return array and floors as integers, which without their sign bit are ordered like the magnitudes.

    Return the mask without the sign bit and the integer of infinity as well: only a NaN is above that one.
    """
    array = np.ascontiguousarray(array)  # as `_reaching` needs it
    kind = np.dtype(f"u{array.dtype.itemsize}").type
    infinity = array.dtype.type(np.inf)
    return array.view(kind), floors.view(kind), kind(np.iinfo(kind).max >> 1), infinity.view(kind)


def _lead(array: np.ndarray[Any, Any]) -> int:
    """Return the number of elements before the first one that is aligned to a vector register."""
    return -array.ctypes.data % STREAM_BYTES // array.itemsize


def _compiled(fn: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, cache=True)(fn)
    except RuntimeError:  # no writable folder: each process compiles for itself
        return njit(nogil=True)(fn)


@_compiled
def _add(grad, held, out):
    """Add; return whether all of the sum is finite. All three are of one length: `_check_alike`."""
    infinite = False
    for i in range(len(out)):
        x = grad[i] + held[i]
        out[i] = x
        infinite |= not (abs(x) < np.inf)
    return not infinite


def _past_the_cache(_: Any, out: Any, i: Any, source: Any, j: Any) -> Any:  # noqa: ARG001
    """Store 32 bytes of `source` from element j on at element i of `out`, past the cache.

    A plain store first reads the line it writes to: a quarter of the bytes that a sum of two vectors moves.
    Not even NUMBA_BOUNDSCHECK=1 checks this store. The caller proves that 32 bytes are there on both sides, and that
    element i of `out` lies at a multiple of 32 bytes, without which the processor faults.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, origin, first = arguments
        to, _, start, _ = signature.args
        lanes = ir.VectorType(context.get_value_type(to.dtype), STREAM_BYTES * BYTE_BITS // to.dtype.bitwidth)

        def at(kind: Any, array: Any, element: Any) -> Any:
            data = context.make_array(kind)(context, builder, array).data
            return builder.bitcast(builder.gep(data, [element]), lanes.as_pointer())

        value = builder.load(at(start, origin, first), align=to.dtype.bitwidth // BYTE_BITS)
        store = builder.store(value, at(to, target, place), align=STREAM_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(out, types.intp, source, types.intp), emit


_stream: Any = intrinsic(_past_the_cache)


def _comparisons(_: Any, bits: Any, i: Any, magnitude: Any, floor: Any) -> Any:  # noqa: ARG001
    """Return a bit for each of the WORD_BITS elements of `bits` from number i on: whether it, masked, is >= `floor`.

    Not even NUMBA_BOUNDSCHECK=1 checks this load. The caller proves that the elements are there, side by side.
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, first, mask, limit = arguments
        kind = signature.args[0]
        lanes = ir.VectorType(context.get_value_type(kind.dtype), WORD_BITS)
        everywhere = ir.Constant(ir.VectorType(ir.IntType(HALF_BITS), WORD_BITS), [0] * WORD_BITS)

        def splat(number: Any) -> Any:
            nothing = ir.Constant(lanes, ir.Undefined)
            one = builder.insert_element(nothing, number, ir.Constant(ir.IntType(HALF_BITS), 0))
            return builder.shuffle_vector(one, nothing, everywhere)

        data = context.make_array(kind)(context, builder, array).data
        place = builder.bitcast(builder.gep(data, [first]), lanes.as_pointer())
        masked = builder.and_(builder.load(place, align=kind.dtype.bitwidth // BYTE_BITS), splat(mask))
        return builder.bitcast(builder.icmp_unsigned(">=", masked, splat(limit)), ir.IntType(WORD_BITS))

    return types.uint64(bits, types.intp, bits.dtype, bits.dtype), emit


_reaching: Any = intrinsic(_comparisons)


def _trailing_zeros(_: Any, word: Any) -> Any:  # noqa: ARG001
    """Return the number of trailing zeros of a word that is not zero: one instruction, no loop."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), emit


_lowest_bit: Any = intrinsic(_trailing_zeros)


@_compiled
def _add_seeing(grad, held, out, sums, bits, lead, edges, floors, magnitude, index, value):
    """Add; write the elements that reach their segment's floor, and NaN, into `index` and `value`; return the count.

    A count of len(index) - WORD_BITS or more says that there were as many or more.
    """
    count = np.uintp(0)
    width = STREAM_BYTES // sums.itemsize
    for segment in range(len(floors)):
        low, high, floor = edges[segment], edges[segment + 1], floors[segment]  # `_edges`: 0 <= low <= high <= len
        first = min(low + (lead - low) % width, high)  # the first aligned one; low <= first <= high
        last = high - (high - first) % CHUNK
        count = _add_few(grad, held, out, sums, bits, floor, magnitude, index, value, count, low, first)
        count = _add_chunks(grad, held, out, sums, bits, floor, magnitude, index, value, count, first, last)
        count = _add_few(grad, held, out, sums, bits, floor, magnitude, index, value, count, last, high)
    return count


@_compiled
def _add_chunks(grad, held, out, sums, bits, floor, magnitude, index, value, count, first, last):
    """Do so for the whole chunks of first..last, each while it is in the nearest cache as `sums` and their `bits`.

    `first` is aligned, and a chunk is as long as `sums`, a multiple of 32 bytes: `_stream` is in bounds and aligned.
    """
    room = np.uintp(len(index) - WORD_BITS)
    for chunk in range(first, last, CHUNK):
        ours, theirs = grad[chunk : chunk + CHUNK], held[chunk : chunk + CHUNK]
        for i in range(CHUNK):
            sums[i] = ours[i] + theirs[i]
        for i in range(0, CHUNK, STREAM_BYTES // sums.itemsize):
            _stream(out, chunk + i, sums, i)
        for word in range(0, CHUNK, WORD_BITS):  # of `bits`, which are CHUNK
            reaches = _reaching(bits, word, magnitude, floor)
            count = min(count, room)  # there are room + WORD_BITS places, and at most WORD_BITS bits
            while reaches:
                place = np.uintp(word) + np.uintp(_lowest_bit(reaches))
                index[count] = chunk + np.int64(place)
                value[count] = sums[place]
                count += np.uintp(1)
                reaches &= reaches - np.uint64(1)
    return count


@_compiled
def _add_few(grad, held, out, sums, bits, floor, magnitude, index, value, count, first, last):
    """Do so for the elements before the first whole chunk of a segment and behind its last."""
    room = np.uintp(len(index) - WORD_BITS)
    for i in range(first, last):
        sums[0] = grad[i] + held[i]
        out[i] = sums[0]
        count = min(count, room)  # there are room + WORD_BITS places
        index[count] = i
        value[count] = sums[0]
        count += np.uintp((bits[0] & magnitude) >= floor)
    return count


@_compiled
def _at_least(bits, floors, magnitude, infinity, edges, index):
    """Write the places that reach their segment's floor into `index`; return the count, more than the room if short."""
    count, room = np.uintp(0), np.uintp(len(index) - WORD_BITS)
    for segment in range(len(floors)):
        low = edges[segment]  # `_edges`: 0 <= low <= high <= len
        part = bits[low : edges[segment + 1]]
        count = _at_least_in(part, floors[segment], magnitude, infinity, index, count, low)
        if count > room:
            break
    return count


@_compiled
def _at_least_in(bits, floor, magnitude, infinity, index, count, start):
    """Append the places of one segment that reach its floor. `index` has room + WORD_BITS places.

    Counters are unsigned, because for signed ones every access would ask whether it counts from the end.
    """
    room = np.uintp(len(index) - WORD_BITS)
    whole = len(bits) - len(bits) % WORD_BITS
    for word in range(0, whole, WORD_BITS):
        reaches = _reaching(bits, word, magnitude, floor)
        if count > room:  # else there are places from `count` on for WORD_BITS bits
            return count
        while reaches:
            place = np.uintp(word) + np.uintp(_lowest_bit(reaches))
            index[count] = start + np.int64(place)
            count += np.uintp(bits[place] & magnitude <= infinity)
            reaches &= reaches - np.uint64(1)
    for i in range(whole, len(bits)):
        if count > room:
            return count
        index[count] = start + i
        count += np.uintp(floor <= bits[i] & magnitude <= infinity)
    return count


@_compiled
def _mean_squares(acc, held, edges):
    means = np.zeros(len(edges) - 1)
    for segment in range(len(means)):
        ours, theirs = acc[edges[segment] : edges[segment + 1]], held[edges[segment] : edges[segment + 1]]
        for chunk in range(0, len(ours), CHUNK):
            total = 0.0
            after, before = ours[chunk : chunk + CHUNK], theirs[chunk : chunk + CHUNK]
            for i in range(len(after)):
                difference = np.float64(after[i]) - np.float64(before[i])
                total += difference * difference
            means[segment] += total
        means[segment] /= max(len(ours), 1)
    return means


@_compiled
def _count(bits, shift, counts):
    last = np.uintp(len(counts) - 1)  # all ones: it cuts the sign bit off, which -0.0 has, and many a NaN
    for i in range(len(bits)):
        counts[np.uintp(bits[i] >> shift) & last] += 1


@_compiled
def _members(bits, array, shift, wanted, last, members):
    """Copy the members of a bin: `_count` counted as many, by the same bits, as `members` has room for."""
    count = 0
    for i in range(len(bits)):
        if np.uintp(bits[i] >> shift) & np.uintp(last) == np.uintp(wanted):
            members[count] = array[i]
            count += 1


@_compiled
def _first_at_least(bits, floor, magnitude, index):
    """Write the places above `floor`, and the first of those that equal it, up to k = len(index) - 1; return the count.

    A count above k says that more are above `floor`, and nothing was written. Otherwise count <= k at every place.
    """
    above, count = 0, np.uintp(0)
    for i in range(len(bits)):
        above += bits[i] > floor
    ties = len(index) - 1 - above
    if ties < 0:
        return np.uintp(above)
    whole = len(bits) - len(bits) % WORD_BITS
    for word in range(0, len(bits), WORD_BITS):
        reaches = np.uint64(0)
        if word < whole:
            reaches = _reaching(bits, word, magnitude, floor)
        else:
            for i in range(whole, len(bits)):
                reaches |= np.uint64(bits[i] >= floor) << np.uint64(i - whole)
        while reaches:
            place = np.uintp(word) + np.uintp(_lowest_bit(reaches))
            is_tie = bits[place] == floor
            index[count] = np.int64(place)
            count += np.uintp(not is_tie or ties > 0)
            ties -= is_tie
            reaches &= reaches - np.uint64(1)
    return count


@_compiled
def _is_increasing(index):
    falls = False
    for i in range(1, len(index)):
        falls |= index[i] <= index[i - 1]
    return not falls


@_compiled
def _merge(index, value, ends, sums, where, what):
    """Write the sum of the vectors that lie one after another, cut at `ends`, into `where` and `what`.

    The sums of a window lie in the nearest cache, with a bit for each that is there. Each place written has at least
    one pair, so that `where` is as long as `index`.
    """
    at, count = ends[:-1].copy(), np.uintp(0)
    held = np.zeros(WINDOW // WORD_BITS, np.uint64)
    while True:
        start = np.int64(np.iinfo(np.int64).max)
        for part in range(len(at)):
            if at[part] < ends[part + 1]:
                start = min(start, index[at[part]])
        if start == np.iinfo(np.int64).max:
            return count
        for part in range(len(at)):
            i, end = np.uintp(at[part]), np.uintp(ends[part + 1])
            while i < end:
                place = np.uintp(index[i] - start)  # unsigned: an index before `start`, out of order, is beyond, too
                if place >= np.uintp(WINDOW):
                    break
                sums[place] += value[i]
                held[place // np.uintp(WORD_BITS)] |= np.uint64(1) << np.uint64(place % np.uintp(WORD_BITS))
                i += np.uintp(1)
            at[part] = i
        for word in range(len(held)):
            bits, held[word] = held[word], 0
            while bits:
                place = np.uintp(word * WORD_BITS) + np.uintp(_lowest_bit(bits))  # below WINDOW: bits is not 0
                where[count], what[count] = start + np.int64(place), sums[place]
                sums[place] = -0.0
                count += np.uintp(1)
                bits &= bits - np.uint64(1)


@_compiled
def _shared(held, index, places):
    """Mark a window of `held`, a byte for each place, and look up those of `index`: no branch that goes by the data.

    Each window begins at an index of both or of one, so that at least one is passed. count <= i: it goes up with i.
    """
    i, j, count = np.uintp(0), np.uintp(0), np.uintp(0)
    ours, theirs, window = np.uintp(len(index)), np.uintp(len(held)), np.uintp(WINDOW)
    there = np.zeros(WINDOW, np.uint8)
    while i < ours and j < theirs:
        start = max(index[i], held[j])
        while i < ours and index[i] < start:
            i += np.uintp(1)
        while j < theirs and held[j] < start:
            j += np.uintp(1)
        first = j
        while j < theirs and np.uintp(held[j] - start) < window:  # unsigned: one before `start` is beyond, too
            there[np.uintp(held[j] - start)] = 1
            j += np.uintp(1)
        while i < ours and np.uintp(index[i] - start) < window:
            places[count] = i
            count += np.uintp(there[np.uintp(index[i] - start)])
            i += np.uintp(1)
        while first < j:  # the same places
            there[np.uintp(held[first] - start)] = 0
            first += np.uintp(1)
    return count


@_compiled
def _put(index, value, out):
    """Put each value at its index, up to the first index that is not within `out`; return how many."""
    count = min(len(index), len(value))
    for i in range(count):
        place = np.uintp(index[i])  # unsigned: one below 0 is beyond, too
        if place >= np.uintp(len(out)):
            return i
        out[place] = value[i]
    return count


@_compiled
def _put_sum(index, value, out):
    """Add each value at its index, as `_put` puts it there."""
    count = min(len(index), len(value))
    for i in range(count):
        place = np.uintp(index[i])
        if place >= np.uintp(len(out)):
            return i
        out[place] += value[i]
    return count


@_compiled
def _quantise(value, bits, steps, scale, scale_bits):
    """Write the steps and the scale of each group, as the reference does; `bits` are those of the values."""
    magnitude, infinity, one = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), 127
    for group in range(len(scale)):
        few = slice(group * GROUP, min(group * GROUP + GROUP, len(value)))
        ours, raw, result = value[few], bits[few], steps[few]
        largest = np.uint32(0)
        for i in range(len(raw)):
            largest = max(largest, raw[i] & magnitude)
        if largest >= infinity:
            scale[group] = np.inf
            for i in range(len(raw)):
                result[i] = np.int8((raw[i] & magnitude) >= infinity)
            continue
        scale_bits[group] = largest
        scale[group] /= np.float32(STEPS)
        exponent = 0
        if scale_bits[group]:  # the least power of two that is not smaller: one less where it is one itself
            exponent = np.int64(scale_bits[group] >> 23) - one + (scale_bits[group] & np.uint32(0x7FFFFF) != 0)
            exponent = min(max(exponent, EXPONENTS[0]), EXPONENTS[1])
        scale_bits[group] = np.uint32(one - exponent) << 23
        inverse = scale[group]  # exact, and a product with it is the quotient
        scale_bits[group] = np.uint32(one + exponent) << 23
        for i in range(len(ours)):
            step = np.rint(ours[i] * inverse)
            result[i] = np.int8(min(max(step, np.float32(-STEPS)), np.float32(STEPS)))


@_compiled
def _scaled(steps, scale, value):
    for group in range(len(scale)):
        few, factor = slice(group * GROUP, min(group * GROUP + GROUP, len(value))), scale[group]
        ours, result = steps[few], value[few]
        for i in range(len(ours)):
            result[i] = ours[i] * factor
        if factor == np.inf:
            for i in range(len(ours)):
                if ours[i] == 0:
                    result[i] = 0


@_compiled
def _spread(index, value, start, out, window, lead):
    """Fill `out`, whose first aligned element is number `lead`; the indices are sorted and, less `start`, within it.

    Each window is made in the nearest cache and stored past the others. Windows begin at `lead` and are a multiple of
    32 bytes each, so that `_stream` is in bounds and aligned.
    """
    first = min(lead, len(out))
    last = len(out) - (len(out) - first) % WINDOW
    at, end = np.uintp(_spread_few(index, value, start, 0, out, 0, first)), np.uintp(len(index))
    for low in range(first, last, WINDOW):
        begin, here = at, start + low
        while at < end and index[at] < here + WINDOW:  # and not before `here`: all that is was passed above
            window[np.uintp(index[at] - here)] = value[at]
            at += np.uintp(1)
        for i in range(0, WINDOW, STREAM_BYTES // window.itemsize):
            _stream(out, low + i, window, i)
        while begin < at:  # the same places
            window[np.uintp(index[begin] - here)] = 0
            begin += np.uintp(1)
    _spread_few(index, value, start, np.int64(at), out, last, len(out))


@_compiled
def _spread_few(index, value, start, at, out, first, last):
    """Do so for the elements before the first whole window and behind the last; return the next pair's place."""
    out[first:last] = 0
    while at < len(index) and index[at] - start < last:  # and not before `first`, nor 0: they are sorted
        out[index[at] - start] = value[at]
        at += 1
    return at


@_compiled
def _pack(index, start, low_bits, lows, highs):
    """Write the low bits one after the other, and a one for each high part.

    `pack_` has checked by `check_room` that the words hold the bits of the last index: the others lie before them.
    """
    mask, held, filled, word = (1 << low_bits) - 1, np.uint64(0), 0, 0
    for i in range(len(index)):
        offset = index[i] - start
        held |= np.uint64(offset & mask) << np.uint64(filled)  # filled < 32 and low_bits < 32: 63 bits at most
        filled += low_bits
        if filled >= HALF_BITS:
            lows[word] = np.uint32(held & LOW_HALF)
            held >>= np.uint64(HALF_BITS)
            filled -= HALF_BITS
            word += 1
        place = (offset >> low_bits) + i
        highs[place >> 5] |= np.uint32(1 << (place & 31))
    if filled:
        lows[word] = np.uint32(held)


@_compiled
def _unpack(lows, highs, start, low_bits, index):
    """Write an index for each one in `highs`; return their number, or one more than there is room for.

    Index i needs low bits up to (i + 1) * low_bits, which `check_lows` has found in `lows`.
    """
    mask, held, filled, word, count = np.uint64((1 << low_bits) - 1), np.uint64(0), 0, 0, 0
    for at in range(len(highs)):
        ones = np.uint64(highs[at])
        while ones:
            if count == len(index):
                return count + 1
            if filled < low_bits:
                held |= np.uint64(lows[word]) << np.uint64(filled)
                filled += HALF_BITS
                word += 1
            high = at * HALF_BITS + np.int64(_lowest_bit(ones)) - count
            index[count] = start + (high << low_bits | np.int64(held & mask))
            held >>= np.uint64(low_bits)
            filled -= low_bits
            count += 1
            ones &= ones - np.uint64(1)
    return count
