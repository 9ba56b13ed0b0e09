"""The probe: the seconds of a call, of a word and of the computing, and the seconds that they predict for an exchange.

No figure of it is taken from the exchange that it predicts. Calls have other sizes, and computing is timed between the
messages of half the gradient, on all ranks at once because they share the cores.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from oktopk.algorithms import Algorithm
from oktopk.bench.methods import METHODS, AllReduce, Entry, Ours
from oktopk.bench.models import make_pool
from oktopk.bench.processes import Setting
from oktopk.comm import Comm, Pending, ProcessGroupComm
from oktopk.cost import Call, Cost, Machine, exactly, predict, ring_words
from oktopk.reducer import Reducer
from oktopk.selection import num_selected
from oktopk.words import WORD_BYTES

SHARE = 2
"""Divisor of numel for computing, because far fewer elements would fit into a cache."""

SUM_SHARE = 8
"""Divisor of numel for the large all_reduce."""

LEAST_NUMEL = 4096
SMALL_CALLS = 15
BIG_CALLS = 3
WARM_UP = 2
REDUCTIONS = 5

MakeCall = Callable[[int], Callable[[], object]]  # from words a peer, or elements of a sum; it allocates the tensors

Times = dict[str, Any]
"""Times of one rank: small and big (seconds of each call, by collective), words (of a big call), computing (by entry:
the stretches of each round in seconds, or None if the method cannot be timed apart)."""


def predict_seconds(probed: dict[str, Any], entry: Entry, numel: int, size: int) -> float | None:
    """Return the seconds of one exchange of `numel` elements on `size` ranks; None without a model."""
    cost = cost_of(entry, numel, size)
    if cost is None:
        return None
    machine = Machine(alpha_s=probed["alpha_s"], beta_s=probed["beta_s_per_word"])
    computing = {(row["method"], row["density"]): row["seconds"] for row in probed["computing_s_per_element"]}
    return machine.seconds(cost, numel * computing[entry.method, entry.density])


def cost_of(entry: Entry, numel: int, size: int) -> Cost | None:
    """Return the cost of an exchange on the busiest rank; None if the method has no model."""
    method = METHODS[entry.method]
    if isinstance(method, Ours):
        algorithm = method.make(entry.density)
        return max((predict(algorithm, numel, size, rank) for rank in range(size)), key=lambda cost: cost.typical)
    if isinstance(method, AllReduce):
        words = ring_words(numel, size) * method.dtype.itemsize // WORD_BYTES
        return exactly(words, 2 * (size - 1), Call(_sum_name(method.dtype), words))
    return None


def probe_setting(numel: int, entries: Sequence[Entry], setting: Setting) -> dict[str, Any]:
    """Return the figures of a setting's machine, from a probe on each of its ranks."""
    with Console(stderr=True).status(f"{setting}: probe"):
        return figures_of(setting.run(_probe_rank, numel, entries), entries, numel)


def figures_of(ranks: Sequence[Times], entries: Sequence[Entry], numel: int) -> dict[str, Any]:
    """Return the figures of the ranks' probes: the slowest rank's time of each call and each stretch counts."""

    def typical(kind: str, name: str) -> float:
        return float(median(max(calls) for calls in zip(*(rank[kind][name] for rank in ranks), strict=True)))

    words, computing = ranks[0]["words"], []
    alpha_s = {name: typical("small", name) for name in words}
    for i, entry in enumerate(entries):
        rounds = [rank["computing"][i] for rank in ranks]
        seconds = None if rounds[0] is None else _critical_path(rounds) / computing_numel(numel)
        computing.append({"method": entry.method, "density": entry.density, "seconds": seconds})
    return {
        "alpha_s": alpha_s,
        "beta_s_per_word": {name: max(0.0, typical("big", name) - alpha_s[name]) / words[name] for name in words},
        "computing_s_per_element": computing,
    }


