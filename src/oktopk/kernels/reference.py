"""`Kernels`: every kernel in plain torch, the oracle of the fast ones, and the checks that they share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.errors import MalformedError

Ends = Sequence[int] | NDArray[np.int64]
Floors = Sequence[float] | NDArray[np.float64]

NO_SCORE = "a score is NaN, so that there is no k-th largest"
NOT_PACKABLE = "indices must be strictly increasing, and none negative, to be packed"
CHUNK = 1 << 17
"""Elements of a chunk, because a core's own cache holds as many with room to spare."""
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
        self, grad: Tensor, held: Tensor, out: Tensor, bounds: Ends, floors: Floors
    ) -> tuple[int, Tensor, Tensor]:
        """Write held + grad into `out`; return as `accumulate`, and the indices and values where |out| >= the floor.

        Segment s is out[bounds[s]:bounds[s + 1]] and has its own floor; there may be tens of thousands.
        """
        first_bad = self.accumulate(grad, held, out)
        index = self.at_least(out, bounds, floors)
        return first_bad, index, out.index_select(0, index)

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

    def spread(self, index: Tensor, value: Tensor, out: Tensor) -> None:
        """Make `out` the vector that has `value` at `index`, which is sorted, and zeros elsewhere."""
        out.zero_().index_copy_(0, index, value)

    def pack(self, index: Tensor, width: int) -> tuple[Tensor, int]:
        """Return the gaps between sorted indices in slots of 8, 12 or 16 bits, as bytes, and the number of slots.

        A slot of all ones, the marker, adds its value to the gap of the next slot.
        """
        slots = _slots(index, marker_of(width))
        if width == 12:
            even = torch.nn.functional.pad(slots, (0, len(slots) % 2)).view(-1, 2)
            both = (even[:, 0] | even[:, 1] << 12).to(torch.int32)
            packed = both.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)
        else:
            packed = slots.to(torch.uint8 if width == 8 else torch.int16).view(torch.uint8)
        return packed, len(slots)

    def unpack(self, packed: Tensor, num_slots: int, width: int) -> Tensor:
        """Return the indices that were packed into `num_slots` slots."""
        check_slots(len(packed), num_slots, width)
        if width == 8:
            slots = packed[:num_slots].long()
        elif width == 16:
            slots = packed[: 2 * num_slots].view(torch.int16).long() & 0xFFFF
        else:
            bytes_ = packed[: 3 * ((num_slots + 1) // 2)].long()
            three = torch.nn.functional.pad(bytes_, (0, -len(bytes_) % 3)).view(-1, 3)
            first, second = three[:, 0] | (three[:, 1] & 15) << 8, three[:, 1] >> 4 | three[:, 2] << 4
            slots = torch.stack([first, second], 1).view(-1)[:num_slots]
        return slots.cumsum(0)[slots != marker_of(width)]


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


def check_slots(num_bytes: int, num_slots: int, width: int) -> None:
    """Raise unless `num_bytes` bytes hold `num_slots` slots of `width` bits."""
    if width not in (8, 12, 16) or not 0 <= num_slots <= num_bytes * 8 // width:
        raise MalformedError(f"{num_bytes} bytes do not hold {num_slots} slots of {width} bits")


def marker_of(width: int) -> int:
    """Return the slot of all ones."""
    return (1 << width) - 1


def _slots(index: Tensor, marker: int) -> Tensor:
    gaps = index.diff(prepend=index.new_zeros(1))
    if bool((gaps[1:] <= 0).any() or (gaps[:1] < 0).any()):
        raise MalformedError(NOT_PACKABLE)
    further = gaps.div(marker, rounding_mode="floor")
    if not bool(further.any()):
        return gaps
    slots = gaps.new_full((len(gaps) + int(further.sum()),), marker)
    slots[(further + 1).cumsum(0) - 1] = gaps - further * marker
    return slots


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
