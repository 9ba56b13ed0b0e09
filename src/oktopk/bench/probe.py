"""The probe: the seconds of a call, of a word and of the computing, each measured by itself.

No figure of it is taken from the exchange that it predicts. Calls have other sizes, and computing is timed between the
messages of half the gradient, on all ranks at once because they share the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from oktopk.algorithms import Algorithm
from oktopk.bench.gradients import make_pool
from oktopk.bench.methods import METHODS, AllReduce, Entry, Ours
from oktopk.codec import WORD_BYTES
from oktopk.comm import Comm, ProcessGroupComm
from oktopk.comm.base import Collectives, Pending
from oktopk.cost import ring_words
from oktopk.reducer import Reducer
from oktopk.selection import num_selected

SHARE = 2
"""Divisor of numel for computing, because far fewer elements would fit into a cache."""

SUM_SHARE = 8
"""Divisor of numel for the large all_reduce."""

LEAST_NUMEL = 4096
SMALL_CALLS = 15
BIG_CALLS = 3
WARM_UP = 2
REDUCTIONS = 5

Times = dict[str, Any]
"""Times of one rank: small and big (seconds of each call, by collective), words (of a big call), computing (by entry:
the stretches of each round in seconds, or None if the method cannot be timed apart)."""


def probe_rank(numel: int, entries: Sequence[Entry]) -> Times:
    """Return this rank's times."""
    calls = {call.name: call for call in _calls(numel, entries, ProcessGroupComm())}
    return {
        "small": {name: [_seconds(call.small) for _ in range(SMALL_CALLS)] for name, call in calls.items()},
        "big": {name: [_seconds(call.big) for _ in range(1 + BIG_CALLS)][1:] for name, call in calls.items()},
        "words": {name: call.words for name, call in calls.items()},
        "computing": [_computing(entry, computing_numel(numel)) for entry in entries],
    }


