"""How long does one `Reducer.all_reduce` take, and where does the time go?

    python -m bench.reduce --numel 1000000 --ranks 2 --rounds 9

Steps: P gloo processes on this machine, each with its share of the cores. Ok-Topk in both modes, the dense all_reduce
and `torch.topk` take turns, so that a slow second hits all of them alike. The ranks start each lap together, and the
slowest one's time counts, with the split of that rank: waiting for a peer is inside "exchange" and "gather". The first
lap stands apart: it makes buffers, compares settings and, in paper mode, takes the exact thresholds that the others
reuse.

Selection: accumulating and selecting in one process, against `torch.topk` alone, and against the memory floor: the
bytes that have to move, at the speed at which `torch.add(a, b, out=c)` moves them in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from oktopk import Metered, OkTopk, ProcessGroupComm, Reducer, Traffic
from oktopk.bench.processes import num_cores, run_processes, spread, threads_for
from oktopk.feedback import Residual
from oktopk.select import Ranking, at_least, num_selected, sampled_threshold

NUMELS = (1_000_000, 27_569_568)
RANKS = (2, 4)
POOL = 3
"""Gradients made in advance and used in turn, so that making them is not timed."""
WARM_UP = 3
"""Laps before the ones that count; the first of them is reported by itself."""
PHASES = ("accumulate", "select", "agree", "pack", "exchange", "reduce", "gather", "apply", "other")

Lap = dict[str, Any]
"""One contender, one round, one rank: seconds, sent_bytes, phases (seconds by name)."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and the JSON line, and return what it holds."""
    args = _parse(argv)
    result = {
        "bench": "reduce",
        "hardware": hardware(),
        "density": args.density,
        "rounds": args.rounds,
        "selection": [time_selection(numel, args.density, args.rounds) for numel in args.numel],
        "steps": [time_steps(n, size, args.density, args.rounds) for n in args.numel for size in args.ranks],
    }
    _print(result)
    line = json.dumps(result, allow_nan=False)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return result


