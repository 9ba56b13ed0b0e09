"""How long does one `Reducer.all_reduce` take, and where does the time go?

    python -m benchmarks.reduce --numel 1000000 --ranks 2 --rounds 9

Steps: P gloo processes on this machine, each with its share of the cores. Ok-Topk in both modes, the dense all_reduce
and `torch.topk` take turns, so that a slow second hits all of them alike. The ranks start each round together, and the
slowest one's time counts, with the split of that rank: waiting for a peer is inside "exchange" and "gather". The first
round stands apart: it makes buffers, compares settings and, in paper mode, takes the exact thresholds that the others
reuse.

Selection: the work of a step before it sends (accumulate, select, pack) on one core, against a triad over arrays
of that size (`torch.add(grad, residual, alpha=2, out=acc)`, which reads two vectors and writes one) and against
`torch.topk(grad.abs(), k)`.
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

from oktopk import MeteredComm, OkTopk, OkTopkPaper, ProcessGroupComm, Reducer, Traffic, run_local
from oktopk.bench.machine import num_cores, threads_for, torch_threads
from oktopk.bench.models import POOL, heavy_tailed, make_pool
from oktopk.bench.processes import run_processes, spread
from oktopk.comm import Comm
from oktopk.selection import num_selected

NUMELS = (1_000_000, 27_569_568)
RANKS = (2, 4)
WARM_UP = 3
"""Laps before the ones that count; the first of them is reported by itself."""
PARTS = ("accumulate", "select", "pack")
PHASES = ("accumulate", "select", "agree", "pack", "exchange", "reduce", "gather", "apply", "other")

Sample = dict[str, Any]
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
    """Return seconds of what a step does before it sends, on one core, of a triad over its arrays, of torch.topk."""
    with torch_threads(1):
        samples = run_local(1, lambda comm: _selection_samples(comm, numel, density, rounds))[0]
    return _selection_summary(numel, num_selected(numel, density), samples)


def _selection_samples(comm: Comm, numel: int, density: float, rounds: int) -> list[dict[str, float]]:
    reducer, out = Reducer(OkTopk(density=density, wire="fp32", ranking="magnitude"), comm), torch.zeros(numel)
    pool, held, spare = (
        [heavy_tailed(numel, seed=i) for i in range(POOL)],
        heavy_tailed(numel, POOL),
        torch.zeros(numel),
    )
    samples = []
    for turn in range(WARM_UP + rounds):
        grad = pool[turn % POOL]
        reducer.all_reduce(grad, out=out)
        assert reducer.last is not None
        sample = {part: reducer.last.seconds[part] for part in PARTS}
        sample["selected"] = reducer.last.selected
        sample["triad"] = _seconds(lambda grad=grad: torch.add(grad, held, alpha=2.0, out=spare))
        sample["topk"] = _seconds(lambda grad=grad: torch.topk(grad.abs(), num_selected(numel, density)))
        samples.append(sample)
    return samples[WARM_UP:]


def _selection_summary(numel: int, k: int, samples: list[dict[str, float]]) -> dict[str, Any]:
    ours = [sum(sample[part] for part in PARTS) for sample in samples]
    return {
        "numel": numel,
        "k": k,
        "selected": median(sample["selected"] for sample in samples),
        "parts_s": {part: median(sample[part] for sample in samples) for part in PARTS},
        "ours_s": spread(ours),
        "triad_s": spread([sample["triad"] for sample in samples]),
        "topk_s": spread([sample["topk"] for sample in samples]),
        "over_triad": spread([our / sample["triad"] for our, sample in zip(ours, samples, strict=True)]),
        "over_topk": spread([our / sample["topk"] for our, sample in zip(ours, samples, strict=True)]),
    }


def time_steps(numel: int, size: int, density: float, rounds: int) -> dict[str, Any]:
    """Return the times of every contender on `size` processes, with the split by phase and the bytes sent."""
    ranks = run_processes(_time_rank, size, numel, density, rounds)
    contenders = {name: _step_summary([samples[name] for samples in ranks]) for name in ranks[0]}
    return {
        "numel": numel,
        "ranks": size,
        "threads": threads_for(size),
        "k": num_selected(numel, density),
        "contenders": contenders,
    }


def _step_summary(ranks: list[list[Sample]]) -> dict[str, Any]:
    """Return one contender's figures, given its samples by rank: each sample is its slowest rank's."""
    slowest = [max(samples, key=lambda sample: sample["seconds"]) for samples in zip(*ranks, strict=True)]
    counted = slowest[WARM_UP:]
    seconds = [sample["seconds"] for sample in counted]
    for sample in counted:
        sample["phases"]["other"] = sample["seconds"] - sum(sample["phases"].values())
    names = [name for name in PHASES if any(name in sample["phases"] for sample in counted)]
    return {
        "seconds": spread(seconds),
        "first_s": slowest[0]["seconds"],
        "sent_bytes": max(median(sample["sent_bytes"] for sample in samples[WARM_UP:]) for samples in ranks),
        "phases": {name: spread([sample["phases"].get(name, 0.0) for sample in counted]) for name in names},
    }


def _time_rank(numel: int, density: float, rounds: int) -> dict[str, list[Sample]]:
    return _samples(_contenders(numel, density), make_pool(numel), WARM_UP + rounds)


def _samples(contenders: dict[str, Contender], pool: list[Tensor], rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name, contender in contenders.items():
            grad = pool[turn % len(pool)]
            contender.prepare(grad)
            dist.barrier()
            seconds = _seconds(lambda contender=contender, grad=grad: contender.run(grad))
            samples[name].append({"seconds": seconds, **contender.account()})
    return samples


class Contender(Protocol):
    """What takes its turn."""

    def prepare(self, grad: Tensor) -> None:
        """Do what is not timed."""

    def run(self, grad: Tensor) -> None:
        """Do what is."""

    def account(self) -> Sample:
        """Return the bytes and the phases of the latest run."""


class Step:
    """One `Reducer.all_reduce` into a result that is there already."""

    def __init__(self, algorithm: OkTopk, numel: int) -> None:
        self.reducer, self.out = Reducer(algorithm, ProcessGroupComm()), torch.zeros(numel)

    def prepare(self, grad: Tensor) -> None:
        pass

    def run(self, grad: Tensor) -> None:
        self.reducer.all_reduce(grad, out=self.out)

    def account(self) -> Sample:
        assert self.reducer.last is not None
        return {"sent_bytes": self.reducer.last.sent_bytes, "phases": dict(self.reducer.last.seconds)}


class DenseSum:
    """`dist.all_reduce`, in place, as DDP would do it."""

    def __init__(self, numel: int) -> None:
        self.comm, self.buffer = MeteredComm(ProcessGroupComm()), torch.zeros(numel)

    def prepare(self, grad: Tensor) -> None:
        self.buffer.copy_(grad)

    def run(self, grad: Tensor) -> None:  # noqa: ARG002
        self.comm.all_reduce(self.buffer)

    def account(self) -> Sample:
        traffic: Traffic = self.comm.pop()
        return {"sent_bytes": traffic.sent_bytes, "phases": {}}


class TopK:
    """`torch.topk` on every rank at once: what an exact selection alone would cost."""

    def __init__(self, k: int) -> None:
        self.k = k

    def prepare(self, grad: Tensor) -> None:
        pass

    def run(self, grad: Tensor) -> None:
        torch.topk(grad.abs(), self.k)

    def account(self) -> Sample:
        return {"sent_bytes": 0, "phases": {}}


def _contenders(numel: int, density: float) -> dict[str, Contender]:
    return {
        "oktopk bounded": Step(OkTopk(density=density, wire="fp32", ranking="magnitude"), numel),
        "oktopk paper": Step(OkTopkPaper(density=density, wire="fp32", ranking="magnitude"), numel),
        "dense all_reduce": DenseSum(numel),
        "torch.topk alone": TopK(num_selected(numel, density)),
    }


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
    table = Table(title=f"what a step does before it sends, density {result['density']:g}, one core, ms")
    for column in ("n", *PARTS, "together", "triad", "over triad", "torch.topk", "over torch.topk"):
        table.add_column(column, justify="right")
    for row in result["selection"]:
        table.add_row(
            f"{row['numel']:,}",
            *(_ms(seconds) for seconds in row["parts_s"].values()),
            _ms_spread(row["ours_s"]),
            _ms_spread(row["triad_s"]),
            _ratio(row["over_triad"]),
            _ms_spread(row["topk_s"]),
            _ratio(row["over_topk"]),
        )
    return table


def _ratio(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reduce", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, action="append", help=f"elements; repeatable; default {NUMELS}")
    parser.add_argument("--ranks", type=int, action="append", help=f"processes; repeatable; default {RANKS}")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count")
    parser.add_argument("--json", type=Path, help="write the JSON line to this file as well")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    args.numel, args.ranks = args.numel or list(NUMELS), args.ranks or list(RANKS)
    return args


if __name__ == "__main__":
    main()
