"""Schedules: the bytes that they send are those that the meter counts, and links carry what crosses them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, Reducer, SettingError, TopkA, TopkDSA
from oktopk.cost import Call
from oktopk.plan.model import exchange_of
from oktopk.plan.schedule import Round, Schedule, crossings, schedule_of
from tests.harness import on_threads

NUMEL = 4200  # which 2, 3 and 5 ranks share evenly
AGREED_BYTES = 16  # of Dense: an int64 to each peer and back, which DDP does not send


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("algorithm", [OkTopk(), OkTopk(wire="fp32"), TopkA()], ids=str)
def test_predicted_bytes_equal_metered_bytes(algorithm: Any, size: int) -> None:
    def job(comm: Any) -> int:
        reducer = Reducer(algorithm, comm)
        reducer.all_reduce(torch.arange(float(NUMEL)) + comm.rank)
        return reducer.last.sent_bytes

    plan = exchange_of(algorithm, NUMEL, size)
    assert on_threads(size, job) == [plan.sent_bytes] * size
    assert sum(message.num_bytes for message in plan.messages(size)) == pytest.approx(size * plan.sent_bytes)


def test_a_dense_sum_sends_a_rings_bytes() -> None:
    def job(comm: Any) -> int:
        reducer = Reducer(Dense(), comm)
        reducer.all_reduce(torch.ones(NUMEL))
        return reducer.last.sent_bytes - AGREED_BYTES // 2 * (comm.size - 1)

    assert sum(on_threads(3, job)) == pytest.approx(3 * exchange_of(Dense(), NUMEL, 3).sent_bytes)


@given(size=st.integers(2, 12), stride=st.integers(1, 4), groups=st.integers(1, 3), data=st.data())
def test_crossings_are_those_of_the_messages(size: int, stride: int, groups: int, data: Any) -> None:
    """For parts that divide the ranks of a group, or the ranks between two of them, evenly."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    block = data.draw(
        st.sampled_from([d for d in range(1, stride) if stride % d == 0] + [stride * d for d in divisors])
    )
    distances = range(1, data.draw(st.integers(2, size)))
    each = Round("all_to_all", distances, 4.0)
    plan = Schedule(size, (each,), stride)
    leaving = [m for m in plan.messages(size * stride * groups) if m.source < block <= m.target]
    assert crossings(plan, each, block) == len(leaving)


@pytest.mark.parametrize("algorithm", [OkTopk(), OkTopkPaper(), TopkDSA(), GTopk(), GaussianK()], ids=str)
@pytest.mark.parametrize("size", [1, 6])
def test_a_message_needs_earlier_ones_that_arrive_at_its_sender(algorithm: Any, size: int) -> None:
    arrived: dict[int, int] = {}
    for message in exchange_of(algorithm, NUMEL, size).messages(size):
        assert all(arrived[need] == message.source for need in message.needs)
        arrived[message.number] = message.target
    assert bool(arrived) == (size > 1)


@pytest.mark.parametrize("size", [6, 64])
def test_a_gather_tells_every_rank_of_all_blocks(size: int) -> None:
    """Directly, or along rows and columns: the links carry what crosses them, and a rank its block's bytes to each."""
    plan = schedule_of([Call("all_gather", size - 1.0)], size)
    known = [{rank} for rank in range(size)]
    for each, sends in zip(plan.rounds, plan.sends(size), strict=True):
        told = [set(blocks) for blocks in known]
        for rank, (targets, num_bytes) in enumerate(sends):
            assert num_bytes == 4 * len(known[rank])
            for target in targets:
                told[target] |= known[rank]
        for block in (block for block in range(1, size) if size % block == 0):
            leaving = sum(rank < block <= target for rank, (targets, _) in enumerate(sends) for target in targets)
            assert crossings(plan, each, block) == leaving
        known = told
    assert known == [set(range(size))] * size
    assert plan.sent_bytes == 4 * (size - 1)


def test_an_unknown_collective_has_no_schedule() -> None:
    with pytest.raises(SettingError, match="no schedule for the collective 'broadcast'"):
        schedule_of([Call("broadcast", 1)], 2)
