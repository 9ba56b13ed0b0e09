"""How long does it take to add and select, against what moving the bytes takes?

    python -m benchmarks.select                  # on the GPU, if there is one
    python -m benchmarks.select --device cpu

On a GPU: add, select and write what was selected into a block for each of four owners; then pack these blocks as they
travel, indices in few bits and values in int8, and unpack as many. The floor of the first is 12 bytes an element (read
gradient and residual, write residual) at the speed of a copy measured in the same run. Beside it:
`torch.topk(acc.abs(), k)`, which selects and does nothing else; and the whole bounded `Reducer.all_reduce` of one rank
over NCCL, with float32 on the wire and with int8: that finds a threshold and writes the result, too. One rank
sends nothing, but packs and unpacks what it would.

On a CPU: the fused pass (add, and note what reaches a threshold) of the kernels that are in use, against the reference
in plain torch and a triad over the same arrays, with one thread and with all cores. Last line: JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import oktopk
from oktopk.algorithms.oktopk import capacity_of
from oktopk.bench.machine import num_cores, torch_threads
from oktopk.bench.models import heavy_tailed
from oktopk.bench.processes import spread
from oktopk.codec import Codec
from oktopk.cuda.graphs import Graphs
from oktopk.cuda.packing import Packing
from oktopk.cuda.reference import Found, room_for
from oktopk.feedback import FEW, Residual
from oktopk.kernels import REFERENCE, kernels_for
from oktopk.partition import even_cuts
from oktopk.selection import num_selected
from oktopk.words import HEADER_WORDS

NUMELS = (1_000_000, 27_569_568, 133_547_324, 536_870_912)
DENSITIES = (0.03, 0.01, 0.001)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZE = 4
"""Regions, and blocks, that are packed into."""

SAMPLES, ROUNDS = 7, 10
"""A sample has this many rounds of every kind of work: a host's speed changes, and launching is most of a small one."""


def seconds(work: Callable[[], Any]) -> float:
    """Return the median time of `work` on the GPU."""
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


