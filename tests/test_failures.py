"""What one rank does while another fails: it ends too, soon, and says whose fault it was."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from oktopk import Dense, MismatchError, OkTopk, OkTopkPaper, PeerError, Reducer, TopkA, run_local
from oktopk.algorithms.base import Reduced
from tests.harness import Processes

AT_ONCE_S = 30.0  # far below the 60 s that a rank would wait for another, and far above what a busy machine takes
OWN_GROUP_S = 3.0  # of a group that is to break: no rank is held up for so long by a busy machine
CULPRIT, AT_STEP = 1, 2


@dataclass(frozen=True)
class Breaks:
    """An algorithm that fails on one rank at one step, before or after its collectives."""

    algorithm: Any
    late: bool = False

    def init(self, numel: int, comm: Any) -> Any:
        return self.algorithm.init(numel, comm)

    def reduce(self, acc: Tensor, state: Any, comm: Any) -> Reduced:
        breaks = comm.rank == CULPRIT and state.step == AT_STEP
        if breaks and self.late:
            self.algorithm.reduce(acc, state, comm)
        if breaks:
            raise OSError("disk full")
        return self.algorithm.reduce(acc, state, comm)


def reduce_steps(comm: Any, algorithm: Any) -> None:
    reducer = Reducer(algorithm, comm)
    for step in range(5):
        reducer.all_reduce(torch.full((100,), 1.0 + step))


BOUNDED = OkTopk(density=0.1)


def ends_of(size: int, fn: Callable[[Any], Any]) -> list[BaseException | None]:
    """Return what each rank of `fn` ended with, on threads, at once."""
    ends: list[BaseException | None] = [None] * size

    def watched(comm: Any) -> None:
        try:
            fn(comm)
        except BaseException as error:
            ends[comm.rank] = error
            raise

    start = time.perf_counter()
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one is for the caller to say
        run_local(size, watched)
    assert time.perf_counter() - start < AT_ONCE_S
    assert caught.value in ends
    return ends


def named_the_culprit(error: Any) -> bool:
    return isinstance(error, PeerError) and "rank 1 failed: OSError: disk full" in str(error)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("algorithm", [Dense(), TopkA(density=0.1), BOUNDED, OkTopkPaper(density=0.1)], ids=str)
def test_one_rank_raising_ends_all_threads_at_once_and_is_named(algorithm: Any, late: bool) -> None:
    ends = ends_of(4, lambda comm: reduce_steps(comm, Breaks(algorithm, late=late)))
    assert not any(thread.name.startswith("rank ") for thread in threading.enumerate())
    assert isinstance(ends[CULPRIT], OSError)
    assert all(named_the_culprit(ends[rank]) for rank in (0, 2, 3))


@pytest.mark.parametrize("wait", [
    lambda comm: comm.all_reduce(torch.ones(3)),
    lambda comm: comm.all_gather(torch.ones(3)),
    lambda comm: comm.all_to_all_single(torch.ones(3), [1, 1, 1], [1, 1, 1]),
    lambda comm: comm.all_to_all_v([torch.ones(2)] * 3),
    lambda comm: comm.sendrecv(None, CULPRIT, CULPRIT, 4).wait(),
], ids=["all_reduce", "all_gather", "all_to_all", "exchange", "sendrecv"])  # fmt: skip
@pytest.mark.parametrize("leaves", [True, False])
def test_no_collective_waits_for_a_rank_that_is_gone(wait: Callable[[Any], Any], leaves: bool) -> None:
    def job(comm: Any) -> None:
        if comm.rank == CULPRIT and leaves:
            return
        if comm.rank == CULPRIT:
            raise KeyboardInterrupt
        wait(comm)

    ends = ends_of(3, job)
    said = "rank 1 returned" if leaves else "rank 1 failed: KeyboardInterrupt"
    assert all(said in str(ends[rank]) and isinstance(ends[rank], PeerError) for rank in (0, 2))


def test_ranks_in_different_collectives_or_with_different_shapes_are_told() -> None:
    def job(comm: Any) -> None:
        (comm.all_gather if comm.rank == CULPRIT else comm.all_reduce)(torch.ones(2))

    ends = ends_of(3, job)
    assert all(isinstance(error, (MismatchError, PeerError)) for error in ends)
    assert all("rank 0: all_reduce, rank 1: all_gather, rank 2: all_reduce" in str(error) for error in ends)
    ends = ends_of(3, lambda comm: comm.all_gather(torch.ones(2 + (comm.rank == CULPRIT))))
    assert all("(2,), (3,), (2,)" in str(error) for error in ends)


def test_a_wait_on_threads_ends_with_its_timeout() -> None:
    given_up = threading.Event()

    def job(comm: Any) -> None:
        if comm.rank == CULPRIT:
            assert given_up.wait(AT_ONCE_S)
            return
        try:
            comm.all_gather(torch.ones(1))
        finally:
            given_up.set()

    with pytest.raises(PeerError, match=r"waited 0.1 s in all_gather"):
        run_local(2, job, timeout=0.1)


@pytest.mark.processes
def test_one_rank_raising_ends_all_processes_within_the_groups_timeout(processes: Processes) -> None:
    """The culprit's process lives on, as under a supervisor, so that nothing but the timeout can free the others."""
    start = time.perf_counter()
    ends = processes.outcomes(3, reduce_steps, Breaks(BOUNDED), timeout_s=OWN_GROUP_S)
    assert time.perf_counter() - start < OWN_GROUP_S + AT_ONCE_S
    assert isinstance(ends[CULPRIT], OSError)
    assert all(named_the_culprit(ends[rank]) for rank in (0, 2))


@pytest.mark.processes
def test_a_process_that_returns_early_ends_the_others(processes: Processes) -> None:
    ends = processes.outcomes(3, leave_early, timeout_s=OWN_GROUP_S)
    assert ends[CULPRIT] == "left"
    for rank in (0, 2):
        assert isinstance(ends[rank], PeerError)
        assert "another rank died, left or was cut off" in str(ends[rank])


def leave_early(comm: Any) -> str:
    if comm.rank != CULPRIT:
        comm.all_gather(torch.ones(1))
    return "left"
