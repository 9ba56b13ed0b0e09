"""Packed indices come back, fit where they are said to fit, and are never larger than plain ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.codec.indices import PLAIN, WIDTHS, best_width, pack, packed_words
from oktopk.kernels import kernels_for

NUMELS = st.sampled_from([1, 2, 254, 255, 256, 257, 4_095, 4_096, 65_535, 65_536, 65_537, 1_000_003, 2**31 - 1])


@st.composite
def indices(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Return a length and indices below it: its ends, multiples of the markers, and what is drawn."""
    numel = draw(NUMELS)
    edges = [place for m in (255, 4_095, 65_535) for place in (m - 1, m, m + 1, 2 * m, 3 * m) if place < numel]
    chosen = draw(st.sets(st.sampled_from([0, numel - 1, *edges]) | st.integers(0, numel - 1), max_size=40))
    return numel, sorted(chosen)


@pytest.mark.parametrize("width", WIDTHS)
@given(case=indices())
def test_what_is_packed_comes_back_and_fits(width: int, case: tuple[int, list[int]]) -> None:
    numel, index = case
    if numel // ((1 << width) - 1) > 10**6:
        numel, index = numel % 10**6 + 1, [i for i in index if i <= numel % 10**6]  # a million empty slots say no more
    packed, slots = pack(torch.tensor(index, dtype=torch.int64), width)
    assert packed.dtype == torch.uint8
    assert len(packed) <= 4 * packed_words(numel, len(index), width)
    assert kernels_for(packed).unpack(packed, slots, width).tolist() == index
    assert pack(torch.arange(numel % 10**5), width)[1] == numel % 10**5  # a full vector takes a slot each


@given(numel=st.integers(1, 2**31 - 1), capacity=st.integers(0, 10**6))
def test_the_best_width_is_never_larger_than_plain(numel: int, capacity: int) -> None:
    width = best_width(numel, capacity)
    assert width in (PLAIN, *WIDTHS)
    assert packed_words(numel, capacity, width) <= capacity
    assert all(packed_words(numel, capacity, width) <= packed_words(numel, capacity, other) for other in WIDTHS)
