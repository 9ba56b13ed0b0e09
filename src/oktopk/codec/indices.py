"""Sorted indices in few bits: the Elias-Fano code, whose size is known before the indices are.

The low bits of all indices stand one after the other. The rest of an index, its high part, is told by the place of a
one in a bit vector: index i with high part h sets bit h + i. `count` indices below `span` take count * low_bits bits
and count + span / 2**low_bits bits, about half a bit an index more than their entropy.
"""

from functools import lru_cache

PLAIN = 0
"""Low bits where indices are not packed, because that would not be shorter."""

WORD_BITS = 32
MOST_LOW_BITS = 31


@lru_cache(maxsize=1024)  # called several times a block, with few capacities
def best_low_bits(span: int, capacity: int) -> int:
    """Return the number of low bits that needs the fewest words for `capacity` indices below `span`, or PLAIN.

    >>> [best_low_bits(1_000_000, capacity) for capacity in (30_000, 10_000, 1_000, 1)]
    [5, 6, 9, 0]
    """
    best = min(range(1, MOST_LOW_BITS + 1), key=lambda bits: sum(field_words(span, capacity, bits)))
    return best if sum(field_words(span, capacity, best)) < capacity else PLAIN


def field_words(span: int, capacity: int, low_bits: int) -> tuple[int, int]:
    """Return the words of the low bits and of the bit vector for any `capacity` indices below `span`.

    >>> [sum(field_words(1_000_000, 10_000, bits)) * 32 / 10_000 for bits in (5, 6, 7)]  # bits an index
    [9.1296, 8.5632, 8.784]
    """
    if not capacity:
        return 0, 0
    highs = capacity + (max(span, 1) - 1 >> low_bits)
    return -(-capacity * low_bits // WORD_BITS), -(-highs // WORD_BITS)
