"""`Kernels`: every kernel in plain torch, the oracle of the fast ones, and the checks that they share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from oktopk.errors import MalformedError

Ends = Sequence[int] | NDArray[np.int64]
Floors = Sequence[float] | NDArray[np.float64]
Noted = tuple[Tensor, Tensor] | None
"""Sorted indices and values of elements; None where they are too many to be of use."""

NO_SCORE = "a score is NaN, so that there is no k-th largest"
NOT_PACKABLE = "indices must be strictly increasing, and none negative, to be packed"
WORD_BITS = 32
CHUNK = 1 << 17
"""Elements of a chunk, because a core's own cache holds as many with room to spare."""
GROUP = 256
"""Number of int8 values that share a scale, because a giant then costs only its own group their precision."""
STEPS = 127
EXPONENTS = (-126, 121)
"""Range of a scale's exponent, because it has to be a normal number and 127 of it finite."""
MEMORY = 0.9
"""Part of a running mean of the squared gradient that one more measurement leaves."""
MOST_SCALE = 2.0**16
"""Largest scale of a segment, and the inverse of the smallest."""


class Kernels:
    """Every kernel in plain torch, on any device; a subclass must give the same bits, faster."""

    name = "reference (torch)"

    def accumulate(self, grad: Tensor, held: Tensor, out: Tensor, scale: float = 1.0, decay: float = 1.0) -> int:
        """Write decay * held + scale * grad into `out`; return the index of its first NaN or Inf, or -1."""
        torch.add(held if decay == 1 else held * decay, grad, alpha=scale, out=out)
        return -1 if is_finite(out) else first_nonfinite(out)

    def accumulate_above(
        self, grad: Tensor, held: Tensor, out: Tensor, bounds: Ends, floors: Floors, most: int
    ) -> tuple[int, Noted]:
        """Write held + grad into `out`; return as `accumulate`, and the indices and values where |out| >= the floor.

        Segment s is out[bounds[s]:bounds[s + 1]] and has its own floor; there may be tens of thousands. Where more than
        `most` elements reach their floors, None takes the place of all.
        """
        first_bad = self.accumulate(grad, held, out)
        index = self.at_least(out, bounds, floors)
        return first_bad, (index, out.index_select(0, index)) if len(index) <= most else None

    def at_least(self, acc: Tensor, bounds: Ends, thresholds: Floors) -> Tensor:
        """Return the sorted indices where |acc| >= the threshold of its segment.

        A zero is never among them: a threshold below the smallest positive number means that one.
        """
        low, high = int(bounds[0]), int(bounds[-1])
        limits = torch.from_numpy(held_by(acc.dtype, thresholds)).to(acc.device)
        lengths = torch.from_numpy(np.diff(bounds)).to(acc.device)
        each = limits if len(limits) == 1 else limits.repeat_interleave(lengths)
        return (acc[low:high].abs() >= each).nonzero().view(-1) + low

    def mean_squares(self, acc: Tensor, held: Tensor, bounds: Ends) -> Tensor:
        """Return the mean of (acc - held)**2 over each segment, in float64 on the CPU, 0 for an empty one."""
        lengths = torch.from_numpy(np.diff(bounds)).to(acc.device)
        span = slice(int(bounds[0]), int(bounds[-1]))
        squares = (acc[span].double() - held[span].double()).square()
        sums = torch.segment_reduce(squares, "sum", lengths=lengths, initial=0.0)
        return (sums / lengths.clamp(min=1)).cpu()

    def kth_largest(self, score: Tensor, k: int) -> float:
        """Return the k-th largest of the scores, which are not negative; 1 <= k <= len(score)."""
        check_k(k, len(score))
        largest = torch.topk(score, k, sorted=False).values
        if bool(largest.isnan().any()):  # which torch counts among the largest
            raise MalformedError(NO_SCORE)
        return float(largest.min())

    def first_at_least(self, score: Tensor, threshold: float, k: int) -> Tensor:
        """Return the sorted places of the scores above the threshold, the k-th largest, and of the first equal to it.

        These are k, or those that are not 0. No score is negative, or NaN.
        """
        reach = self.at_least(score, [0, len(score)], [threshold])
        if len(reach) > k:
            ties = (score[reach] == threshold).nonzero().view(-1)
            keep = torch.ones_like(reach, dtype=torch.bool)
            keep[ties[len(ties) - (len(reach) - k) :]] = False
            reach = reach[keep]
        return reach

    def is_increasing(self, index: Tensor) -> bool:
        """Whether every index is larger than the one before it."""
        return bool((index[1:] > index[:-1]).all())

    def merge(self, index: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of sparse vectors, added in their order: sorted indices, and their values."""
        union, place = torch.unique(torch.cat(list(index)), return_inverse=True)
        total = value[0].new_full((len(union),), -0.0)  # which changes nothing that is added to it
        for where, part in zip(torch.split(place, [len(i) for i in index]), value, strict=True):
            total[where] += part
        return union, total

    def shared(self, held: Tensor, index: Tensor) -> Tensor:
        """Return the places in `index` of the indices that `held` has, too; both are sorted."""
        if not len(held):
            return index.new_empty(0)
        place = torch.searchsorted(held, index).clamp_(max=len(held) - 1)
        return (held[place] == index).nonzero().view(-1)

    def put_(self, out: Tensor, index: Tensor, value: Tensor) -> None:
        """Make the elements of `out` at `index` the values."""
        out.index_copy_(0, index, value)

    def add_(self, out: Tensor, index: Tensor, value: Tensor) -> None:
        """Add the values to the elements of `out` at `index`."""
        out.index_add_(0, index, value)

    def spread(self, index: Tensor, value: Tensor, out: Tensor, start: int = 0) -> None:
        """Make `out` a vector, from its element `start` on, with `value` at the sorted `index`, and zeros elsewhere."""
        out.zero_().index_copy_(0, index - start if start else index, value)

    def pack_(self, index: Tensor, start: int, low_bits: int, lows: Tensor, highs: Tensor) -> None:
        """Write sorted indices from `start` on into words that are zero: their low bits, and their high parts.

        Index number i sets bit i + (index - start >> low_bits) of `highs`.
        """
        offset = index - start
        check_packable(offset, low_bits, lows, highs)
        each = torch.arange(len(offset), device=index.device)
        set_bits_(highs, (offset >> low_bits) + each)
        bits = torch.arange(low_bits, device=index.device)
        is_set = (offset[:, None] >> bits & 1).bool()
        set_bits_(lows, (each[:, None] * low_bits + bits)[is_set])

    def unpack(self, lows: Tensor, highs: Tensor, start: int, low_bits: int, count: int) -> Tensor:
        """Return the `count` indices that `pack_` wrote; raise if the words hold another number of them."""
        check_lows(lows, low_bits, count)
        place = bits_of(highs).nonzero().view(-1)
        check_ones(len(place), count)
        bits = torch.arange(low_bits, device=lows.device)
        low = (bits_of(lows)[: count * low_bits].view(count, low_bits) << bits).sum(1)
        high = place - torch.arange(count, device=lows.device)
        return start + (high << low_bits | low)

    def quantise(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return each float32 value in steps of its group's scale, as int8, and the scales."""
        groups = pad(value, (0, -len(value) % GROUP)).view(-1, GROUP)
        largest = groups.abs().amax(1) if len(value) else value
        mantissa, exponent = torch.frexp(largest / STEPS)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(*EXPONENTS)
        scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), math.inf)
        # Infinity stays, and NaN becomes infinity: a sum that overflowed must show.
        steps = torch.nan_to_num(groups / scale[:, None], nan=1.0).round_().clamp_(-STEPS, STEPS)
        return steps.view(-1)[: len(value)].to(torch.int8), scale

    def scaled(self, steps: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of these steps, GROUP of which share a scale."""
        groups = pad(steps.to(dtype), (0, -len(steps) % GROUP)).view(-1, GROUP)
        value = groups * scale.to(dtype)[:, None]
        if bool(scale.isinf().any()):
            value = torch.where(groups == 0, groups, value)  # no NaN beside an infinity: it would be ranked above it
        return value.view(-1)[: len(steps)]


REFERENCE = Kernels()


def first_nonfinite(acc: Tensor) -> int:
    """Return the index of the first NaN or Inf, or -1."""
    bad = acc.isfinite().logical_not_().nonzero()
    return int(bad[0]) if len(bad) else -1


def is_finite(tensor: Tensor) -> bool:
    """Whether all of it is: a sum of squares tells in one pass, unless it overflows."""
    return math.isfinite(float(tensor.dot(tensor))) or first_nonfinite(tensor) < 0


def divide_(tensor: Tensor, divisor: float) -> float:
    """Divide in place; return an upper bound of the magnitudes (but for rounding), infinity if one is not finite.

    Each chunk is measured while it is still in the cache.
    """
    chunks = (tensor,) if tensor.is_cuda else torch.split(tensor, CHUNK)
    largest = [_at_most(chunk.div_(divisor)) for chunk in chunks]
    return max(largest) if all(map(math.isfinite, largest)) else math.inf


def _at_most(tensor: Tensor) -> float:
    """Return an upper bound of the magnitudes: the norm, or the largest of them where its square overflows."""
    square = float(tensor.dot(tensor))
    if math.isfinite(square):
        return math.sqrt(square)
    low, high = tensor.aminmax()
    return max(-float(low), float(high))


def check_k(k: int, count: int) -> None:
    """Raise unless `count` scores have a k-th largest."""
    if not 1 <= k <= count:
        raise MalformedError(f"k must be 1 to {count}, the number of scores, not {k}")


def check_packable(offset: Tensor, low_bits: int, lows: Tensor, highs: Tensor) -> None:
    """Raise unless these offsets increase from 0 on, and fit into the words."""
    if len(offset) and (int(offset[0]) < 0 or bool((offset[1:] <= offset[:-1]).any())):
        raise MalformedError(NOT_PACKABLE)
    if len(offset):
        check_room(len(offset), int(offset[-1]), low_bits, lows, highs)


def check_room(count: int, last: int, low_bits: int, lows: Tensor, highs: Tensor) -> None:
    """Raise unless the words have room for `count` offsets, of which `last` is the largest."""
    check_lows(lows, low_bits, count)
    if (last >> low_bits) + count > WORD_BITS * len(highs):
        raise MalformedError(f"{len(highs)} words do not hold the high parts of {count} indices up to {last}")


def check_lows(lows: Tensor, low_bits: int, count: int) -> None:
    """Raise unless `lows` has the low bits of `count` indices."""
    if not (1 <= low_bits < WORD_BITS and 0 <= count * low_bits <= WORD_BITS * len(lows)):
        raise MalformedError(f"{len(lows)} words do not hold {low_bits} bits of each of {count} indices")


def check_ones(ones: int, count: int) -> None:
    """Raise unless a bit vector has a one for each index."""
    if ones != count:
        more = "more" if ones > count else ones
        raise MalformedError(f"the header says {count} pairs, its bit vector holds {more} indices")


def bits_of(words: Tensor) -> Tensor:
    """Return the bits of int32 words as 0 and 1, the lowest first."""
    return (words[:, None].long() >> torch.arange(WORD_BITS, device=words.device) & 1).view(-1)


def set_bits_(words: Tensor, place: Tensor) -> None:
    """Set these bits, each named once, of int32 words that are zero."""
    sums = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    words.copy_(sums.index_add_(0, place // WORD_BITS, 1 << place % WORD_BITS).int())


def held_by(dtype: torch.dtype, thresholds: Floors) -> NDArray[Any]:
    """Return the thresholds as `dtype` can hold them: at least its least positive number, and infinity."""
    least = 2.0**-149 if dtype == torch.float32 else 5e-324
    known = np.where(np.asarray(thresholds) > torch.finfo(dtype).max, np.inf, np.maximum(thresholds, least))
    return known.astype(np.float32 if dtype == torch.float32 else np.float64)


def running(squares: Tensor, measured: Tensor) -> Tensor:
    """Return the running means after one more measurement; one that is not finite is not taken."""
    mixed = torch.where(squares > 0, MEMORY * squares + (1 - MEMORY) * measured, measured)
    return torch.where(measured.isfinite(), mixed, squares)


def scales_of(squares: Tensor, lengths: Tensor) -> Tensor:
    """Return each segment's rms over the whole vector's; 1 for a segment without a gradient.

    It lies between 1 / MOST_SCALE and MOST_SCALE: whatever the gradient, no score is infinite, or NaN.
    """
    whole = (squares * (lengths / lengths.sum().clamp(min=1)).to(squares.dtype)).sum()
    ratio = squares / whole.clamp(min=torch.finfo(squares.dtype).tiny)
    return torch.where((squares > 0) & (whole > 0), ratio, 1.0).sqrt().clamp(1 / MOST_SCALE, MOST_SCALE)
