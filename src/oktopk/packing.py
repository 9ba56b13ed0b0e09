"""Sorted indices in few bits: the gaps between them, each in a slot of `width` bits.

A slot of all ones says: go on by that much, there is no index here. So a gap of any size takes as many slots as it
needs, and all gaps of a vector of `numel` elements at most numel // marker more than one each: the size of a block is
known before its indices are, and everything fits.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN = 32
WIDTHS = (8, 12, 16)
WORD_BITS = 32


def best_width(numel: int, capacity: int) -> int:
    """Return the width that needs the fewest words for `capacity` indices below `numel`: one of WIDTHS, or PLAIN."""
    return min((PLAIN, *WIDTHS), key=lambda width: packed_words(numel, capacity, width))


def packed_words(numel: int, capacity: int, width: int) -> int:
    """Return the words that any `capacity` indices below `numel` fit into.

    >>> packed_words(1_000_000, 10_000, 12) * 32 / 10_000  # bits an index
    12.2944
    """
    if width == PLAIN or not capacity:
        return capacity
    slots = capacity + max(numel - 1, 0) // _marker(width)
    return -(-(slots + slots % 2) * width // WORD_BITS)  # two slots of 12 bits make three bytes


def pack(index: Tensor, width: int) -> tuple[Tensor, int]:
    """Return the indices (int64, sorted) as bytes, whole words of them, and how many slots they take."""
    slots = _slots(index, _marker(width))
    if width == 8:
        packed = slots.to(torch.uint8)
    elif width == 16:
        packed = slots.to(torch.int16).view(torch.uint8)
    else:
        even = torch.nn.functional.pad(slots, (0, len(slots) % 2)).view(-1, 2)
        both = (even[:, 0] | even[:, 1] << 12).to(torch.int32)
        packed = both.view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)
    return torch.nn.functional.pad(packed, (0, -len(packed) % (WORD_BITS // 8))), len(slots)


def unpack(packed: Tensor, num_slots: int, width: int) -> Tensor:
    """Return the indices that were packed into so many slots."""
    if width == 8:
        slots = packed[:num_slots].long()
    elif width == 16:
        slots = packed[: 2 * num_slots].view(torch.int16).long() & 0xFFFF
    else:
        three = packed[: 3 * ((num_slots + 1) // 2)].long().view(-1, 3)
        first, second = three[:, 0] | (three[:, 1] & 15) << 8, three[:, 1] >> 4 | three[:, 2] << 4
        slots = torch.stack([first, second], 1).view(-1)[:num_slots]
    return slots.cumsum(0)[slots != _marker(width)]


def _marker(width: int) -> int:
    return (1 << width) - 1


def _slots(index: Tensor, marker: int) -> Tensor:
    gaps = index.diff(prepend=index.new_zeros(1))
    further = gaps.div(marker, rounding_mode="floor")
    if not bool(further.any()):
        return gaps
    slots = gaps.new_full((len(gaps) + int(further.sum()),), marker)
    slots[(further + 1).cumsum(0) - 1] = gaps - further * marker
    return slots
