"""Is `oktopk plan` right?

    sudo python -m benchmarks.plan --model wide,an4-small,gpt-tiny --ranks 2,4,8 --mbit 0,100,1000,2500 --cells c.jsonl
    python -m benchmarks.plan --cells c.jsonl --predict            # predict the measured cells once more

For each P each model is profiled on P hosts of an unlimited network. From that profile alone the steps on all links are
predicted. They are measured as `oktopk bench step` does. The verdict is the plan's: a method pays if it gains at least
`LEAST_GAIN`, else dense is as good. It is right if such a method is faster than dense when measured, and if another one
gains less than that. If it is wrong, `loss` is the part of a step that the choice costs.
A cell is one model on one network. `--cells` adds each to a file as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from oktopk.bench.candidates import BOUND, time_step
from oktopk.bench.methods import METHODS, AllReduce, Entry, Ours, PowerSgd, parse_methods
from oktopk.bench.models import check_model
from oktopk.bench.processes import Setting
from oktopk.bench.rounds import Samples
from oktopk.bench.summary import rows_of
from oktopk.plan.measure import profile_of, time_rank
from oktopk.plan.methods import BF16, DENSE, Method
from oktopk.plan.model import predict_step
from oktopk.plan.topology import flat
from oktopk.plan.verdict import LEAST_GAIN

DEFAULT = "dense,bf16,powersgd-1,topka,oktopk-default"
DENSITY = 0.01
RIGHT = 0.15
"""Part by which a prediction may be wrong in the median."""

CELL_S = 15.0
"""Seconds of a cell after which no further round is started."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and the JSON line, and return what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-tiny", help="several by comma")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", default="2", help="several by comma")
    parser.add_argument("--mbit", default="1000", help="several by comma; 0: unlimited")
    parser.add_argument("--methods", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=3, help="at most, of each cell")
    parser.add_argument("--cells", type=Path, help="add the samples of each cell to this file")
    parser.add_argument("--predict", action="store_true", help="measure nothing: predict the cells of the file")
    parser.add_argument("--json", type=Path, help="write the JSON line here, too")
    args = parser.parse_args(argv)
    names = parse_methods(args.methods)
    with tempfile.TemporaryDirectory() as folder:
        file = (args.cells or Path(folder) / "cells.jsonl").resolve()
        if not args.predict:
            measure(args, names, file)
        cells = [json.loads(line) for line in file.read_text().splitlines()]
    rows = rows_of_cells(cells)
    result = {"rows": rows, **summary_of(rows)}
    _print(result)
    line = json.dumps(result, allow_nan=False)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return result


def measure(args: argparse.Namespace, names: Sequence[str], file: Path) -> None:
    """Add the cells of all models to the file: for each P, those of the unlimited network and the profiles first."""
    models, links = args.model.split(","), sorted({0.0, *map(float, args.mbit.split(","))})
    for model in models:
        check_model(model, args.batch)
    for size in map(int, args.ranks.split(",")):
        for mbit in links:
            setting = Setting(size, mbit if any(links) else None)
            setting.run(measure_cells, models, args.batch, names, mbit, args.rounds, str(file))


def measure_cells(models: Sequence[str], batch: int, names: Sequence[str], mbit: float, rounds: int, file: str) -> None:
    """Measure each model on the ranks of the default process group; rank 0 adds the cells to the file."""
    methods = [_method(name) for name in names]
    entries = [BOUND, *(Entry(name, DENSITY if _has_density(name) else None) for name in names)]
    for model in models:
        profile = None if mbit else time_rank(model, batch, "sgd", methods)
        samples = time_step(model, batch, 1, entries, Samples(rounds, CELL_S, False, "/dev/null"))
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, {"profile": profile, "samples": samples})
        if dist.get_rank() == 0:
            found = {key: [rank[key] for rank in ranks] for key in ("profile", "samples")}
            cell = {"model": model, "batch": batch, "ranks": len(ranks), "mbit": mbit, "methods": list(names), **found}
            with Path(file).open("a") as out:
                out.write(json.dumps(cell) + "\n")


def rows_of_cells(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each method of each cell, predicted from the latest profile before it."""
    profiles: dict[Any, Any] = {}
    rows = []
    for cell in cells:
        model, size, mbit, methods = cell["model"], cell["ranks"], cell["mbit"], [_method(n) for n in cell["methods"]]
        if cell["profile"][0] is not None:
            profiles[model, size] = profile_of(model, cell["profile"], methods, "sgd")
        profile = profiles[model, size]
        computing_s = profile.forward_s + profile.backward_s  # a step of the bench has no optimizer
        predicted = [computing_s] + [
            predict_step(method, profile, flat(size, mbit)).step_s - profile.optimizer_s for method in methods
        ]
        measured = rows_of([BOUND, *(Entry(name) for name in cell["methods"])], cell["samples"])
        for predicted_s, row in zip(predicted, measured, strict=True):
            measured_s = row["seconds"]["median"]
            figures = {"predicted_s": predicted_s, "measured_s": measured_s, "error": predicted_s / measured_s - 1}
            rows.append({"model": model, "ranks": size, "mbit": mbit, "method": row["method"], **figures})
    return rows


def _has_density(name: str) -> bool:
    method = METHODS[name]
    return isinstance(method, Ours) and method.has_density


def _method(name: str) -> Method:
    """Return the plan's method for one of the bench."""
    method = METHODS[name]
    if isinstance(method, PowerSgd):
        return Method(name=name, code="", family="powersgd", rank=method.rank, computing=name)
    if isinstance(method, AllReduce):
        return Method(name=name, code="", family=name, computing=BF16 if name == BF16 else "")
    return Method(name=name, code="", family="oktopk", algorithm=method.make(DENSITY), computing=name)


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the worst error, and how often the verdict against dense is right."""
    errors = [abs(row["error"]) for row in rows if row["method"] != BOUND.method]
    dense = {_place(row): row for row in rows if row["method"] == DENSE}
    verdicts, losses = [], [0.0]
    for row in rows:
        if row["method"] in (DENSE, BOUND.method) or not dense:
            continue
        rival = dense[_place(row)]
        predicted, measured = (rival[name] / row[name] for name in ("predicted_s", "measured_s"))
        right = measured > 1 if predicted >= LEAST_GAIN else measured < LEAST_GAIN
        verdicts.append(right)
        if not right:
            losses.append(max(measured, 1 / measured) - 1)
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "within": sum(error <= RIGHT for error in errors) / len(errors),
        "verdicts_right": sum(verdicts) / len(verdicts) if verdicts else None,
        "worst_loss": max(losses),
    }


def _place(row: dict[str, Any]) -> tuple[str, int, float]:
    return row["model"], row["ranks"], row["mbit"]


def _print(result: dict[str, Any]) -> None:
    table = Table(title="ms of a step: predicted / measured (error)", title_justify="left")
    names = list(dict.fromkeys(row["method"] for row in result["rows"]))
    table.add_column("model, P, Mbit/s")
    for name in names:
        table.add_column(name, justify="right")
    for place in sorted({_place(row) for row in result["rows"]}):
        cells = [
            f"{1e3 * row['predicted_s']:.0f} / {1e3 * row['measured_s']:.0f} ({100 * row['error']:+.0f} %)"
            for row in result["rows"]
            if _place(row) == place
        ]
        table.add_row(f"{place[0]}, {place[1]}, {place[2]:g}", *cells)
    console = Console(width=160)
    console.print(table)
    for key in ("median_error", "worst_error", "within", "verdicts_right", "worst_loss"):
        console.print(f"{key}: {result[key]}")


if __name__ == "__main__":
    main()
