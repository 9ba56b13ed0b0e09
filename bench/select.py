"""How long does it take to add, select and pack on a GPU, against what moving the bytes takes?

    python -m bench.select

The floor is 12 bytes an element (read gradient and residual, write residual) at the speed of a copy measured in the
same run. Beside it: `torch.topk(acc.abs(), k)`, which selects and does nothing else, and the whole bounded
`Reducer.all_reduce` of one rank over NCCL: that finds a threshold, exchanges, writes the result, too. Last line: JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import oktopk
from oktopk.algorithms.bounded import room
from oktopk.bench.gradients import heavy_tailed
from oktopk.kernels.blocks import HEADER_WORDS, Found, room_for
from oktopk.kernels.graphs import Graphs
from oktopk.partition import even_cuts
from oktopk.select import num_selected

NUMELS = (1_000_000, 27_569_568, 133_547_324, 536_870_912)
DENSITIES = (0.02, 0.01, 0.001)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZE = 4
"""Regions, and blocks, that are packed into."""

ROUNDS = 30


def seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Return the median time of `work` on the GPU."""
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
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
    from oktopk.kernels import triton as kernels

    grad, held = heavy_tailed(numel, 1, "cuda").to(dtype), heavy_tailed(numel, 2, "cuda")
    acc = torch.empty_like(held)
    k = num_selected(numel, density)
    capacity = room(k, 1.25, SIZE)
    threshold = kth_largest(held + grad, k)
    found = Found.make(numel, room_for(density), held.device)
    cuts, turn = even_cuts(numel, SIZE).cuda(), torch.zeros(1, dtype=torch.int32, device="cuda")
    graphs = Graphs()
    blocks = torch.zeros(SIZE, HEADER_WORDS + 2 * capacity, dtype=torch.int32, device="cuda")

    def whole(grad: Tensor) -> None:
        kernels.find(grad, held, acc, threshold, found)
        kernels.send(found, cuts, turn, blocks, capacity)

    copy = seconds(lambda: acc.copy_(held))
    find = seconds(lambda: kernels.find(grad, held, acc, threshold, found))
    both = seconds(lambda: graphs.run(whole, grad))  # launched as the library does it
    topk = seconds(lambda: acc.abs().topk(k), 5) if numel < 500_000_000 else None
    reducer = oktopk.Reducer(oktopk.OkTopk(density=density, wire="fp32"), oktopk.ProcessGroupComm())
    out = torch.empty_like(grad)
    step = seconds(lambda: reducer.all_reduce(grad, out=out))
    floor = copy * (8 + grad.element_size()) / 8
    return {
        "numel": numel,
        "density": density,
        "dtype": str(dtype).removeprefix("torch."),
        "copy_ms": copy * 1e3,
        "floor_ms": floor * 1e3,
        "find_ms": find * 1e3,
        "select_ms": both * 1e3,
        "over_floor": both / floor,
        "step_ms": step * 1e3,
        "step_over_floor": step / floor,
        "topk_ms": None if topk is None else topk * 1e3,
        "topk_over_ours": None if topk is None else topk / both,
        "selected": int(blocks[:, 0].sum()),
        "wanted": k,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title=f"accumulate + select + pack, {torch.cuda.get_device_name()}")
    for name in ("elements", "density", "gradient", "copy ms", "floor ms", "one pass ms", "with packing ms", "x floor",
                 "torch.topk ms", "x ours", "step ms", "x floor"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        topk = ("-", "-") if row["topk_ms"] is None else (f"{row['topk_ms']:.2f}", f"{row['topk_over_ours']:.1f}")
        table.add_row(
            f"{row['numel']:,}", f"{row['density']:.1%}", row["dtype"], f"{row['copy_ms']:.3f}",
            f"{row['floor_ms']:.3f}", f"{row['find_ms']:.3f}", f"{row['select_ms']:.3f}", f"{row['over_floor']:.2f}",
            *topk, f"{row['step_ms']:.3f}", f"{row['step_over_floor']:.2f}",
        )  # fmt: skip
    Console(width=140).print(table)


def main(arguments: list[str] | None = None) -> None:
    """Time all sizes and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", default=list(NUMELS))
    parser.add_argument("--density", type=float, nargs="+", default=list(DENSITIES))
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark wants a CUDA GPU, and there is none here; bench.reduce times the CPU")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for numel in chosen.numel:
        for density in chosen.density:
            for dtype in DTYPES.values():
                rows.append(time_one(numel, density, dtype))
                torch.cuda.empty_cache()
    dist.destroy_process_group()
    show(rows)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
