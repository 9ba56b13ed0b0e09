"""One contract, kept by every comm: threads and processes, bare and metered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from oktopk import MeteredComm
from oktopk.comm.process_group import LARGE_BYTES

SIZES = (1, 2, 3, 4)
Run = Callable[..., list[Any]]


def ranks_are_numbered(comm: Any) -> tuple[int, int]:
    return comm.rank, comm.size


def all_reduce_sums_in_place(comm: Any) -> None:
    total = comm.size * (comm.size + 1) // 2
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        tensor = torch.full((5,), comm.rank + 1, dtype=dtype)
        result = comm.all_reduce(tensor)
        assert result is tensor
        assert tensor.tolist() == [total] * 5


def all_reduce_is_exact_beyond_int32(comm: Any) -> None:
    assert comm.all_reduce(torch.tensor([2**40 + comm.rank])).item() == comm.size * 2**40 + sum(range(comm.size))


def all_reduce_of_nothing(comm: Any) -> None:
    assert comm.all_reduce(torch.empty(0)).shape == (0,)


def all_reduce_has_the_same_bits_everywhere(comm: Any) -> list[int]:
    noise = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank)) * 10.0 ** (comm.rank * 3)
    return comm.all_reduce(noise).view(torch.int32).tolist()


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


def all_gather_of_nothing(comm: Any) -> None:
    assert comm.all_gather(torch.empty(0)).shape == (comm.size, 0)


def all_gather_takes_a_view(comm: Any) -> None:
    column = torch.arange(6).view(3, 2)[:, 1]
    assert comm.all_gather(column).tolist() == [[1, 3, 5]] * comm.size


def all_to_all_with_uneven_splits(comm: Any) -> None:
    """Rank r sends to rank i r + 2i numbers (rank 0 sends itself none) that say where they are from."""
    send = [comm.rank + 2 * peer for peer in range(comm.size)]
    receive = [peer + 2 * comm.rank for peer in range(comm.size)]
    for dtype in (torch.int32, torch.int64, torch.float32):
        blocks = torch.cat([torch.full((n,), 100 * comm.rank + peer, dtype=dtype) for peer, n in enumerate(send)])
        came = comm.all_to_all_single(blocks, send, receive)
        assert came.tolist() == [100 * peer + comm.rank for peer, n in enumerate(receive) for _ in range(n)]
        assert came.dtype == dtype


def all_to_all_with_nothing_at_all(comm: Any) -> None:
    zeros = [0] * comm.size
    assert comm.all_to_all_single(torch.empty(0, dtype=torch.int32), zeros, zeros).shape == (0,)


def all_to_all_where_one_rank_gets_everything(comm: Any) -> None:
    last = comm.size - 1
    send = [4 if peer == last else 0 for peer in range(comm.size)]
    receive = [4 if comm.rank == last else 0] * comm.size
    came = comm.all_to_all_single(torch.full((4,), comm.rank), send, receive)
    assert came.tolist() == ([peer for peer in range(comm.size) for _ in range(4)] if comm.rank == last else [])


def all_to_all_even_small_and_large(comm: Any) -> None:
    for words in (0, 1, 3, LARGE_BYTES // 4 + 1):
        blocks = torch.arange(comm.size).repeat_interleave(words).view(comm.size, words).int() + 100 * comm.rank
        came = comm.all_to_all(blocks)
        assert came.shape == blocks.shape
        assert all(bool((row == 100 * peer + comm.rank).all()) for peer, row in enumerate(came))


def exchange_of_any_sizes(comm: Any) -> None:
    blocks = [torch.full((comm.rank * peer,), 10 * comm.rank + peer, dtype=torch.int32) for peer in range(comm.size)]
    came = comm.all_to_all_v(blocks)
    assert [block.tolist() for block in came] == [
        [10 * peer + comm.rank] * (peer * comm.rank) for peer in range(comm.size)
    ]


def swap_around_the_ring(comm: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:  # nobody to write to: gloo cannot send to itself, and no algorithm does
        return
    block = torch.tensor([comm.rank, 7], dtype=torch.int32)
    assert comm.sendrecv(block, right, left, 2).wait().tolist() == [left, 7]


def swaps_in_flight_keep_their_order(comm: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    sizes = [3, 1, 100_000, 2]
    pending = [comm.sendrecv(torch.full((n,), i, dtype=torch.int32), right, left, n) for i, n in enumerate(sizes)]
    for i, (n, letter) in enumerate(zip(sizes, pending, strict=True)):
        arrived = letter.wait()
        assert (len(arrived), set(arrived.tolist())) == (n, {i})


def swap_one_way(comm: Any) -> None:
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
    """Many, of all kinds, without a pause: nothing of one is left in the next."""
    ones = [1] * comm.size
    for turn in range(20):
        assert comm.all_gather(torch.tensor([turn])).view(-1).tolist() == [turn] * comm.size
        assert comm.all_reduce(torch.tensor([turn])).item() == turn * comm.size
        assert comm.all_to_all_single(torch.full((comm.size,), turn), ones, ones).tolist() == [turn] * comm.size
        swap_around_the_ring(comm)


def a_phase_is_a_context(comm: Any) -> None:
    with comm.phase("outer"), comm.phase("inner"):
        assert comm.all_reduce(torch.ones(1)).item() == comm.size


CONTRACT = [
    all_reduce_sums_in_place,
    all_reduce_is_exact_beyond_int32,
    all_reduce_of_nothing,
    several_sums_under_way,
    all_gather_is_in_rank_order,
    all_gather_of_nothing,
    all_gather_takes_a_view,
    all_to_all_with_uneven_splits,
    all_to_all_with_nothing_at_all,
    all_to_all_where_one_rank_gets_everything,
    all_to_all_even_small_and_large,
    exchange_of_any_sizes,
    swap_around_the_ring,
    swaps_in_flight_keep_their_order,
    swap_one_way,
    collectives_follow_each_other,
    a_phase_is_a_context,
]


def keep(comm: Any, metered: bool, clauses: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """Return what each clause gives, one after the other; an assertion that fails is in a function named after it."""
    comm = MeteredComm(comm) if metered else comm
    return [clause(comm) for clause in clauses]


@pytest.mark.parametrize("metered", [False, True], ids=["bare", "metered"])
@pytest.mark.parametrize("size", SIZES)
def test_the_contract(run: Run, size: int, metered: bool) -> None:
    run(size, keep, metered, CONTRACT)


@pytest.mark.parametrize("metered", [False, True], ids=["bare", "metered"])
@pytest.mark.parametrize("size", SIZES)
def test_results_are_in_rank_order(run: Run, size: int, metered: bool) -> None:
    assert run(size, keep, metered, [ranks_are_numbered]) == [[(rank, size)] for rank in range(size)]


@pytest.mark.parametrize("metered", [False, True], ids=["bare", "metered"])
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_has_the_same_bits_on_every_rank(run: Run, size: int, metered: bool) -> None:
    first, *others = run(size, keep, metered, [all_reduce_has_the_same_bits_everywhere])
    assert all(other == first for other in others)
