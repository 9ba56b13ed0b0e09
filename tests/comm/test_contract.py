"""One contract, kept by every comm: threads and processes, bare and metered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oktopk import Comm, MeteredComm
from oktopk.comm.process_group import LARGE_BYTES

Run = Callable[..., list[Any]]


def all_reduce_sums_in_place(comm: Any) -> None:
    total = comm.size * (comm.size + 1) // 2
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        tensor = torch.full((5,), comm.rank + 1, dtype=dtype)
        assert comm.all_reduce(tensor) is tensor
        assert tensor.tolist() == [total] * 5
    assert comm.all_reduce(torch.tensor([2**40 + comm.rank])).item() == comm.size * 2**40 + sum(range(comm.size))
    assert comm.all_reduce(torch.empty(0)).shape == (0,)


def several_sums_under_way(comm: Any) -> None:
    tensors = [torch.full((100 * i,), float(comm.rank + i)) for i in range(5)]
    pending = [comm.start_all_reduce(tensor) for tensor in tensors]
    for i, (tensor, sum_) in enumerate(zip(tensors, pending, strict=True)):
        assert sum_.wait() is tensor
        assert set(tensor.tolist()) <= {float(sum(rank + i for rank in range(comm.size)))}


def all_gather_is_in_rank_order(comm: Any) -> None:
    for dtype in (torch.int32, torch.int64, torch.float32, torch.bfloat16):
        block = torch.tensor([comm.rank, 10 + comm.rank, 0], dtype=dtype)
        rows = comm.all_gather(block)
        assert rows.tolist() == [[rank, 10 + rank, 0] for rank in range(comm.size)]
        assert rows.dtype == dtype
        block.fill_(99)  # what was gathered is everyone's own
        rows.fill_(-1)
    assert comm.all_gather(torch.empty(0)).shape == (comm.size, 0)
    column = torch.arange(6).view(3, 2)[:, 1]
    assert comm.all_gather(column).tolist() == [[1, 3, 5]] * comm.size


def all_to_all_single_with_uneven_splits(comm: Any) -> None:
    """Rank r sends to rank i r * (r + 2i) numbers (rank 0 sends none) that say where they are from."""
    send = [comm.rank * (comm.rank + 2 * peer) for peer in range(comm.size)]
    receive = [peer * (peer + 2 * comm.rank) for peer in range(comm.size)]
    for dtype in (torch.int32, torch.int64, torch.float32):
        blocks = torch.cat([torch.full((n,), 100 * comm.rank + peer, dtype=dtype) for peer, n in enumerate(send)])
        came = comm.all_to_all_single(blocks, send, receive)
        assert came.tolist() == [100 * peer + comm.rank for peer, n in enumerate(receive) for _ in range(n)]
        assert came.dtype == dtype
    zeros = [0] * comm.size
    assert comm.all_to_all_single(torch.empty(0, dtype=torch.int32), zeros, zeros).shape == (0,)


def all_to_all_small_and_large(comm: Any) -> None:
    for words in (0, 1, 3, LARGE_BYTES // 4 + 1):
        blocks = torch.arange(comm.size).repeat_interleave(words).view(comm.size, words).int() + 100 * comm.rank
        came = comm.all_to_all(blocks)
        assert came.shape == blocks.shape
        assert all(bool((row == 100 * peer + comm.rank).all()) for peer, row in enumerate(came))


def all_to_all_v_of_any_sizes(comm: Any) -> None:
    blocks = [torch.full((comm.rank * peer,), 10 * comm.rank + peer, dtype=torch.int32) for peer in range(comm.size)]
    expected = [[10 * peer + comm.rank] * (peer * comm.rank) for peer in range(comm.size)]
    assert [block.tolist() for block in comm.all_to_all_v(blocks)] == expected


def sendrecv_around_the_ring(comm: Any) -> None:
    """Several may be under way. Gloo cannot send to itself, and no algorithm does."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sizes = [3, 1, 100_000, 2] if comm.size > 1 else []
    words = [torch.full((n,), 10 * comm.rank + i, dtype=torch.int32) for i, n in enumerate(sizes)]
    pending = [comm.sendrecv(block, right, left, len(block)) for block in words]
    for i, (n, message) in enumerate(zip(sizes, pending, strict=True)):
        arrived = message.wait()
        assert (len(arrived), set(arrived.tolist())) == (n, {10 * left + i})


def sendrecv_one_way(comm: Any) -> None:
    """The first rank only sends, the last only receives; the others have nothing to do, and may still call."""
    last = comm.size - 1
    if comm.size == 1:
        return
    if comm.rank == 0:
        assert len(comm.sendrecv(torch.arange(5, dtype=torch.int32), last, last, 0).wait()) == 0
    elif comm.rank == last:
        assert comm.sendrecv(None, 0, 0, 5).wait().tolist() == [0, 1, 2, 3, 4]
    else:
        assert len(comm.sendrecv(None, 0, 0, 0).wait()) == 0


def collectives_follow_each_other(comm: Any) -> None:
    """Many, of all kinds, without a pause: nothing of one is left in the next. A phase is a context."""
    ones = [1] * comm.size
    for turn in range(20):
        with comm.phase("outer"), comm.phase("inner"):
            assert comm.all_gather(torch.tensor([turn])).view(-1).tolist() == [turn] * comm.size
        assert comm.all_reduce(torch.tensor([turn])).item() == turn * comm.size
        assert comm.all_to_all_single(torch.full((comm.size,), turn), ones, ones).tolist() == [turn] * comm.size
        sendrecv_one_way(comm)


CONTRACT = (
    all_reduce_sums_in_place, several_sums_under_way, all_gather_is_in_rank_order, all_to_all_single_with_uneven_splits,
    all_to_all_small_and_large, all_to_all_v_of_any_sizes, sendrecv_around_the_ring, sendrecv_one_way,
    collectives_follow_each_other,
)  # fmt: skip


def keep(comm: Any) -> list[Any]:
    """Check every clause, bare and metered; return the rank, P and the bits of a sum, to be compared."""
    seen = []
    for each in (comm, MeteredComm(comm)):
        for clause in CONTRACT:
            clause(each)
        noise = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank)) * 10.0 ** (comm.rank * 3)
        seen.append((each.rank, each.size, each.all_reduce(noise).view(torch.int32).tolist()))
    return seen


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_contract(run: Run, size: int) -> None:
    by_rank = run(size, keep)
    sums = by_rank[0][0][2]
    assert by_rank == [[(rank, size, sums)] * 2 for rank in range(size)]


def test_a_comm_without_all_collectives_is_refused_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="all_to_all_single"):
        type("Half", (Comm,), {"all_reduce": print, "all_gather": print})()