def computing_numel(numel: int) -> int:
    """Return the number of elements that computing is timed on."""
    return max(numel // SHARE, min(numel, LEAST_NUMEL))


def sum_name(dtype: torch.dtype) -> str:
    """Return the name of an all_reduce in this type.

    >>> sum_name(torch.float32), sum_name(torch.bfloat16)
    ('all_reduce', 'all_reduce bfloat16')
    """
    return "all_reduce" if dtype == torch.float32 else f"all_reduce {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class _Call:
    """A collective: a call of one word a peer, a large call, and the words that the large one sends."""

    name: str
    small: Callable[[], object]
    big: Callable[[], object]
    words: int


def _calls(numel: int, entries: Sequence[Entry], comm: Comm) -> Iterable[_Call]:
    """Yield the collectives of sparse pairs, and the all_reduce of each dtype."""
    densities = [entry.density for entry in entries if entry.density is not None]
    words = max(LEAST_NUMEL, num_selected(numel, max(densities)) if densities else 0) // 2
    for name, call in _pair_calls(comm).items():
        yield _Call(name, call(1), call(words), words * (1 if name == "sendrecv" else comm.size - 1))
    methods = [METHODS[entry.method] for entry in entries]
    dtypes = {torch.float32, *(method.dtype for method in methods if isinstance(method, AllReduce))}
    yield from (_sum_call(max(numel // SUM_SHARE, LEAST_NUMEL), dtype, comm) for dtype in sorted(dtypes, key=str))


def _pair_calls(comm: Comm) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Return for each collective a function from words a peer to the call."""

    def gather(words: int) -> Callable[[], object]:
        block = torch.zeros(words, dtype=torch.int32)
        return lambda: comm.all_gather(block)

    def to_all_single(words: int) -> Callable[[], object]:
        blocks, counts = torch.zeros(words * comm.size, dtype=torch.int32), [words] * comm.size
        return lambda: comm.all_to_all_single(blocks, counts, counts)

    def to_all(words: int) -> Callable[[], object]:
        blocks = torch.zeros(comm.size, words, dtype=torch.int32)
        return lambda: comm.all_to_all(blocks)

    def sendrecv(words: int) -> Callable[[], object]:
        block, to, source = torch.zeros(words, dtype=torch.int32), comm.rank + 1, comm.rank - 1
        return lambda: comm.sendrecv(block, to % comm.size, source % comm.size, words).wait()

    return {"all_gather": gather, "all_to_all_single": to_all_single, "all_to_all": to_all, "sendrecv": sendrecv}


def _sum_call(numel: int, dtype: torch.dtype, comm: Comm) -> _Call:
    few, many = torch.zeros(1, dtype=dtype), torch.zeros(numel, dtype=dtype)
    words = ring_words(numel, comm.size) * dtype.itemsize // WORD_BYTES
    return _Call(sum_name(dtype), lambda: comm.all_reduce(few), lambda: comm.all_reduce(many), words)


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _computing(entry: Entry, numel: int) -> list[list[float]] | None:
    method = METHODS[entry.method]
    if isinstance(method, Ours):
        assert entry.density is not None
        return _reduction_stretches(method.make(entry.density), numel)
    return _cast_stretches(method.dtype, numel) if isinstance(method, AllReduce) else None


def _reduction_stretches(algorithm: Algorithm, numel: int) -> list[list[float]]:
    """Return for each round the seconds that a rank computes before, between and after its messages."""
    stopwatch, pool, out = Stopwatch(ProcessGroupComm()), make_pool(numel), torch.zeros(numel)
    reducer, rounds = Reducer(algorithm, stopwatch), []
    for number in range(WARM_UP + REDUCTIONS):
        dist.barrier()
        stopwatch.start()
        reducer.all_reduce(pool[number % len(pool)], out=out)
        rounds.append(stopwatch.stop())
    return rounds[WARM_UP:]


def _cast_stretches(dtype: torch.dtype, numel: int) -> list[list[float]]:
    """Return the seconds of a cast and of the cast back; zero if `dtype` is the gradient's."""
    grad, narrow = torch.zeros(numel), torch.zeros(numel, dtype=dtype)
    if dtype == grad.dtype:
        return [[0.0]] * REDUCTIONS
    casts = (lambda: narrow.copy_(grad), lambda: grad.copy_(narrow))
    return [[_seconds(cast) for cast in casts] for _ in range(1 + REDUCTIONS)][1:]


def _paused(name: str) -> Any:
    """Return the method that calls `name` of the wrapped comm while the stopwatch is stopped."""
    return lambda self, *args: self.paused(lambda: getattr(self.comm, name)(*args))


class Stopwatch(Collectives):
    """A comm that hands every call to another one and notes how long the rank computed before it.

    All ranks call the same collectives in the same order, so that the n-th stretch is the same one everywhere. Waiting
    for the network or for a slower rank is in none.
    """

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.start()

    def start(self) -> None:
        """Forget the stretches so far and start to compute."""
        self._stretches: list[float] = []
        self._since = time.perf_counter()

    def stop(self) -> list[float]:
        """Return the seconds of each stretch of computing since `start`."""
        return [*self._stretches, time.perf_counter() - self._since]

    def paused(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, whose time is in no stretch."""
        self._stretches.append(time.perf_counter() - self._since)
        result = call()
        self._since = time.perf_counter()
        return result

    all_reduce, all_gather = _paused("all_reduce"), _paused("all_gather")
    all_to_all_single, all_to_all = _paused("all_to_all_single"), _paused("all_to_all")

    def sendrecv(self, *args: Any) -> Pending:
        """Start the message, whose wait is in no stretch either."""
        return _PausedWait(self, self.paused(lambda: self.comm.sendrecv(*args)))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks about the error."""
        self.comm.fail(error)


@dataclass(frozen=True)
class _PausedWait:
    stopwatch: Stopwatch
    pending: Pending

    def wait(self) -> Any:
        """Return the block that arrived."""
        return self.stopwatch.paused(self.pending.wait)
