"""What is counted: each message once, at its size, under its phase; a block for oneself never."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import MeteredComm, Traffic, run_local


def metered(size: int, fn: Any) -> list[Traffic]:
    def job(comm: Any) -> Traffic:
        wrapped = MeteredComm(comm)
        fn(wrapped)
        return wrapped.pop()

    return run_local(size, job)


@given(numel=st.integers(0, 1001), size=st.integers(2, 7))
def test_an_all_reduce_counts_as_a_ring(numel: int, size: int) -> None:
    """Every block is sent by all ranks but one, in each half."""
    by_rank = metered(size, lambda comm: comm.all_reduce(torch.ones(numel)))
    assert sum(t.sent_bytes for t in by_rank) == sum(t.received_bytes for t in by_rank) == 2 * (size - 1) * 4 * numel
    assert all(t.messages <= 2 * (size - 1) for t in by_rank)
    if numel % size == 0:
        assert {t.sent_bytes for t in by_rank} == {2 * (size - 1) * 4 * numel // size}


def uneven(comm: Any) -> None:
    send = [[5, 1, 0], [2, 7, 3], [0, 0, 9]]
    comm.all_to_all_single(torch.ones(sum(send[comm.rank])), send[comm.rank], [row[comm.rank] for row in send])


def one_way(comm: Any) -> None:
    if comm.rank == 0:
        comm.sendrecv(torch.ones(6, dtype=torch.int32), 1, 1, 0).wait()
    elif comm.rank == 1:
        comm.sendrecv(None, 0, 0, 6).wait()


@pytest.mark.parametrize(("job", "sent", "received", "messages"), [
    (uneven, [4, 20, 0], [8, 4, 12], [1, 2, 0]),  # what is empty is no message, what is for oneself no traffic
    (lambda comm: comm.all_to_all_v([torch.ones(comm.rank * 2, dtype=torch.int32)] * 3),
     [16, 32, 48], [16 + 8 + 16, 16 + 16, 16 + 8], [2, 4, 4]),  # sizes travel first
    (one_way, [24, 0, 0], [0, 24, 0], [1, 0, 0]),
    (lambda comm: comm.all_gather(torch.ones(10, dtype=torch.int64)), [160] * 3, [160] * 3, [2] * 3),
    (lambda comm: comm.all_to_all(torch.ones(3, 5)), [40] * 3, [40] * 3, [2] * 3),
])  # fmt: skip
def test_each_message_counts_once(job: Any, sent: list[int], received: list[int], messages: list[int]) -> None:
    by_rank = metered(3, job)
    assert [t.sent_bytes for t in by_rank] == sent
    assert [t.received_bytes for t in by_rank] == received
    assert [t.messages for t in by_rank] == messages


def test_traffic_is_counted_under_its_phase() -> None:
    def job(comm: Any) -> None:
        with comm.phase("outer"):
            comm.all_gather(torch.ones(1))
            with comm.phase("inner"):
                comm.all_gather(torch.ones(2))
            comm.all_gather(torch.ones(4))
        comm.all_gather(torch.ones(8))

    for traffic in metered(2, job):
        assert traffic.sent_by_phase == {"outer": 4 + 16, "inner": 8, "other": 32}
        assert traffic.calls == {("outer", "all_gather"): 2, ("inner", "all_gather"): 1, ("other", "all_gather"): 1}
        assert set(traffic.phase_seconds) == {"outer", "inner"}
        assert traffic.phase_seconds["outer"] >= traffic.phase_seconds["inner"] > 0


def test_a_phase_ends_where_it_raises_and_pop_starts_again() -> None:
    def job(comm: Any) -> None:
        wrapped = MeteredComm(comm)
        with pytest.raises(ZeroDivisionError), wrapped.phase("broken"):
            raise ZeroDivisionError
        wrapped.all_gather(torch.ones(3))
        assert ("other", "all_gather") in wrapped.traffic.calls
        assert [wrapped.pop().sent_bytes, wrapped.pop().sent_bytes] == [12, 0]

    run_local(2, job)


def test_traffics_add_up() -> None:
    one, two = metered(3, lambda comm: (comm.all_gather(torch.ones(3)), comm.all_reduce(torch.ones(3))))[:2]
    total = Traffic()
    total.add_(one)
    total.add_(two)
    for figure in ("sent_bytes", "received_bytes", "messages"):
        assert getattr(total, figure) == getattr(one, figure) + getattr(two, figure)
    assert sum(total.calls.values()) == 4
    assert one.sizes[("other", "all_gather")] == Counter({12: 2})  # adding leaves what is added alone


def test_a_failure_is_passed_on_and_a_call_that_fails_is_not_counted() -> None:
    counted = []

    def job(comm: Any) -> None:
        wrapped = MeteredComm(comm)
        if comm.rank == 1:
            wrapped.fail(OSError("gone"))
            return
        try:
            wrapped.all_gather(torch.ones(1))
        finally:
            counted.append(sum(wrapped.traffic.calls.values()))

    with pytest.raises(OSError, match="gone"):
        run_local(2, job)
    assert counted == [0]
