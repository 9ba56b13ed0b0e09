"""How a case is run: as threads of this process, or as real gloo processes that wait for the next job.

A job is `fn(comm, *args)`; for processes `fn` has to be importable (a function of a test module), since it travels
by name.
"""

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

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
    theirs = ["pytest", "torch.utils.tensorboard", "torch._dynamo", "torch.distributed.fsdp"]  # DDP needs the third
    context.set_forkserver_preload([*ours, *theirs])
    return context


def on_threads(size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what every rank returned; raise what the first rank that failed raised."""
    return oktopk.run_local(size, lambda comm: fn(comm, *args), timeout=GROUP_TIMEOUT_S)


class Processes:
    """Ranks as gloo processes, those of `worlds`: a rank's number in its group is not its number in the world."""

    def __init__(self, worlds: Any, most: int) -> None:
        self._worlds, self._most = worlds, most

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what every rank returned; raise what the first rank, by number, raised."""
        outcomes = self.outcomes(size, fn, *args)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = GROUP_TIMEOUT_S) -> list[Any]:
        """Return what every rank returned or raised; a wait in their group ends after `timeout_s`."""
        return self._worlds.run(min(size + 1, self._most), _in_last, size, fn, args, timeout_s)[-size:]


def _in_last(size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
    """Return what `fn` returned or raised in the group of the last `size` ranks."""
    world = dist.get_world_size()
    group = dist.new_group(list(range(world - size, world)), timeout=timedelta(seconds=timeout_s))
    try:
        return fn(oktopk.ProcessGroupComm(group), *args) if dist.get_rank() >= world - size else None
    except Exception as error:
        return pickle.loads(pickle.dumps(error))  # without its frames, which hold the group
    finally:
        dist.barrier()  # all stay until the last is done: no broken group is freed by the end of a rank


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