def hardware() -> dict[str, Any]:
    """Return what the figures depend on; a load beside ours makes them worthless, so it is on record."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"machine": platform.machine(), "cores": num_cores(), "load": load, "torch": torch.__version__}


def time_selection(numel: int, density: float, rounds: int) -> dict[str, Any]:
    """Return seconds of accumulating and selecting, of `torch.topk` on the same acc, and of the memory floor."""
    k, ranking = num_selected(numel, density), Ranking.by_magnitude(numel)
    grad, residual = heavy_tailed(numel, seed=1), Residual(numel, torch.float32, torch.device("cpu"))
    residual.held.copy_(heavy_tailed(numel, seed=2))  # fresh zeros would be one page of memory, read from the cache
    spare = torch.zeros_like(grad)
    laps = []
    for lap in range(-1, rounds):
        row = {"triad": _seconds(lambda: torch.add(grad, residual.held, out=spare))}
        row["accumulate"] = _seconds(lambda: residual.accumulate_(grad))
        acc = residual.accumulate_(grad)
        row["threshold"] = _seconds(lambda acc=acc, lap=lap: sampled_threshold(acc, k, ranking, seed=lap + 1))
        threshold = sampled_threshold(acc, k, ranking, seed=lap + 1)
        row["at_least"] = _seconds(lambda acc=acc, threshold=threshold: at_least(acc, threshold, ranking))
        row["topk"] = _seconds(lambda acc=acc: torch.topk(acc.abs(), k))
        row["selected"] = len(at_least(acc, threshold, ranking))
        laps.append(row)
    return _selection_summary(numel, k, laps[1:])


def _selection_summary(numel: int, k: int, laps: list[dict[str, float]]) -> dict[str, Any]:
    ours = [lap["accumulate"] + lap["threshold"] + lap["at_least"] for lap in laps]
    bytes_per_s = 12 * numel / median(lap["triad"] for lap in laps)
    floor_bytes = 16 * numel + 8 * k  # read grad and residual, write acc; read acc, write int64 indices
    return {
        "numel": numel,
        "k": k,
        "threads": torch.get_num_threads(),
        "selected": median(lap["selected"] for lap in laps),
        "ours_s": spread(ours),
        "topk_s": spread([lap["topk"] for lap in laps]),
        "ratio": spread([our / lap["topk"] for our, lap in zip(ours, laps, strict=True)]),
        "parts_s": {part: median(lap[part] for lap in laps) for part in ("accumulate", "threshold", "at_least")},
        "triad_s": spread([lap["triad"] for lap in laps]),
        "bytes_per_s": bytes_per_s,
        "floor_bytes": floor_bytes,
        "floor_s": floor_bytes / bytes_per_s,
    }


def time_steps(numel: int, size: int, density: float, rounds: int) -> dict[str, Any]:
    """Return the times of every contender on `size` processes, with the split by phase and the bytes sent."""
    ranks = run_processes(_time_rank, size, numel, density, rounds)
    contenders = {name: _step_summary([laps[name] for laps in ranks]) for name in ranks[0]}
    return {
        "numel": numel,
        "ranks": size,
        "threads": threads_for(size),
        "k": num_selected(numel, density),
        "contenders": contenders,
    }


def _step_summary(ranks: list[list[Lap]]) -> dict[str, Any]:
    """Return one contender's figures, given its laps by rank: each lap is its slowest rank's."""
    slowest = [max(laps, key=lambda lap: lap["seconds"]) for laps in zip(*ranks, strict=True)]
    counted = slowest[WARM_UP:]
    seconds = [lap["seconds"] for lap in counted]
    for lap in counted:
        lap["phases"]["other"] = lap["seconds"] - sum(lap["phases"].values())
    names = [name for name in PHASES if any(name in lap["phases"] for lap in counted)]
    return {
        "seconds": spread(seconds),
        "first_s": slowest[0]["seconds"],
        "sent_bytes": max(median(lap["sent_bytes"] for lap in laps[WARM_UP:]) for laps in ranks),
        "phases": {name: spread([lap["phases"].get(name, 0.0) for lap in counted]) for name in names},
    }


def _time_rank(numel: int, density: float, rounds: int) -> dict[str, list[Lap]]:
    pool = [heavy_tailed(numel, seed=100 * dist.get_rank() + i) for i in range(POOL)]
    return _laps(_contenders(numel, density), pool, WARM_UP + rounds)


def _laps(contenders: dict[str, Contender], pool: list[Tensor], rounds: int) -> dict[str, list[Lap]]:
    laps: dict[str, list[Lap]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, contender in contenders.items():
            grad = pool[turn % len(pool)]
            contender.prepare(grad)
            dist.barrier()
            seconds = _seconds(lambda contender=contender, grad=grad: contender.run(grad))
            laps[name].append({"seconds": seconds, **contender.account()})
    return laps


class Contender(Protocol):
    """What takes its turn."""

    def prepare(self, grad: Tensor) -> None:
        """Do what is not timed."""

    def run(self, grad: Tensor) -> None:
        """Do what is."""

    def account(self) -> Lap:
        """Return the bytes and the phases of the latest run."""


class Step:
    """One `Reducer.all_reduce` into a result that is there already."""

    def __init__(self, algorithm: OkTopk, numel: int) -> None:
        self.reducer, self.out = Reducer(algorithm, ProcessGroupComm()), torch.zeros(numel)

    def prepare(self, grad: Tensor) -> None:
        pass

    def run(self, grad: Tensor) -> None:
        self.reducer.all_reduce(grad, out=self.out)

    def account(self) -> Lap:
        assert self.reducer.last is not None
        return {"sent_bytes": self.reducer.last.sent_bytes, "phases": dict(self.reducer.last.seconds)}


class DenseSum:
    """`dist.all_reduce`, in place, as DDP would do it."""

    def __init__(self, numel: int) -> None:
        self.comm, self.buffer = Metered(ProcessGroupComm()), torch.zeros(numel)

    def prepare(self, grad: Tensor) -> None:
        self.buffer.copy_(grad)

    def run(self, grad: Tensor) -> None:  # noqa: ARG002
        self.comm.all_reduce(self.buffer)

    def account(self) -> Lap:
        traffic: Traffic = self.comm.take()
        return {"sent_bytes": traffic.sent_bytes, "phases": {}}


class TopK:
    """`torch.topk` on every rank at once: what an exact selection alone would cost."""

    def __init__(self, k: int) -> None:
        self.k = k

    def prepare(self, grad: Tensor) -> None:
        pass

    def run(self, grad: Tensor) -> None:
        torch.topk(grad.abs(), self.k)

    def account(self) -> Lap:
        return {"sent_bytes": 0, "phases": {}}


def _contenders(numel: int, density: float) -> dict[str, Contender]:
    return {
        "oktopk bounded": Step(OkTopk(density=density), numel),
        "oktopk paper": Step(OkTopk(density=density, mode="paper"), numel),
        "dense all_reduce": DenseSum(numel),
        "torch.topk alone": TopK(num_selected(numel, density)),
    }


def heavy_tailed(numel: int, seed: int) -> Tensor:
    """Return a gradient of which few elements carry most."""
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return gradient.pow_(3)


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _print(result: dict[str, Any]) -> None:
    console, here = Console(width=160), result["hardware"]
    console.print(f"{here['cores']} cores of {here['machine']}, load before the start {here['load']}")
    console.print(_selection_table(result))
    for steps in result["steps"]:
        console.print(_step_table(steps), _phase_table(steps))


def _selection_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"accumulate + select against torch.topk, density {result['density']:g}, one process, ms")
    for column in ("n", "accumulate", "threshold", "at_least", "together", "torch.topk", "ratio", "memory floor"):
        table.add_column(column, justify="right")
    for row in result["selection"]:
        ratio = row["ratio"]
        table.add_row(
            f"{row['numel']:,}",
            *(_ms(seconds) for seconds in row["parts_s"].values()),
            _ms_spread(row["ours_s"]),
            _ms_spread(row["topk_s"]),
            f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})",
            f"{_ms(row['floor_s'])} at {row['bytes_per_s'] / 1e9:.1f} GB/s",
        )
    return table


def _step_table(steps: dict[str, Any]) -> Table:
    title = f"one step, n = {steps['numel']:,}, P = {steps['ranks']}, {steps['threads']} thread(s) a rank"
    table = Table(title=title)
    for column in ("", "ms: median (min..max)", "over dense", "first step, ms", "MB sent a rank"):
        table.add_column(column, justify="right" if column else "left")
    dense = steps["contenders"]["dense all_reduce"]["seconds"]["median"]
    for name, row in steps["contenders"].items():
        ratio = row["seconds"]["median"] / dense
        sent = f"{row['sent_bytes'] / 1e6:.3f}"
        table.add_row(name, _ms_spread(row["seconds"]), f"{ratio:.2f}", _ms(row["first_s"]), sent)
    return table


def _phase_table(steps: dict[str, Any]) -> Table:
    table = Table(title="of that, by phase of the slowest rank, median ms")
    for column in ("", *PHASES):
        table.add_column(column, justify="right" if column else "left")
    for name, row in steps["contenders"].items():
        if len(row["phases"]) > 1:  # a step of ours; the others have no phases
            phases = row["phases"]
            table.add_row(name, *(_ms(phases[p]["median"]) if p in phases else "-" for p in PHASES))
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _ms_spread(spread: dict[str, float]) -> str:
    return f"{_ms(spread['median'])} ({_ms(spread['min'])}..{_ms(spread['max'])})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.reduce", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, action="append", help=f"elements; repeatable; default {NUMELS}")
    parser.add_argument("--ranks", type=int, action="append", help=f"processes; repeatable; default {RANKS}")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=9, help="laps that count")
    parser.add_argument("--json", type=Path, help="write the JSON line to this file as well")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    args.numel, args.ranks = args.numel or list(NUMELS), args.ranks or list(RANKS)
    return args


if __name__ == "__main__":
    main()
