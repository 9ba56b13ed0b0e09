"""How values travel: as float32, as bfloat16 two in a word, or as int8 four in a word, with a scale for each group.

A value that is rounded arrives as another one; the difference is the sender's to keep (`rounded` tells what arrives).
The scale of an int8 group is a power of two, the least that lets 127 steps reach its largest value: so the difference
is exact, and rounding what is rounded already changes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from oktopk.errors import MalformedError, one_of

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
GROUP = 256
"""int8 values that share a scale: one that is far larger than the rest costs only its own group their precision."""

STEPS = 127
EXPONENTS = (-126, 121)
"""Of a scale: it is a normal number, and 127 of it are finite."""


def check_wire(wire: str) -> str:
    """Return `wire`, if there is such a one."""
    return one_of("wire", wire, WIRES)


def num_words(wire: str, count: int) -> int:
    """Return the words that `count` values take.

    >>> [num_words(wire, 1000) for wire in WIRES]
    [1000, 500, 254]
    """
    per_word = 4 // WIRES[wire].itemsize
    return -(-count // per_word) + (-(-count // GROUP) if wire == "int8" else 0)


def write_(wire: str, words: Tensor, value: Tensor) -> Tensor | None:
    """Write the values into `words` (int32), which has room for them or more; return what that loses, if anything."""
    if wire != "int8":
        typed = words.view(WIRES[wire])[: len(value)]
        typed.copy_(round_to(value, typed.dtype))
        return None if is_exact(wire, value.dtype) else value - typed
    steps, scale = _quantise(value)
    words.view(torch.float32)[: len(scale)] = scale
    words[_num_groups(words) :].view(torch.int8)[: len(value)] = steps
    return value - _scaled(steps, scale, value.dtype)


def read(wire: str, words: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the first `count` of the values that `write_` wrote; scales that it never writes are refused."""
    if wire != "int8":
        return words.view(WIRES[wire])[:count].to(dtype)
    scale = words.view(torch.float32)[: -(-count // GROUP)]
    if not bool((scale >= 2.0 ** EXPONENTS[0]).all()):  # of NaN, too, that is false
        raise MalformedError(f"a scale of int8 values must be at least 2**{EXPONENTS[0]}, not {scale.min().item():g}")
    return _scaled(words[_num_groups(words) :].view(torch.int8)[:count], scale, dtype)


def rounded(wire: str, value: Tensor) -> Tensor:
    """Return the values as they arrive."""
    if wire != "int8":
        return round_to(value, WIRES[wire]).to(value.dtype)
    return _scaled(*_quantise(value), value.dtype)


def is_exact(wire: str, dtype: torch.dtype) -> bool:
    """Whether values of this dtype arrive as they are."""
    return wire != "int8" and torch.finfo(WIRES[wire]).eps <= torch.finfo(dtype).eps


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` as `dtype`; what would overflow becomes the largest finite number, the rest stays to be sent."""
    limit = torch.finfo(dtype).max
    if torch.finfo(value.dtype).max <= limit or not value.numel():
        return value.to(dtype)
    if not value.is_cuda:  # where to ask costs nothing: few values are so large
        low, high = value.aminmax()
        if max(-float(low), float(high)) <= limit:
            return value.to(dtype)
    return torch.where(value.isinf(), value, value.clamp(-limit, limit)).to(dtype)  # a sum that overflowed must show


def _num_groups(words: Tensor) -> int:
    """Return how many of the words are scales: one for each GROUP values, and for the last ones.

    >>> [_num_groups(torch.empty(num_words("int8", count))) for count in (0, 1, 256, 257, 1000)]
    [0, 1, 1, 2, 4]
    """
    return -(-len(words) // (GROUP // 4 + 1))


def _quantise(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return each value in steps of its group's scale, and the scales."""
    single = round_to(value, torch.float32)
    groups = pad(single, (0, -len(value) % GROUP)).view(-1, GROUP)
    largest = groups.abs().amax(1) if len(value) else single
    mantissa, exponent = torch.frexp(largest / STEPS)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(*EXPONENTS)
    scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), math.inf)
    # What is infinite stays so, and what is NaN becomes so: a sum that overflowed must show.
    steps = torch.nan_to_num(groups / scale[:, None], nan=1.0).round_().clamp_(-STEPS, STEPS)
    return steps.view(-1)[: len(value)].to(torch.int8), scale


def _scaled(steps: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    groups = pad(steps.to(dtype), (0, -len(steps) % GROUP)).view(-1, GROUP)
    value = groups * scale.to(dtype)[:, None]
    if bool(scale.isinf().any()):
        value = torch.where(groups == 0, groups, value)  # no NaN beside an infinity: it would be ranked above it
    return value.view(-1)[: len(steps)]
