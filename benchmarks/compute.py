"""What does a rank compute in one step of `OkTopk()`, alone, and how many passes over memory is that?

    python -m benchmarks.compute --numel 27569568 --ranks 4 --rounds 16

P ranks make the steps as threads, and rank 0 keeps what it receives. Then rank 0 makes the same steps alone, with
these messages at hand, so that nothing waits. The figures are processor time of its one thread, and the results must
be the recorded ones, bit for bit. A pass is a triad over the step's vectors (`torch.add(grad, residual, alpha=2,
out=acc)`). Steps with a sweep or with turns count, too.
"""

import argparse
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from oktopk import OkTopk, Reducer, run_local
from oktopk.bench.machine import torch_threads
from oktopk.bench.models import POOL, heavy_tailed
from oktopk.bench.processes import spread
from oktopk.comm import Comm
from oktopk.comm.base import Pending

WARM_UP = 3
"""Steps that do not count: buffers and the first threshold are made."""


class Recorder(Comm):
    """Rank 0's comm, which keeps what the collectives return."""

    def __init__(self, comm: Comm, kept: list[Tensor]) -> None:
        self.rank, self.size, self._comm, self._kept = comm.rank, comm.size, comm, kept

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._keep(self._comm.all_reduce(tensor))

    def all_gather(self, block: Tensor) -> Tensor:
        return self._keep(self._comm.all_gather(block))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self._keep(self._comm.all_to_all_single(blocks, send, receive))

    def sendrecv(self, *_: Any, **__: Any) -> Pending:
        raise NotImplementedError("no step of Ok-Topk sends to one rank alone")

    def fail(self, error: BaseException) -> None:
        self._comm.fail(error)

    def _keep(self, result: Tensor) -> Tensor:
        self._kept.append(result.clone())
        return result


class Replay(Comm):
    """A comm that returns what was kept, and measures the processor time of each phase."""

    def __init__(self, kept: Sequence[Tensor], size: int) -> None:
        self.rank, self.size = 0, size
        self.seconds: dict[str, float] = {}
        self._kept = iter(kept)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(next(self._kept))

    def all_gather(self, block: Tensor) -> Tensor:  # noqa: ARG002
        return next(self._kept)

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:  # noqa: ARG002
        return next(self._kept)

    def sendrecv(self, *_: Any, **__: Any) -> Pending:
        raise NotImplementedError("no step of Ok-Topk sends to one rank alone")

    def fail(self, error: BaseException) -> None:
        raise error

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what it holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compute", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=27_569_568)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=OkTopk().density)
    parser.add_argument("--rounds", type=int, default=16, help="steps that count")
    args = parser.parse_args(argv)
    algorithm = OkTopk(density=args.density)
    with torch_threads(1):
        kept, sums = _record(algorithm, args.numel, args.ranks, WARM_UP + args.rounds)
        result = _replay(algorithm, args.numel, args.ranks, kept, sums)
    result = {"bench": "compute", **vars(args), **result}
    _print(result)
    print(json.dumps(result, allow_nan=False))
    return result


def _record(algorithm: OkTopk, numel: int, ranks: int, steps: int) -> tuple[list[Tensor], list[int]]:
    """Return what rank 0 receives in these steps, and a checksum of each result."""
    kept, sums = list[Tensor](), list[int]()

    def work(comm: Comm) -> None:
        reducer = Reducer(algorithm, Recorder(comm, kept) if comm.rank == 0 else comm)
        for mean in _steps(reducer, numel, comm.rank, steps):
            if comm.rank == 0:
                sums.append(zlib.crc32(mean.numpy()))

    run_local(ranks, work, timeout=600.0)
    return kept, sums


def _steps(reducer: Reducer, numel: int, rank: int, steps: int) -> Iterator[Tensor]:
    pool, out = [heavy_tailed(numel, seed=100 * rank + i) for i in range(POOL)], torch.zeros(numel)
    for number in range(steps):
        yield reducer.all_reduce(pool[number % POOL], out=out)


def _replay(algorithm: OkTopk, numel: int, ranks: int, kept: list[Tensor], sums: list[int]) -> dict[str, Any]:
    """Return seconds by phase, of a whole step, and of a triad, and the passes that a step is."""
    comm = Replay(kept, ranks)
    triad = (heavy_tailed(numel, POOL), heavy_tailed(numel, POOL + 1), torch.zeros(numel))
    steps = _steps(Reducer(algorithm, comm), numel, 0, len(sums))
    laps, whole, passes = list[dict[str, float]](), list[float](), list[float]()
    for number, wanted in enumerate(sums):
        comm.seconds, start = {}, time.thread_time()
        mean = next(steps)
        whole.append(time.thread_time() - start)
        if zlib.crc32(mean.numpy()) != wanted:
            raise RuntimeError(f"step {number} has other bits than when it was recorded")
        laps.append(comm.seconds)
        passes.append(_seconds(lambda: torch.add(triad[0], triad[1], alpha=2.0, out=triad[2])))
    step, triads = spread(whole[WARM_UP:]), spread(passes[WARM_UP:])
    return {
        "phases_s": {name: spread([lap.get(name, 0.0) for lap in laps[WARM_UP:]]) for name in laps[-1]},
        "step_s": step,
        "triad_s": triads,
        "passes": {each: step[each] / triads[each] for each in ("median", "min")},
    }


def _seconds(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"processor time of a rank, n = {result['numel']:,}, P = {result['ranks']}, ms")
    for column in ("", "median (min..max)"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in [*result["phases_s"].items(), ("step", result["step_s"]), ("triad", result["triad_s"])]:
        table.add_row(name, f"{1e3 * each['median']:.2f} ({1e3 * each['min']:.2f}..{1e3 * each['max']:.2f})")
    passes = result["passes"]
    table.add_row("passes", f"{passes['median']:.2f} ({passes['min']:.2f} by the least of each)")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
