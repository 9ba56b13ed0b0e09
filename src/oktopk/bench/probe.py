"""The probe: what a call, a word and the computing take here, each measured by itself.

Nothing of it is the exchange that is predicted from it: calls are of other sizes, and computing is timed between the
messages of half the gradient, on all ranks at once, as they share the cores.
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
from oktopk.bench.stopwatch import Stopwatch
from oktopk.codec import WORD_BYTES
from oktopk.comm import Comm, ProcessGroupComm
from oktopk.cost import ring_words
from oktopk.reducer import Reducer
from oktopk.selection import num_selected

SHARE = 2
"""Computing is timed on numel / SHARE elements; on much fewer it would fit into a cache."""

SUM_SHARE = 8
"""An all_reduce is timed on numel / SUM_SHARE elements."""

LEAST_NUMEL = 4096
SMALL_CALLS = 15
BIG_CALLS = 3
WARM_UP = 2
REDUCTIONS = 5

Times = dict[str, Any]
"""Of one rank: small and big (seconds of each call, by collective), words (that a big one sends), computing (by entry:
for each lap the stretches of computing in seconds; None where it cannot be told from the rest)."""


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
    """Return on how many elements computing is timed."""
    return max(numel // SHARE, min(numel, LEAST_NUMEL))


def sum_name(dtype: torch.dtype) -> str:
    """Return what an all_reduce in this type is called.

    >>> sum_name(torch.float32), sum_name(torch.bfloat16)
    ('all_reduce', 'all_reduce bfloat16')
    """
    return "all_reduce" if dtype == torch.float32 else f"all_reduce {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class _Call:
    """A collective, ready to be called with next to nothing, and with so many words to send."""

    name: str
    small: Callable[[], object]
    big: Callable[[], object]
    words: int


def _calls(numel: int, entries: Sequence[Entry], comm: Comm) -> Iterable[_Call]:
    densities = [entry.density for entry in entries if entry.density is not None]
    words = max(LEAST_NUMEL, num_selected(numel, max(densities)) if densities else 0) // 2
    methods = [METHODS[entry.method] for entry in entries]
    dtypes = {torch.float32, *(method.dtype for method in methods if isinstance(method, AllReduce))}
    yield from _pair_calls(words, comm)
    yield from (_sum_call(max(numel // SUM_SHARE, LEAST_NUMEL), dtype, comm) for dtype in sorted(dtypes, key=str))


def _pair_calls(words: int, comm: Comm) -> Iterable[_Call]:
    """Yield the collectives by which pairs travel, with so many words for each peer."""

    def gather(words: int) -> Callable[[], object]:
        block = torch.zeros(words, dtype=torch.int32)
        return lambda: comm.all_gather(block)

    def to_all(words: int) -> Callable[[], object]:
        blocks, counts = torch.zeros(words * comm.size, dtype=torch.int32), [words] * comm.size
        return lambda: comm.all_to_all_single(blocks, counts, counts)

    def evenly(words: int) -> Callable[[], object]:
        blocks = torch.zeros(comm.size, words, dtype=torch.int32)
        return lambda: comm.all_to_all(blocks)

    def sendrecv(words: int) -> Callable[[], object]:
        block, to, source = torch.zeros(words, dtype=torch.int32), comm.rank + 1, comm.rank - 1
        return lambda: comm.sendrecv(block, to % comm.size, source % comm.size, words).wait()

    yield _Call("all_gather", gather(1), gather(words), words * (comm.size - 1))
    yield _Call("all_to_all_single", to_all(1), to_all(words), words * (comm.size - 1))
    yield _Call("all_to_all", evenly(1), evenly(words), words * (comm.size - 1))
    yield _Call("sendrecv", sendrecv(1), sendrecv(words), words)


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
    if isinstance(method, AllReduce):
        return _cast_stretches(method.dtype, numel)
    return None


def _reduction_stretches(algorithm: Algorithm, numel: int) -> list[list[float]]:
    """Return how long a rank computes before, between and after the messages of a reduction, in each of some laps."""
    stopwatch, pool, out = Stopwatch(ProcessGroupComm()), make_pool(numel), torch.zeros(numel)
    reducer, laps = Reducer(algorithm, stopwatch), []
    for turn in range(WARM_UP + REDUCTIONS):
        dist.barrier()
        stopwatch.start()
        reducer.all_reduce(pool[turn % len(pool)], out=out)
        laps.append(stopwatch.stop())
    return laps[WARM_UP:]


def _cast_stretches(dtype: torch.dtype, numel: int) -> list[list[float]]:
    """Return how long it takes to cast and to cast back: nothing, where `dtype` is what the gradient has."""
    grad, narrow = torch.zeros(numel), torch.zeros(numel, dtype=dtype)
    if dtype == grad.dtype:
        return [[0.0]] * REDUCTIONS
    laps = [[_seconds(lambda: narrow.copy_(grad)), _seconds(lambda: grad.copy_(narrow))] for _ in range(1 + REDUCTIONS)]
    return laps[1:]
