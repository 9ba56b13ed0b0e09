"""What one rank does while another fails: it ends too, soon, and says whose fault it was."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oktopk import Dense, MismatchError, OkTopk, OkTopkPaper, PeerError, ProcessGroupComm, Reducer, TopkA, run_local
from oktopk.algorithms.base import Reduced
from tests.harness import Job, Processes, collect, end, forking

AT_ONCE_S = 30.0  # far below the 60 s that a rank would wait for another, and far above what a busy machine takes
GROUP_S = 5.0
OWN_GROUP_S = 3.0  # of a group that is to break: no rank is held up for so long by a busy machine
CULPRIT = 1


@dataclass(frozen=True)
class Breaks:
    """An algorithm that fails on one rank at one step, before or after its collectives."""

    algorithm: Any
    at_step: int = 2
    late: bool = False

    def init(self, numel: int, comm: Any) -> Any:
        return self.algorithm.init(numel, comm)

    def reduce(self, acc: Tensor, state: Any, comm: Any) -> Reduced:
        breaks = comm.rank == CULPRIT and state.step == self.at_step
        if breaks and not self.late:
            raise OSError("disk full")
        reduced = self.algorithm.reduce(acc, state, comm)
        if breaks:
            raise OSError("disk full")
        return reduced


def reduce_steps(comm: Any, algorithm: Any) -> None:
    reducer = Reducer(algorithm, comm)
    for step in range(5):
        reducer.all_reduce(torch.full((100,), 1.0 + step))


ALGORITHMS = {
    "dense": Dense(),
    "topka": TopkA(density=0.1),
    "bounded": OkTopk(density=0.1),
    "paper": OkTopkPaper(density=0.1),
}
OTHERS = [name for name in ALGORITHMS if name != "bounded"]


def ends_of(size: int, fn: Callable[[Any], Any]) -> list[BaseException | None]:
    """Return what each rank of `fn` ended with, on threads."""
    ends: list[BaseException | None] = [None] * size

    def watched(comm: Any) -> None:
        try:
            fn(comm)
        except BaseException as error:
            ends[comm.rank] = error
            raise

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - which one is for the caller to say
        run_local(size, watched)
    assert caught.value in ends
    return ends


def named_the_culprit(error: Any) -> bool:
    return isinstance(error, PeerError) and "rank 1 failed: OSError: disk full" in str(error)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_raising_ends_all_threads_at_once_and_is_named(name: str, late: bool) -> None:
    start = time.perf_counter()
    ends = ends_of(4, lambda comm: reduce_steps(comm, Breaks(ALGORITHMS[name], late=late)))
    assert time.perf_counter() - start < AT_ONCE_S
    assert not any(thread.name.startswith("rank ") for thread in threading.enumerate())
    assert isinstance(ends[CULPRIT], OSError)
    assert all(named_the_culprit(ends[rank]) for rank in (0, 2, 3))


@pytest.mark.parametrize(
    "wait",
    [
        lambda comm: comm.all_reduce(torch.ones(3)),
        lambda comm: comm.all_gather(torch.ones(3)),
        lambda comm: comm.all_to_all_single(torch.ones(3), [1, 1, 1], [1, 1, 1]),
        lambda comm: comm.all_to_all_v([torch.ones(2)] * 3),
        lambda comm: comm.sendrecv(None, CULPRIT, CULPRIT, 4).wait(),
    ],
    ids=["all_reduce", "all_gather", "all_to_all", "exchange", "sendrecv"],
)
@pytest.mark.parametrize("leaves", [True, False])
def test_no_collective_waits_for_a_rank_that_is_gone(wait: Callable[[Any], Any], leaves: bool) -> None:
    def job(comm: Any) -> None:
        if comm.rank == CULPRIT and leaves:
            return
        if comm.rank == CULPRIT:
            raise KeyboardInterrupt
        wait(comm)

    start = time.perf_counter()
    ends = ends_of(3, job)
    assert time.perf_counter() - start < AT_ONCE_S
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
@pytest.mark.parametrize("name", ["bounded", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_one_rank_raising_ends_all_processes_within_the_groups_timeout(processes: Processes, name: str) -> None:
    """The culprit's process lives on, as under a supervisor, so that nothing but the timeout can free the others."""
    start = time.perf_counter()
    ends = processes.outcomes(Job(3, reduce_steps, (Breaks(ALGORITHMS[name]),), own_group_timeout_s=OWN_GROUP_S))
    assert time.perf_counter() - start < OWN_GROUP_S + AT_ONCE_S
    assert isinstance(ends[CULPRIT], OSError)
    assert all(named_the_culprit(ends[rank]) for rank in (0, 2))


@pytest.mark.processes
def test_a_process_that_returns_early_ends_the_others(processes: Processes) -> None:
    ends = processes.outcomes(Job(3, leave_early, (), own_group_timeout_s=OWN_GROUP_S))
    assert ends[CULPRIT] == "left"
    assert all(
        isinstance(ends[rank], PeerError) and "another rank died, left or was cut off" in str(ends[rank])
        for rank in (0, 2)
    )


def leave_early(comm: Any) -> str:
    if comm.rank != CULPRIT:
        comm.all_gather(torch.ones(1))
    return "left"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["bounded", pytest.param("paper", marks=pytest.mark.slow)])
def test_a_process_that_dies_of_its_error_ends_all(tmp_path: Path, name: str) -> None:
    """No handler, no supervisor: three plain processes, one of which raises."""
    context = forking()
    pipes, workers = [], []
    for rank in range(3):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_die, args=(rank, str(tmp_path / "store"), theirs, name), daemon=True)
        worker.start()
        pipes.append(ours)
        workers.append(worker)
    try:
        ends = collect(pipes, 40.0)
        for worker in workers:
            worker.join(GROUP_S + AT_ONCE_S)
        # Not 1 always: gloo may abort a process that ends without destroying its group.
        assert all(worker.exitcode not in (0, None) for worker in workers)
    finally:
        end(workers, 0.1)
    assert isinstance(ends[CULPRIT], OSError)
    assert all(named_the_culprit(ends[rank]) for rank in (0, 2))


def _die(rank: int, store: str, pipe: Connection, name: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timeout)
    try:
        reduce_steps(ProcessGroupComm(), Breaks(ALGORITHMS[name]))
    except Exception as error:
        pipe.send_bytes(pickle.dumps(error))
        raise SystemExit(1) from None