def kth_largest(acc: Tensor, k: int) -> Tensor:
    """Return a threshold that about k elements reach, from a sample."""
    sample = acc[:: max(len(acc) // 1_000_000, 1)].abs()
    return sample.topk(max(k * len(sample) // len(acc), 1)).values[-1:].clone()


def time_one(numel: int, density: float, dtype: torch.dtype) -> dict[str, Any]:
    """Return the times of one size, density and dtype."""
    from oktopk.cuda import triton as kernels

    grad, held = heavy_tailed(numel, 1, "cuda").to(dtype), heavy_tailed(numel, 2, "cuda")
    acc = torch.empty_like(held)
    k = num_selected(numel, density)
    capacity = capacity_of(k, 1.25, SIZE)
    threshold = kth_largest(held + grad, k)
    found = Found(numel, room_for(density), held.device)
    cuts, turn = even_cuts(numel, SIZE).cuda(), torch.zeros(1, dtype=torch.int32, device="cuda")
    graphs, packing = Graphs(), Packing(Codec(numel, "int8"), capacity, SIZE, held.device)
    blocks = torch.zeros(SIZE, HEADER_WORDS + 2 * capacity, dtype=torch.int32, device="cuda")
    packed, back = blocks.new_zeros(SIZE, packing.words), torch.zeros_like(blocks)

    def whole(grad: Tensor) -> None:
        kernels.accumulate_compact(grad, held, acc, threshold, turn, found)
        kernels.pack_blocks(found, cuts, turn, blocks, capacity, packing.rooms)

    def launched() -> None:  # as the library does it
        graphs.run(whole, grad)
        graphs.capture()

    settings = (oktopk.OkTopk(density=density, wire=wire) for wire in ("fp32", "int8"))
    plain, int8 = (oktopk.Reducer(each, oktopk.ProcessGroupComm()) for each in settings)
    out = torch.empty_like(grad)
    work = {
        "copy": lambda: acc.copy_(held),
        "find": lambda: kernels.accumulate_compact(grad, held, acc, threshold, turn, found),
        "select": launched,
        "encode": lambda: kernels.encode(blocks, packed, packing.rows, packing),
        "decode": lambda: kernels.decode(packed, back, packing.rows, packing),
        "step": lambda: plain.all_reduce(grad, out=out),
        "int8_step": lambda: int8.all_reduce(grad, out=out),
        "topk": lambda: acc.abs().topk(k),
    }
    samples = [{name: seconds(each) for name, each in work.items()} for _ in range(SAMPLES)]
    bytes_moved = (8 + grad.element_size()) / 8  # of what a copy moves
    return {
        "numel": numel,
        "density": density,
        "dtype": str(dtype).removeprefix("torch."),
        **{f"{name}_ms": 1e3 * median(sample[name] for sample in samples) for name in work},
        "floor_ms": 1e3 * median(sample["copy"] for sample in samples) * bytes_moved,
        "over_floor": median(sample["select"] / sample["copy"] for sample in samples) / bytes_moved,
        "step_over_floor": median(sample["step"] / sample["copy"] for sample in samples) / bytes_moved,
        "int8_over_fp32": median(sample["int8_step"] / sample["step"] for sample in samples),
        "topk_over_ours": median(sample["topk"] / sample["select"] for sample in samples),
        "selected": int(blocks[:, 0].sum()),
        "wanted": k,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title=f"accumulate + select + pack, {torch.cuda.get_device_name()}")
    for name in ("elements", "density", "gradient", "copy ms", "floor ms", "one pass ms", "with packing ms", "x floor",
                 "torch.topk ms", "x ours", "encode ms", "decode ms", "fp32 step ms", "x floor", "int8 step ms",
                 "x fp32"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['numel']:,}", f"{row['density']:.1%}", row["dtype"], f"{row['copy_ms']:.3f}",
            f"{row['floor_ms']:.3f}", f"{row['find_ms']:.3f}", f"{row['select_ms']:.3f}", f"{row['over_floor']:.2f}",
            f"{row['topk_ms']:.2f}", f"{row['topk_over_ours']:.1f}", f"{row['encode_ms']:.3f}",
            f"{row['decode_ms']:.3f}", f"{row['step_ms']:.3f}", f"{row['step_over_floor']:.2f}",
            f"{row['int8_step_ms']:.3f}", f"{row['int8_over_fp32']:.2f}",
        )  # fmt: skip
    Console(width=200).print(table)


def time_on_cpu(numel: int, density: float, threads: int, rounds: int) -> dict[str, Any]:
    """Return the times of one size and density on the CPU."""
    residual = Residual(numel, torch.float32, torch.device("cpu"))
    grad, held, acc = heavy_tailed(numel, 1), residual.held.copy_(heavy_tailed(numel, 2)), residual.acc
    bounds, floors = np.array([0, numel]), kth_largest(held + grad, num_selected(numel, density)).double().numpy()
    kernels = kernels_for(acc)
    work = {
        "triad": lambda: torch.add(grad, held, alpha=2.0, out=acc),
        "fused": lambda: kernels.accumulate_above(grad, held, acc, bounds, floors, numel // FEW),
        "reference": lambda: REFERENCE.accumulate_above(grad, held, acc, bounds, floors, numel // FEW),
    }
    samples: dict[str, list[float]] = {name: [] for name in work}
    with torch_threads(threads):
        for _, (name, each) in itertools.product(range(rounds + 1), work.items()):
            start = time.perf_counter()
            each()
            samples[name].append(time.perf_counter() - start)
    times = {name: spread(each[1:]) for name, each in samples.items()}
    return {"numel": numel, "density": density, "threads": threads, "kernel": kernels.name, **times}


def show_cpu(rows: list[dict[str, Any]]) -> None:
    """Print the table of the CPU."""
    table = Table(title=f"add and select in one pass, {rows[0]['kernel']}, medians")
    for name in ("elements", "density", "threads", "triad ms", "fused ms", "x triad", "reference ms", "x fused"):
        table.add_column(name, justify="right")
    for row in rows:
        triad, fused, slow = (row[name]["median"] for name in ("triad", "fused", "reference"))
        table.add_row(
            f"{row['numel']:,}", f"{row['density']:.1%}", str(row["threads"]), f"{1e3 * triad:.2f}",
            f"{1e3 * fused:.2f}", f"{fused / triad:.2f}", f"{1e3 * slow:.2f}", f"{slow / fused:.1f}",
        )  # fmt: skip
    Console(width=120).print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Time all sizes, print them, and return what the JSON line holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--numel", type=int, nargs="+", help="default: 1 M to 537 M; on the CPU 1 M and 27.6 M")
    parser.add_argument("--density", type=float, nargs="+", default=list(DENSITIES))
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="on the GPU")
    parser.add_argument("--rounds", type=int, default=9, help="on the CPU")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu times the CPU")
    if chosen.device == "cpu":
        threads = sorted({1, num_cores()})
        each = itertools.product(chosen.numel or NUMELS[:2], chosen.density, threads)
        rows = [time_on_cpu(*case, chosen.rounds) for case in each]
        show_cpu(rows)
        name = "cpu"
    else:
        rows, name = (
            time_on_gpu(chosen.numel or list(NUMELS), chosen.density, chosen.dtype),
            torch.cuda.get_device_name(),
        )
        show(rows)
    result = {"bench": "select", "device": name, "torch": torch.__version__, "rows": rows}
    print(json.dumps(result))
    return result


def time_on_gpu(numels: list[int], densities: list[float], dtypes: list[str]) -> list[dict[str, Any]]:
    """Return the times of all sizes, densities and dtypes."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for numel, density, dtype in itertools.product(numels, densities, dtypes):
        rows.append(time_one(numel, density, DTYPES[dtype]))
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
