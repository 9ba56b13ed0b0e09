"""What each kernel means, in plain torch: the oracle of the fast ones, and what runs where none exists."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NAME = "reference (torch)"
CHUNK = 1 << 17
"""Elements that a core's own cache holds, with room to spare."""


def accumulate(grad: Tensor, held: Tensor, out: Tensor, scale: float = 1.0, decay: float = 1.0) -> int:
    """Write decay * held + scale * grad into `out`; return the index of its first NaN or Inf, or -1."""
    torch.add(held if decay == 1 else held * decay, grad, alpha=scale, out=out)
    return -1 if is_finite(out) else first_nonfinite(out)


def first_nonfinite(acc: Tensor) -> int:
    """Return the index of the first NaN or Inf, or -1."""
    bad = acc.isfinite().logical_not_().nonzero()
    return int(bad[0]) if len(bad) else -1


def is_finite(tensor: Tensor) -> bool:
    """Whether all of it is: a sum of squares tells in one pass, unless it overflows."""
    return math.isfinite(float(tensor.dot(tensor))) or first_nonfinite(tensor) < 0


def divide_(tensor: Tensor, divisor: float) -> bool:
    """Divide in place; return whether all of it is finite, asked of each chunk while it is still in the cache."""
    chunks = (tensor,) if tensor.is_cuda else torch.split(tensor, CHUNK)
    finite = [is_finite(chunk.div_(divisor)) for chunk in chunks]
    return all(finite)


def at_least(acc: Tensor, bounds: list[int], thresholds: list[float]) -> Tensor:
    """Return the sorted indices where |acc| >= the threshold of its segment, zeros never.

    Segment s is acc[bounds[s]:bounds[s + 1]]. A threshold below the smallest positive number means that one: a
    zero has nothing to send.
    """
    found = [
        (acc[low:high].abs() >= floor(threshold, acc.dtype)).nonzero().view(-1) + low
        for low, high, threshold in zip(bounds, bounds[1:], thresholds, strict=False)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=acc.device)


def merge(index: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of sparse vectors, added in their order: sorted indices, and their values."""
    union, place = torch.unique(torch.cat(list(index)), return_inverse=True)
    total = value[0].new_full((len(union),), -0.0)  # which changes nothing that is added to it
    for where, part in zip(torch.split(place, [len(i) for i in index]), value, strict=True):
        total[where] += part
    return union, total


def holds(held: Tensor, index: Tensor) -> Tensor:
    """Return the mask of those of `index` that are in `held`, both sorted."""
    if not len(held):
        return torch.zeros_like(index, dtype=torch.bool)
    place = torch.searchsorted(held, index).clamp_(max=len(held) - 1)
    return held[place] == index


def floor(threshold: float, dtype: torch.dtype) -> float:
    """Return the threshold as `dtype` can hold it: at least its least positive number, infinite beyond its largest."""
    if threshold > torch.finfo(dtype).max:
        return math.inf
    return max(threshold, 2.0**-149 if dtype == torch.float32 else 5e-324)
