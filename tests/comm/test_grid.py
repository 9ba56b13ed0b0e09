"""A gather in two levels: the same rows and bytes as from all to all, in fewer messages, and every law on top of it."""

from typing import Any
from unittest import mock

import pytest
import torch

from oktopk import Dense
from oktopk.comm import LocalComm, MeteredComm, grid, process_group
from oktopk.comm.grid import gather_in_two_levels, grid_of, has_two_levels
from tests.cases import OKTOPK_COVER, Case, algorithms, trace
from tests.harness import Processes, on_threads
from tests.laws import check_every_law, same_run

NAMES = ("dense", "topka-bf16", *OKTOPK_COVER)


class InGrid(LocalComm):
    """A rank of `run_local` that gathers in two levels, whatever P is."""

    def __init__(self, comm: LocalComm) -> None:
        self.__dict__ = comm.__dict__

    def all_gather(self, block: torch.Tensor) -> torch.Tensor:
        if block.element_size() < 4:
            return super().all_gather(block)
        return gather_in_two_levels(self, block.contiguous().view(torch.int32)).view(block.dtype)


def in_grid(comm: Any, case: Case) -> Any:
    return trace(InGrid(comm), case)


@pytest.mark.parametrize("size", [1, 4, 6, 7, 64])
def test_it_returns_all_blocks_in_rank_order_in_few_messages(size: int) -> None:
    def job(comm: Any) -> tuple[Any, int, int]:
        metered = MeteredComm(comm)
        rows = gather_in_two_levels(metered, torch.tensor([comm.rank, -comm.rank], dtype=torch.int32))
        return rows.tolist(), metered.traffic.messages, metered.traffic.sent_bytes

    width, height = grid_of(size)
    rows = [[rank, -rank] for rank in range(size)]
    assert on_threads(size, job) == [(rows, width + height - 2, 8 * (size - 1))] * size


def test_few_ranks_and_prime_numbers_of_them_gather_directly() -> None:
    assert [size for size in (2, 63, 64, 67, 128, 509, 512) if has_two_levels(size)] == [64, 128, 512]


@pytest.mark.timeout(240)  # 64 ranks on a busy machine
@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 6) for name in NAMES), pytest.param("oktopk-bounded-as-is", 64, marks=pytest.mark.slow)],
)
def test_every_law_holds_and_no_bit_differs(name: str, size: int) -> None:
    case = Case(algorithms(0.05)[name], size, numel=3000, kind="heavy tails", steps=2)
    steps = on_threads(size, in_grid, case)
    check_every_law(case, steps)
    same_run(steps, on_threads(size, trace, case))


def test_density_1_equals_dense() -> None:
    means = []
    for algorithm in (algorithms(1.0)["oktopk-bounded-magnitude-fp32"], Dense()):
        case = Case(algorithm, size=6, numel=3000, kind="heavy tails", steps=1)
        means.append(on_threads(6, in_grid, case)[0][0].mean)
    assert torch.allclose(*means, rtol=1e-6, atol=1e-6 * float(means[1].abs().max()))


def with_few_ranks(comm: Any, case: Case) -> Any:
    two_levels = mock.patch.object(process_group, "gather_in_two_levels", wraps=gather_in_two_levels)
    with mock.patch.object(grid, "LEAST_RANKS", 4), two_levels as gather:
        steps = trace(comm, case)
    assert gather.call_count >= case.steps
    return steps


@pytest.mark.processes
@pytest.mark.parametrize("name", ["topka-bf16", "oktopk-bounded-as-is"])
def test_processes_gather_so_and_keep_every_law(name: str, processes: Processes) -> None:
    case = Case(algorithms(0.05)[name], 4, numel=3000, kind="heavy tails", steps=3)
    steps = processes.run(4, with_few_ranks, case)
    check_every_law(case, steps)
    same_run(steps, on_threads(4, trace, case))
