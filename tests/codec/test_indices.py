"""Packed indices come back, fit where they are said to fit, and take little more than their entropy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.codec.indices import MOST_LOW_BITS, PLAIN, WORD_BITS, best_low_bits, field_words
from oktopk.kernels import kernels_for

SPANS = st.sampled_from([1, 2, 31, 32, 33, 254, 4_095, 4_096, 65_537, 1_000_003, 2**31 - 1])


@st.composite
def indices(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Return a span, its start and indices within it: its ends, powers of two, and what is drawn."""
    span = draw(SPANS)
    edges = [place for bits in range(31) for place in ((1 << bits) - 1, 1 << bits) if place < span]
    chosen = draw(st.sets(st.sampled_from([0, span - 1, *edges]) | st.integers(0, span - 1), max_size=40))
    start = draw(st.integers(0, 2**31 - span))
    return span, start, [start + place for place in sorted(chosen)]


@given(case=indices(), low_bits=st.integers(1, MOST_LOW_BITS), spare=st.integers(0, 3))
def test_what_is_packed_comes_back_and_fits(case: tuple[int, int, list[int]], low_bits: int, spare: int) -> None:
    span, start, chosen = case
    low_bits = max(low_bits, span.bit_length() - 20)  # a million empty bits say no more
    lows, highs = (torch.zeros(w, dtype=torch.int32) for w in field_words(span, len(chosen) + spare, low_bits))
    index = torch.tensor(chosen, dtype=torch.int64)
    kernels_for(index).pack_(index, start, low_bits, lows, highs)
    assert kernels_for(lows).unpack(lows, highs, start, low_bits, len(chosen)).tolist() == chosen


@given(span=st.integers(1, 2**31 - 1), capacity=st.integers(0, 10**6))
def test_the_best_code_is_never_larger_than_plain(span: int, capacity: int) -> None:
    low_bits = best_low_bits(span, capacity)
    others = [sum(field_words(span, capacity, bits)) for bits in range(1, MOST_LOW_BITS + 1)]
    assert (capacity if low_bits == PLAIN else others[low_bits - 1]) == min(capacity, *others)


@pytest.mark.parametrize("density", [0.1, 0.03, 0.01, 0.001])
def test_an_index_takes_at_most_seven_tenths_of_a_bit_more_than_its_entropy(density: float) -> None:
    span = 27_569_568
    count = int(span * density)
    bits = WORD_BITS * sum(field_words(span, count, best_low_bits(span, count))) / count
    entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    assert entropy < bits <= entropy + 0.7
