"""Sorted indices in few bits: the gaps between them, each in a slot of `width` bits.

A slot of all ones, the marker, adds its value to the next gap, so that a gap of any size fits. All gaps of a vector of
`numel` elements take at most numel // marker slots more than one each: the size of a block is known in advance.
"""

from functools import lru_cache

from torch import Tensor
from torch.nn.functional import pad

from oktopk.kernels import kernels_for
from oktopk.kernels.reference import marker_of

PLAIN = 32
WIDTHS = (8, 12, 16)
WORD_BITS = 32


@lru_cache(maxsize=1024)  # called several times a block, with few capacities
def best_width(numel: int, capacity: int) -> int:
    """Return the width, of WIDTHS or PLAIN, that needs the fewest words for `capacity` indices below `numel`."""
    return min((PLAIN, *WIDTHS), key=lambda width: packed_words(numel, capacity, width))


def packed_words(numel: int, capacity: int, width: int) -> int:
    """Return the words that hold any `capacity` indices below `numel`.

    >>> packed_words(1_000_000, 10_000, 12) * 32 / 10_000  # bits an index
    12.2944
    """
    if width == PLAIN or not capacity:
        return capacity
    slots = capacity + max(numel - 1, 0) // marker_of(width)
    return -(-(slots + slots % 2) * width // WORD_BITS)  # two slots of 12 bits make three bytes


def pack(index: Tensor, width: int) -> tuple[Tensor, int]:
    """Return the indices (int64, sorted) as bytes, padded to whole words, and the number of slots."""
    packed, slots = kernels_for(index).pack(index, width)
    return pad(packed, (0, -len(packed) % (WORD_BITS // 8))), slots
