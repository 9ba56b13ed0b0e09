"""Does the exchange overlap backward?

    sudo python -m benchmarks.overlap --mbit 100

A DDP net of about 8 buckets on P gloo processes, each a host of its own on a network that is slowed to `--mbit` (see
benchmarks.netlab: Linux and root; with --mbit 0 they talk over the loopback as it is, and there is little to overlap).
Three kinds of steps take turns:

    backward    forward and backward alone, under no_sync
    serial      forward, backward, then the exchange: an attachment whose clip needs the whole gradient's norm first
    overlapped  the attachment as it is

exchange = serial - backward; the figure to see is overlapped against backward + exchange. By default the link is so
slow that the exchange takes about as long as forward and backward, and most of it is the wire's time, not the
processor's: only waiting can overlap where every core is busy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import oktopk
from benchmarks.step import make_net
from oktopk.bench.machine import threads_for
from oktopk.bench.processes import run_processes, spread

WARM_UP = 3
NO_CLIP = 1e30
"""A norm that no gradient reaches: nothing is clipped, but it has to be computed before anything is sent."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=100, help="speed of the link; 0: as it is")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--density", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    shape = (args.width, args.layers, args.batch)
    ranks = run_processes(time_steps, args.ranks, shape, args.density, args.rounds, mbit=args.mbit or None)
    result = _summary(ranks, args)
    _print(result)
    print(json.dumps(result, allow_nan=False))
    return result


def time_steps(shape: tuple[int, int, int], density: float, rounds: int) -> dict[str, Any]:
    """Return the seconds of every step of every kind on this rank, and the number of exchanges in one."""
    width, layers, batch = shape
    bucket_mb = 4 * width * width / 2**20  # about one layer a bucket
    kinds = ("backward", "serial", "overlapped")
    models = {name: DistributedDataParallel(make_net(width, layers), bucket_cap_mb=bucket_mb) for name in kinds}
    algorithm = oktopk.OkTopk(density=density, wire="fp32", ranking="magnitude")
    serial = oktopk.attach(models["serial"], algorithm, dense_steps=0, clip=NO_CLIP)
    overlapped = oktopk.attach(models["overlapped"], algorithm, dense_steps=0)
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(WARM_UP + rounds):
        for name, model in models.items():
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            with model.no_sync() if name == "backward" else nullcontext():
                model(x).square().mean().backward()
            samples[name].append(time.perf_counter() - start)
    assert overlapped.last is not None
    buckets = len(overlapped.last.buckets)
    for handle in (serial, overlapped):
        handle.detach()
    return {"samples": {name: seconds[WARM_UP:] for name, seconds in samples.items()}, "buckets": buckets}


def _summary(ranks: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    samples = {
        name: [max(row) for row in zip(*(rank["samples"][name] for rank in ranks), strict=True)]
        for name in ranks[0]["samples"]
    }
    exchange = [s - b for s, b in zip(samples["serial"], samples["backward"], strict=True)]
    hidden = [(s - o) / e for s, o, e in zip(samples["serial"], samples["overlapped"], exchange, strict=True) if e > 0]
    return {
        "bench": "overlap",
        "mbit": args.mbit,
        "ranks": args.ranks,
        "threads": threads_for(args.ranks),
        "buckets": ranks[0]["buckets"],
        "seconds": {name: spread(seconds) for name, seconds in (*samples.items(), ("exchange", exchange))},
        "overlapped_over_serial": spread(
            [o / s for o, s in zip(samples["overlapped"], samples["serial"], strict=True)]
        ),
        "exchange_hidden": spread(hidden) if hidden else None,
    }


def _print(result: dict[str, Any]) -> None:
    seconds = result["seconds"]
    together = seconds["backward"]["median"] + seconds["exchange"]["median"]
    link = f"{result['mbit']} Mbit/s" if result["mbit"] else "loopback"
    table = Table(title=f"Overlap, {result['buckets']} exchanges a step, P = {result['ranks']}, {link}")
    for column in ("ms", "median", "min", "max"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    for name in ("backward", "exchange", "serial", "overlapped"):
        table.add_row(name, *(f"{1e3 * seconds[name][key]:.0f}" for key in ("median", "min", "max")))
    Console().print(table)
    Console().print(
        f"overlapped {1e3 * seconds['overlapped']['median']:.0f} ms, backward + exchange {1e3 * together:.0f} ms"
    )


if __name__ == "__main__":
    main()
