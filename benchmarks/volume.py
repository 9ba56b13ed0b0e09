"""Do words per rank grow with P?

    python -m benchmarks.volume --ranks 4 --ranks 64

Every algorithm on P ranks as threads, on gradients whose large elements stay where they are and coincide between
ranks, as those of a net do. A word is 4 bytes; a step's figure is its busiest rank's; the first steps are left out,
because thresholds and regions are new there. Beside it what `oktopk.cost.predict` says, and the paper's bound,
6k(P-1)/P.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from oktopk import Algorithm, Comm, Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, Reducer, TopkA, TopkDSA, run_local
from oktopk.bench.machine import torch_threads
from oktopk.cost import predict
from oktopk.selection import num_selected
from oktopk.words import WORD_BYTES

RANKS = (4, 8, 16, 32, 64)
NOT_COUNTED = 2
TIMEOUT_S = 120.0


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and the JSON line, and return what it holds."""
    args = _parse(argv)
    k = num_selected(args.numel, args.density)
    with torch_threads(1):  # the ranks are threads already: more below each would only be in each other's way
        rows = [
            measure(name, algorithm, args.numel, size, args.steps)
            for name, algorithm in _algorithms(args.density).items()
            for size in args.ranks
        ]
    result = {
        "bench": "volume",
        "numel": args.numel,
        "density": args.density,
        "k": k,
        "steps": args.steps,
        "not_counted": NOT_COUNTED,
        "bound_words": {str(size): 6 * k * (size - 1) / size for size in args.ranks},
        "rows": rows,
    }
    _print(result, args.ranks)
    line = json.dumps(result, allow_nan=False)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return result


def measure(name: str, algorithm: Algorithm, numel: int, size: int, steps: int) -> dict[str, Any]:
    """Return the words that the busiest of `size` ranks sent in a step, and what was predicted for it."""
    start = time.perf_counter()
    scale = heavy_tailed_scale(numel)

    def words_of_rank(comm: Comm) -> list[int]:
        return words_by_step(Reducer(algorithm, comm), scale, comm.rank, steps)

    ranks = [words[NOT_COUNTED:] for words in run_local(size, words_of_rank, timeout=TIMEOUT_S)]
    costs = [predict(algorithm, numel, size, rank) for rank in range(size)]
    return {
        "algorithm": name,
        "ranks": size,
        "words": median(max(words) for words in zip(*ranks, strict=True)),
        "least_words": min(map(min, ranks)),
        "most_words": max(map(max, ranks)),
        "predicted": {
            "least": min(cost.least for cost in costs),
            "typical": max(cost.typical for cost in costs),
            "most": max(cost.most for cost in costs),
        },
        "seconds": time.perf_counter() - start,
    }


def words_by_step(reducer: Reducer, scale: Tensor, rank: int, steps: int) -> list[int]:
    """Return the words that this rank sent in each of `steps` steps."""
    generator, words = torch.Generator().manual_seed(1 + rank), []
    for _ in range(steps):
        reducer.all_reduce(scale * torch.randn(len(scale), generator=generator))
        assert reducer.last is not None
        words.append(reducer.last.sent_bytes // WORD_BYTES)
    return words


def heavy_tailed_scale(numel: int) -> Tensor:
    """Return how large each element typically is, the same on all ranks and steps."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).square_()


def _algorithms(density: float) -> dict[str, Algorithm]:
    return {
        "dense": Dense(),
        "topka": TopkA(density=density),
        "topkdsa": TopkDSA(density=density),
        "gtopk": GTopk(density=density),
        "gaussiank": GaussianK(density=density),
        "oktopk bounded": OkTopk(density=density, wire="fp32", ranking="magnitude"),
        "oktopk paper": OkTopkPaper(density=density, wire="fp32", ranking="magnitude"),
    }


def _print(result: dict[str, Any], sizes: Sequence[int]) -> None:
    k, names = result["k"], list(dict.fromkeys(row["algorithm"] for row in result["rows"]))
    cells = {(row["algorithm"], row["ranks"]): row for row in result["rows"]}
    bound = result["bound_words"]
    what = f"sent by the busiest rank in a step (predicted), n = {result['numel']:,}, k = {k:,}"
    multiples, words = Table(title=f"multiples of k {what}"), Table(title=f"words {what}")
    for table in (multiples, words):
        table.add_column("")
        for size in sizes:
            table.add_column(f"P = {size}", justify="right")
    for name in names:
        row = [(cells[name, size]["words"], cells[name, size]["predicted"]["typical"]) for size in sizes]
        multiples.add_row(name, *(f"{sent / k:.2f} ({typical / k:.2f})" for sent, typical in row))
        words.add_row(name, *(f"{sent:,.0f} ({typical:,.0f})" for sent, typical in row))
    multiples.add_row("6k(P-1)/P", *(f"{bound[str(size)] / k:.2f}" for size in sizes))
    words.add_row("6k(P-1)/P", *(f"{bound[str(size)]:,.0f}" for size in sizes))
    Console(width=124).print(words, multiples)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.volume", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, action="append", help=f"repeatable; default {RANKS}")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=12, help=f"the first {NOT_COUNTED} are not counted")
    parser.add_argument("--json", type=Path, help="write the JSON line to this file as well")
    args = parser.parse_args(argv)
    if args.steps <= NOT_COUNTED:
        parser.error(f"--steps must be above {NOT_COUNTED}")
    args.ranks = args.ranks or list(RANKS)
    return args


if __name__ == "__main__":
    main()
