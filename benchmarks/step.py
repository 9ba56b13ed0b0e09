"""Does attaching cost anything while the steps are still dense, and what does a sparse step cost?

    python -m benchmarks.step --ranks 2 --rounds 15
    sudo python -m benchmarks.step --ranks 2 --rounds 30 --mbit 1000

One DDP net on P gloo processes of this machine: over the loopback, where there is nothing to gain, or with --mbit each
on a host of its own, in the lab. Plain DDP, DDP with torch's own hook that does nothing else, an attachment in its
dense phase and one in its sparse phase take turns step by step; the slowest rank's time counts. The figure to hold is
dense / plain, step by step: at most 1.05 in the median. The last line of the table says whether it is held.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.bench.machine import threads_for
from oktopk.bench.processes import run_processes, spread

WARM_UP = 4
MOST_DENSE_OVER_PLAIN = 1.05
OVER = {"torch's hook": "hook_over_plain", "dense phase": "dense_over_plain", "sparse phase": "sparse_over_plain"}
"""The contenders, and the names of their ratios. torch's hook: its `allreduce_hook`, what any comm hook costs."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="of the net's hidden layers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--batch", type=int, default=256, help="small: the exchange is all there is; large: it is nothing"
    )
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mbit", type=float, help="of each host's link, in the lab (root); without it, the loopback")
    args = parser.parse_args(argv)
    shape = (args.width, args.layers, args.batch)
    result = {
        "bench": "step",
        "ranks": args.ranks,
        "batch": args.batch,
        "mbit": args.mbit,
        "threads": threads_for(args.ranks),
        "parameters": sum(p.numel() for p in make_net(*shape[:2]).parameters()),
        **summary(run_processes(time_steps, args.ranks, shape, args.density, args.rounds, mbit=args.mbit)),
    }
    _print(result)
    print(json.dumps(result, allow_nan=False))
    return result


def summary(ranks: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the seconds of the slowest rank, their ratios to plain DDP's of the same round, and what is held."""
    samples = {name: [max(row) for row in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    result: dict[str, Any] = {"seconds": {name: spread(seconds) for name, seconds in samples.items()}}
    for name, key in OVER.items():
        result[key] = spread([mine / plain for mine, plain in zip(samples[name], samples["plain DDP"], strict=True)])
    result["dense_holds"] = result["dense_over_plain"]["median"] <= MOST_DENSE_OVER_PLAIN
    return result


def make_net(width: int, layers: int) -> nn.Sequential:
    """Return the same net on every rank."""
    torch.manual_seed(0)
    hidden = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def time_steps(shape: tuple[int, int, int], density: float, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step of every contender on this rank."""
    width, layers, batch = shape
    models = {name: DistributedDataParallel(make_net(width, layers)) for name in ("plain DDP", *OVER)}
    models["torch's hook"].register_comm_hook(None, default_hooks.allreduce_hook)
    algorithm = oktopk.OkTopk(density=density, wire="fp32", ranking="magnitude")
    attached = [
        oktopk.attach(models["dense phase"], algorithm, dense_steps=10**6),
        oktopk.attach(models["sparse phase"], algorithm, dense_steps=0),
    ]
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    samples: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(WARM_UP + rounds):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            model(x).square().mean().backward()
            samples[name].append(time.perf_counter() - start)
    for handle in attached:
        handle.detach()
    return {name: seconds[WARM_UP:] for name, seconds in samples.items()}


def _print(result: dict[str, Any]) -> None:
    link = "loopback" if result["mbit"] is None else f"{result['mbit']:g} Mbit/s"
    title = f"DDP step, {result['parameters']:,} parameters, batch {result['batch']}, P = {result['ranks']}, {link}"
    held = "held" if result["dense_holds"] else "NOT held"
    table = Table(title=title, caption=f"dense phase / plain DDP at most {MOST_DENSE_OVER_PLAIN}: {held}")
    for column in ("", "median ms", "min", "max", "over plain DDP"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in result["seconds"].items():
        ratio = f"{result[OVER[name]]['median']:.3f}" if name in OVER else "1"
        table.add_row(name, *(f"{1e3 * seconds[key]:.1f}" for key in ("median", "min", "max")), ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
