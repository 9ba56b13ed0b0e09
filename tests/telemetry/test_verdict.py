"""The verdict: does compression pay here, and below which speed of the link would it?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.telemetry.verdict import verdict

SECONDS = st.floats(0.01, 10.0)


@given(compute_s=SECONDS, overhead_s=SECONDS, share=st.floats(0.001, 0.9), here_mbit=st.floats(100.0, 1e5))
def test_at_the_break_even_both_steps_take_the_same_time(compute_s, overhead_s, share, here_mbit):
    dense_bytes = 1e8

    def step_s(mbit, sent, own_s=0.0):
        return compute_s + own_s + 8e-6 * sent / mbit

    dense_s, sparse_s = step_s(here_mbit, dense_bytes), step_s(here_mbit, share * dense_bytes, overhead_s)
    exchange_s = 8e-6 * dense_bytes / here_mbit
    said = verdict((dense_s, sparse_s), (dense_bytes, share * dense_bytes), exchange_s)
    if sparse_s <= dense_s * 1.06:
        assert "does not pay" not in said or sparse_s > dense_s
        return
    mbit = float(said.split("below about ")[1].split()[0].replace(",", ""))
    assert mbit <= here_mbit * 1.05  # two digits are printed
    ends = step_s(mbit, dense_bytes), step_s(mbit, share * dense_bytes, overhead_s)
    assert ends[0] == pytest.approx(ends[1], rel=0.06)


@pytest.mark.parametrize(("seconds", "sent", "says"), [
    ((0.43, 0.61), (1e6, 1e5), "sparse steps took 0.61 s, dense ones 0.43 s: on this network compression does not"),
    ((0.43, 0.47), (1e8, 1e6), "below about 20,000 Mbit/s it would"),
    ((1.43, 0.61), (1e6, 1e5), "compression pays, a step is 2.3 times as fast"),
    ((0.43, 0.44), (1e6, 1e5), "makes no difference"),
    ((0.43, 0.61), (0.0, 0.0), "one rank sends nothing, so that compression cannot pay"),
    ((0.61, 0.43), (0.0, 0.0), "cannot pay"),
    ((None, 0.61), (None, 1e5), None),
])  # fmt: skip
def test_the_verdict_compares_sparse_steps_with_dense_ones(seconds, sent, says):
    said = verdict(seconds, sent, None)
    assert said is None if says is None else says in said
