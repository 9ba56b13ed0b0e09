"""How a case is run: as threads of this process, or as real gloo processes that wait for the next job.

A job is `fn(comm, *args)`; for processes `fn` has to be importable (a function of a test module), since it travels
by name.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import oktopk

GROUP_TIMEOUT_S = 20.0
JOB_TIMEOUT_S = 50.0  # below the 60 s that pytest gives a test, so that a job that hangs is named


def forking() -> Any:
    """Return the context that starts a process in milliseconds: a fork of a server that has imported all it needs.

    multiprocessing keeps one server for each test process, so that its list of imports has to serve every test.
    """
    context = multiprocessing.get_context("forkserver")
    ours = ["tests.ddp.mortal", "tests.train.runs", "oktopk.kernels.numba_cpu"]
    theirs = ["pytest", "torch.utils.tensorboard", "torch._dynamo"]  # DDP imports the last one, for a second
    context.set_forkserver_preload([*ours, *theirs])
    return context


def on_threads(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what every rank returned; raise what the first rank that failed raised."""
    return oktopk.run_local(size, lambda comm: fn(comm, *args), timeout=GROUP_TIMEOUT_S)


@dataclass(frozen=True)
class Job:
    """What the processes are asked to do: the last `size` of them run it, on a group of their own if it may break."""

    size: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    own_group_timeout_s: float | None = None


class Processes:
    """Gloo processes that stay: starting one costs seconds, a job milliseconds."""

    def __init__(self, size: int, folder: Path) -> None:
        context = forking()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()  # so that its end is seen as the end of the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what every rank returned; raise what the first rank, by number, raised."""
        outcomes = self.outcomes(Job(size, fn, args))
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, job: Job) -> list[Any]:
        """Return what every rank returned or raised."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(job))
        return collect(self._pipes, JOB_TIMEOUT_S)[-job.size :]

    def close(self) -> None:
        """Let the processes end; end those that do not."""
        for pipe in self._pipes:
            pipe.close()
        end(self._processes)


def collect(pipes: Sequence[Connection], timeout_s: float) -> list[Any]:
    """Return one pickled thing from each pipe."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        missing = {pipe: i for i, pipe in enumerate(pipes) if i not in answers}
        ready = wait(list(missing), timeout_s)
        assert ready, f"processes {sorted(missing.values())} gave no answer in {timeout_s:g} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            answers[missing[pipe]] = pickle.loads(pipe.recv_bytes())
    return [answers[i] for i in range(len(pipes))]


def end(processes: Sequence[Any], timeout_s: float = 10.0) -> None:
    """Wait for the processes, and leave none behind."""
    for process in processes:
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join(timeout_s)


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    """Run jobs until the pipe closes, which it also does when the tests die."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout)
    groups = {members: _group(size, members, GROUP_TIMEOUT_S) for members in range(1, size + 1)}
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # at once: taking gloo's threads apart takes seconds, and nothing is left to keep
        own = job.own_group_timeout_s
        group = groups[job.size] if own is None else _group(size, job.size, own)
        pipe.send_bytes(pickle.dumps(_outcome(job, group) if rank >= size - job.size else None))


def _group(size: int, members: int, timeout_s: float) -> Any:
    """Return the group of the *last* ranks, so that a rank's number in it is not its number in the world."""
    return dist.new_group(list(range(size - members, size)), timeout=timedelta(seconds=timeout_s))


def _outcome(job: Job, group: Any) -> Any:
    try:
        return job.fn(oktopk.ProcessGroupComm(group), *job.args)
    except Exception as error:
        return error