def _critical_path(ranks: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the sum over stretches of the slowest rank's seconds, each the median of the rounds."""
    slowest = [list(map(max, zip_longest(*stretches, fillvalue=0.0))) for stretches in zip(*ranks, strict=True)]
    return float(sum(map(median, zip_longest(*slowest, fillvalue=0.0))))


def _probe_rank(numel: int, entries: Sequence[Entry]) -> Times:
    """Return this rank's times."""
    times: Times = {"small": {}, "big": {}, "words": {}}
    for name, make_call, size, words in _collectives(numel, entries, ProcessGroupComm()):
        small, big = make_call(1), make_call(size)
        times["small"][name] = [_seconds(small) for _ in range(SMALL_CALLS)]
        times["big"][name] = [_seconds(big) for _ in range(1 + BIG_CALLS)][1:]
        times["words"][name] = words
    return {**times, "computing": [_computing(entry, computing_numel(numel)) for entry in entries]}


def computing_numel(numel: int) -> int:
    """Return the number of elements that computing is timed on."""
    return max(numel // SHARE, min(numel, LEAST_NUMEL))


def _collectives(numel: int, entries: Sequence[Entry], comm: Comm) -> list[tuple[str, MakeCall, int, int]]:
    """Return the name of each collective, its calls, the size of a large one, and the words that this one sends."""
    densities = [entry.density for entry in entries if entry.density is not None]
    words = max(LEAST_NUMEL, num_selected(numel, max(densities)) if densities else 0) // 2
    zeros, size = partial(torch.zeros, dtype=torch.int32), comm.size

    def send_on(block: torch.Tensor) -> None:
        comm.sendrecv(block, (comm.rank + 1) % size, (comm.rank - 1) % size, len(block)).wait()

    def make_sum(dtype: torch.dtype, n: int) -> Callable[[], object]:
        return partial(comm.all_reduce, torch.zeros(n, dtype=dtype))

    pairs: dict[str, MakeCall] = {
        "all_gather": lambda n: partial(comm.all_gather, zeros(n)),
        "all_to_all_single": lambda n: partial(comm.all_to_all_single, zeros(n * size), [n] * size, [n] * size),
        "all_to_all": lambda n: partial(comm.all_to_all, zeros(size, n)),
        "sendrecv": lambda n: partial(send_on, zeros(n)),
    }
    found = [(name, call, words, words * (1 if name == "sendrecv" else size - 1)) for name, call in pairs.items()]
    methods = [METHODS[entry.method] for entry in entries]
    dtypes = {torch.float32, *(method.dtype for method in methods if isinstance(method, AllReduce))}
    numel = max(numel // SUM_SHARE, LEAST_NUMEL)
    for dtype in sorted(dtypes, key=str):
        words = ring_words(numel, size) * dtype.itemsize // WORD_BYTES
        found.append((_sum_name(dtype), partial(make_sum, dtype), numel, words))
    return found


def _sum_name(dtype: torch.dtype) -> str:
    return "all_reduce" if dtype == torch.float32 else f"all_reduce {str(dtype).removeprefix('torch.')}"


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _computing(entry: Entry, numel: int) -> list[list[float]] | None:
    """Return for each round the stretches of a reduction, or of a cast and the cast back; None for PowerSGD."""
    method = METHODS[entry.method]
    if isinstance(method, Ours):
        return _reduction_stretches(method.make(entry.density), numel)
    if not isinstance(method, AllReduce):
        return None
    grad, narrow = torch.zeros(numel), torch.zeros(numel, dtype=method.dtype)
    casts = () if method.dtype == grad.dtype else (lambda: narrow.copy_(grad), lambda: grad.copy_(narrow))
    return [[_seconds(cast) for cast in casts] for _ in range(1 + REDUCTIONS)][1:]


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


def _paused(name: str) -> Any:
    """Return the method that calls `name` of the wrapped comm while the stopwatch is stopped."""
    return lambda self, *args: self.paused(lambda: getattr(self.comm, name)(*args))


class Stopwatch(Comm):
    """A comm that hands every call to another one and notes how long the rank computed before it.

    All ranks call the same collectives in the same order, so that the n-th stretch is the same one everywhere. Waiting
    for the network or for a slower rank is in none.
    """

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.start()

    def start(self) -> None:
        """Begin a round."""
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
        pending = self.paused(lambda: self.comm.sendrecv(*args))
        return Pending(lambda: self.paused(pending.wait))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks through the wrapped comm."""
        self.comm.fail(error)
