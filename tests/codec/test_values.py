"""Values on the wire: what arrives, what is lost, and that nothing is made of nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.codec.values import GROUP, STEPS, WIRES, num_words, read, rounded, write_

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("wire", WIRES)
@given(value=st.lists(FLOATS, max_size=20), spare=st.integers(0, 3 * GROUP))
def test_what_arrives_is_what_rounded_says(wire: str, dtype: torch.dtype, value: list[float], spare: int) -> None:
    sent = torch.tensor(value, dtype=dtype)
    words = torch.zeros(num_words(wire, len(value) + spare), dtype=torch.int32)
    write_(wire, words, sent)
    assert torch.equal(read(wire, words, len(value), dtype), rounded(wire, sent))


@given(value=st.lists(FLOATS, min_size=1, max_size=20))
def test_int8_errs_by_half_a_step_and_keeps_the_difference_exact(value: list[float]) -> None:
    sent = torch.tensor(value)
    arrives = rounded("int8", sent)
    largest = float(sent.abs().max())
    assert float((sent - arrives).abs().max()) <= max(largest / STEPS, 2.0**-126)
    assert torch.equal(arrives.double() + (sent - arrives).double(), sent.double())


@given(value=st.lists(FLOATS, min_size=1, max_size=20))
def test_rounding_again_changes_nothing(value: list[float]) -> None:
    """What is passed on down a tree must not change on its way."""
    once = rounded("int8", torch.tensor(value))
    assert torch.equal(rounded("int8", once), once)


def test_a_giant_costs_only_its_own_group_their_precision() -> None:
    value = torch.ones(3 * GROUP)
    value[GROUP] = 1e30
    arrives = rounded("int8", value)
    assert torch.equal(arrives[:GROUP], value[:GROUP])
    assert torch.equal(arrives[2 * GROUP :], value[2 * GROUP :])
    assert not arrives[GROUP + 1 : 2 * GROUP].any()


@pytest.mark.parametrize("wire", WIRES)
def test_an_infinity_shows(wire: str) -> None:
    arrives = rounded(wire, torch.tensor([1.0, math.inf, -math.inf, 2.0]))
    assert not arrives[1:3].isfinite().any()
