"""Ranks that may be killed, frozen or broken: processes of their own session, which tell what they do over a pipe.

They are forked from a server that has imported torch, so that a job starts in a fraction of a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import JsonlSink, OkTopk
from oktopk.algorithms.base import Reduced
from tests.ddp.harness import Net, attach, descend_, step_, weights_of
from tests.harness import end, forking

EXCHANGE_S = 5.0  # attach(timeout=...)
WORLD_S = 60.0  # init_process_group(timeout=...)
START_S = 40.0  # for everything before the first step, on a busy machine
FOREVER = 1_000_000
ERROR = 1  # the exit code of a rank that saw an error


@dataclass(frozen=True)
class Plan:
    """What every rank does."""

    steps: int = FOREVER
    algorithm: Any = field(default_factory=lambda: OkTopk(density=0.05))
    dense_steps: int = 2
    jsonl: str | None = None
    before_step: Callable[[int, int, Any], None] | None = None  # of rank, step, handle
    stays: bool = False  # after an error, wait for the end of the pipe, as under a supervisor


@dataclass(frozen=True)
class Breaks:
    """An algorithm that fails on one rank, at one of its steps."""

    algorithm: Any
    rank: int
    at_step: int

    def init(self, numel: int, comm: Any) -> Any:
        return self.algorithm.init(numel, comm)

    def reduce(self, acc: Tensor, state: Any, comm: Any) -> Reduced:
        if comm.rank == self.rank and state.step == self.at_step:
            raise OSError("disk full")
        return self.algorithm.reduce(acc, state, comm)


@dataclass
class Told:
    """What a rank told: its latest step, how it ended, and when."""

    step: int = -1
    error: str | None = None
    checksum: float | None = None
    at_s: float = 0.0
    gone: bool = False

    @property
    def said_all(self) -> bool:
        return self.error is not None or self.checksum is not None


class Mortals:
    """The ranks of one job. `with` it; at the end none is left."""

    def __init__(self, size: int, plan: Plan) -> None:
        context = forking()
        self.told = [Told() for _ in range(size)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(rank, size, theirs, plan), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def __enter__(self) -> Mortals:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        end(self._processes)
        for pipe in self._pipes:
            pipe.close()

    def send_signal(self, rank: int, number: int) -> float:
        """Signal a rank; return when."""
        os.kill(self._processes[rank].pid, number)
        return time.monotonic()

    def release(self) -> None:
        """Let ranks that stay after their error end."""
        for pipe in self._pipes:
            pipe.send("end")

    def wait_for_step(self, rank: int, step: int, timeout_s: float = START_S) -> None:
        self._listen(lambda: self.told[rank].step >= step, timeout_s, f"step {step} of rank {rank}")

    def wait_for_word(self, rank: int, timeout_s: float) -> Told:
        """Return what a rank told in the end: its error, or its checksum."""
        told = self.told[rank]
        self._listen(lambda: told.said_all or told.gone, timeout_s, f"a word of rank {rank}")
        assert told.said_all, f"rank {rank} went without a word: {self.told}"
        return told

    def wait_for_exit(self, rank: int, timeout_s: float) -> int:
        """Return a rank's exit code, once it and all that it may have started are gone."""
        process = self._processes[rank]
        self._listen(lambda: self.told[rank].gone, timeout_s, f"the end of rank {rank}")
        process.join(timeout_s)
        assert process.exitcode is not None, f"rank {rank} did not end in {timeout_s:g} s"
        with pytest.raises(ProcessLookupError):  # its session is empty
            os.killpg(process.pid, 0)
        return process.exitcode

    def _listen(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Note what ranks tell until `ready`."""
        give_up = time.monotonic() + timeout_s
        while not ready():
            here = {self._pipes[rank]: told for rank, told in enumerate(self.told) if not told.gone}
            came = wait(list(here), max(give_up - time.monotonic(), 0))
            assert came, f"waited {timeout_s:g} s for {what}: {self.told}"
            for pipe in came:
                try:
                    name, value = pipe.recv()
                except (EOFError, OSError):
                    name, value = "gone", True
                setattr(here[pipe], name, value)
                here[pipe].at_s = time.monotonic() if name in ("error", "checksum") else here[pipe].at_s


def _live(rank: int, size: int, pipe: Connection, plan: Plan) -> None:
    os.setsid()
    torch.set_num_threads(1)
    _join_world(rank, size, pipe)
    model = DDP(Net())
    sinks = [] if plan.jsonl is None else [JsonlSink(f"{plan.jsonl}{rank}")]
    attached = attach(model, plan.algorithm, dense_steps=plan.dense_steps, timeout=EXCHANGE_S, sinks=sinks)
    try:
        for step in range(plan.steps):
            if plan.before_step is not None:
                plan.before_step(rank, step, attached)
            step_(model, step)
            descend_(model)
            pipe.send(("step", step))
        assert attached.active
        pipe.send(("checksum", sum(float(weight.double().sum()) for weight in weights_of(model.module).values())))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        if plan.stays:
            pipe.recv()
        raise SystemExit(ERROR) from None
    finally:
        attached.detach()


def _join_world(rank: int, size: int, pipe: Connection) -> None:
    """Meet in a store that rank 0 hosts, as scripts do that set MASTER_ADDR."""
    timeout = timedelta(seconds=WORLD_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), size, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
