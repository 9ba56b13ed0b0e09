"""Values on the wire: what arrives, what is lost, and that nothing is made of nothing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.codec.values import rounded
from oktopk.kernels.reference import GROUP, STEPS

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(value=st.lists(FLOATS, min_size=1, max_size=20))
def test_int8_errs_by_half_a_step_and_keeps_the_difference_exact(value: list[float]) -> None:
    sent = torch.tensor(value)
    arrives = rounded("int8", sent)
    assert float((sent - arrives).abs().max()) <= max(float(sent.abs().max()) / STEPS, 2.0**-126)
    assert torch.equal(arrives.double() + (sent - arrives).double(), sent.double())
    assert torch.equal(rounded("int8", arrives), arrives)  # what is passed on down a tree does not change on its way


def test_a_giant_costs_only_its_own_group_their_precision() -> None:
    value = torch.ones(3 * GROUP)
    value[GROUP] = 1e30
    arrives = rounded("int8", value)
    assert torch.equal(arrives[:GROUP], value[:GROUP])
    assert torch.equal(arrives[2 * GROUP :], value[2 * GROUP :])
    assert not arrives[GROUP + 1 : 2 * GROUP].any()
