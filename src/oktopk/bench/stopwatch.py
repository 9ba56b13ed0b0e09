"""`Stopwatch`: a comm that tells computing from everything else, by looking at the clock whenever it is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from oktopk.comm import Comm
from oktopk.comm.base import Collectives, Pending

T = TypeVar("T")


class Stopwatch(Collectives):
    """Hands every call on to another comm and writes down how long the rank computed before it.

    All ranks call the same collectives in the same order, so the n-th stretch of computing is the same one everywhere;
    waiting, for the network or for a slower rank, is in none.
    """

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm = comm
        self._since = time.perf_counter()
        self._stretches: list[float] = []

    def start(self) -> None:
        """Forget what was, and compute from now on."""
        self._stretches, self._since = [], time.perf_counter()

    def stop(self) -> list[float]:
        """Return the stretches of computing since `start`, in seconds."""
        return [*self._stretches, time.perf_counter() - self._since]

    def paused(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, in no stretch."""
        self._stretches.append(time.perf_counter() - self._since)
        result = call()
        self._since = time.perf_counter()
        return result

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Comm`."""
        return self.paused(lambda: self._comm.all_reduce(tensor))

    def all_gather(self, block: Tensor) -> Tensor:
        """See `Comm`."""
        return self.paused(lambda: self._comm.all_gather(block))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Comm`."""
        return self.paused(lambda: self._comm.all_to_all_single(blocks, send, receive))

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """See `Comm`."""
        return self.paused(lambda: self._comm.all_to_all(blocks))

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        """See `Comm`."""
        return _Paused(self, self.paused(lambda: self._comm.sendrecv(block, to, source, size, device)))

    def fail(self, error: BaseException) -> None:
        """See `Comm`."""
        self._comm.fail(error)


@dataclass(frozen=True)
class _Paused:
    stopwatch: Stopwatch
    pending: Pending

    def wait(self) -> Tensor:
        """See `Pending`."""
        return self.stopwatch.paused(self.pending.wait)
