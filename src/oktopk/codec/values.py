"""The values of a block: float32, bfloat16 two in a word, or int8 four in a word with a scale for each group.

`rounded` tells how values arrive; the sender keeps the difference. The scale of an int8 group is the least power of two
of which 127 steps reach its largest value: the difference is exact, and rounding twice changes nothing.
"""

import torch
from torch import Tensor

from oktopk.errors import MalformedError
from oktopk.kernels import kernels_for
from oktopk.kernels.reference import EXPONENTS, GROUP

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def num_words(wire: str, count: int) -> int:
    """Return the words of `count` values.

    >>> [num_words(wire, 1000) for wire in WIRES]
    [1000, 500, 254]
    """
    per_word = 4 // WIRES[wire].itemsize
    return -(-count // per_word) + num_scales(wire, count)


def num_scales(wire: str, count: int) -> int:
    """Return how many of these words are scales: they come first."""
    return -(-count // GROUP) if wire == "int8" else 0


def write_(wire: str, words: Tensor, value: Tensor) -> Tensor | None:
    """Write the values into `words` (int32), which may be longer; return the rounding error, None if exact."""
    if wire != "int8":
        typed = words.view(WIRES[wire])[: len(value)]
        typed.copy_(round_to(value, typed.dtype))
        return None if is_exact(wire, value.dtype) else value - typed
    steps, scale = _quantise(value)
    words.view(torch.float32)[: len(scale)] = scale
    words[_num_groups(words) :].view(torch.int8)[: len(value)] = steps
    return value - scaled(steps, scale, value.dtype)


def read(wire: str, words: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` values that `write_` wrote; refuse scales that it never writes."""
    if wire != "int8":
        return words.view(WIRES[wire])[:count].to(dtype)
    scale = words.view(torch.float32)[: -(-count // GROUP)]
    if not bool((scale >= 2.0 ** EXPONENTS[0]).all()):  # of NaN, too, that is false
        raise MalformedError(f"a scale of int8 values must be at least 2**{EXPONENTS[0]}, not {scale.min().item():g}")
    return scaled(words[_num_groups(words) :].view(torch.int8)[:count], scale, dtype)


def rounded(wire: str, value: Tensor) -> Tensor:
    """Return the values as they arrive."""
    if wire != "int8":
        return round_to(value, WIRES[wire]).to(value.dtype)
    return scaled(*_quantise(value), value.dtype)


def is_exact(wire: str, dtype: torch.dtype) -> bool:
    """Whether values of this dtype arrive as they are."""
    return wire != "int8" and torch.finfo(WIRES[wire]).eps <= torch.finfo(dtype).eps


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` as `dtype`; a value that would overflow becomes the largest finite number."""
    limit = torch.finfo(dtype).max
    if torch.finfo(value.dtype).max <= limit or not value.numel():
        return value.to(dtype)
    if not value.is_cuda:  # where the question costs no wait: few values are that large
        low, high = value.aminmax()
        if max(-float(low), float(high)) <= limit:
            return value.to(dtype)
    return torch.where(value.isinf(), value, value.clamp(-limit, limit)).to(dtype)  # a sum that overflowed must show


def _num_groups(words: Tensor) -> int:
    """Return how many of the words are scales: one for each GROUP values, rounded up.

    >>> [_num_groups(torch.empty(num_words("int8", count))) for count in (0, 1, 256, 257, 1000)]
    [0, 1, 1, 2, 4]
    """
    return -(-len(words) // (GROUP // 4 + 1))


def _quantise(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return each value in steps of its group's scale, and the scales."""
    return kernels_for(value).quantise(round_to(value, torch.float32))


def scaled(steps: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of these steps, GROUP of which share a scale."""
    return kernels_for(steps).scaled(steps, scale, dtype)
