"""Is `oktopk plan` right?

    sudo python -m benchmarks.plan --model gpt-tiny --ranks 2,4 --mbit 100,1000,0

For each P the model is profiled on P hosts of an unlimited network. From that profile alone the steps on all links are
predicted. Then `oktopk bench step` measures them. A verdict is right if predicted and measured steps agree on whether a
method is faster than dense; if they differ, `loss` is the part of a step that the wrong choice costs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from oktopk.bench.candidates import BOUND, time_step
from oktopk.bench.methods import METHODS, AllReduce, Entry, Ours, PowerSgd, parse_methods
from oktopk.bench.models import check_model
from oktopk.bench.processes import Setting
from oktopk.bench.rounds import measure
from oktopk.plan.measure import profile_of, time_rank
from oktopk.plan.methods import BF16, DENSE, Method
from oktopk.plan.model import predict_step
from oktopk.plan.topology import flat

DEFAULT = "dense,bf16,powersgd-1,topka,oktopk-default"
DENSITY = 0.01
RIGHT = 0.15
"""Part by which a prediction may be wrong in the median."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and the JSON line, and return what it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", default="2", help="several by comma")
    parser.add_argument("--mbit", default="1000", help="several by comma; 0: unlimited")
    parser.add_argument("--methods", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the JSON line here, too")
    args = parser.parse_args(argv)
    check_model(args.model, args.batch)
    names, links = parse_methods(args.methods), [float(each) for each in args.mbit.split(",")]
    rows = [row for size in map(int, args.ranks.split(",")) for row in _rows(args, size, links, names)]
    result = {"model": args.model, "batch": args.batch, "rows": rows, **summary_of(rows)}
    _print(result)
    line = json.dumps(result, allow_nan=False)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return result


def _rows(args: argparse.Namespace, size: int, links: Sequence[float], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each link and method at P = `size`."""
    methods = [_method(name) for name in names]
    ranks = Setting(size, 0.0 if any(links) else None).run(time_rank, args.model, args.batch, "sgd", methods)
    profile, rows = profile_of(args.model, ranks, methods, "sgd"), []
    entries = [Entry(name, DENSITY if _has_density(name) else None) for name in names]
    for mbit in links:
        setting = Setting(size, mbit if any(links) else None)
        made = measure(time_step, (args.model, args.batch, 1), [BOUND, *entries], setting, args.rounds)["rows"]
        topology = flat(size, mbit)
        computing_s = profile.forward_s + profile.backward_s  # a step of the bench has no optimizer
        bound = {"method": BOUND.method, "predicted_s": computing_s, "measured_s": made[0]["seconds"]["median"]}
        rows.append({"ranks": size, "mbit": mbit, **bound})
        for method, row in zip(methods, made[1:], strict=True):
            predicted_s = predict_step(method, profile, topology).step_s - profile.optimizer_s
            figures = {"method": row["method"], "predicted_s": predicted_s, "measured_s": row["seconds"]["median"]}
            rows.append({"ranks": size, "mbit": mbit, **figures})
    for row in rows:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
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
    dense = {(row["ranks"], row["mbit"]): row for row in rows if row["method"] == DENSE}
    verdicts, losses = [], [0.0]
    for row in rows:
        if row["method"] in (DENSE, BOUND.method) or not dense:
            continue
        rival = dense[row["ranks"], row["mbit"]]
        right = (row["predicted_s"] < rival["predicted_s"]) == (row["measured_s"] < rival["measured_s"])
        verdicts.append(right)
        if not right:
            both = row["measured_s"], rival["measured_s"]
            losses.append(max(both) / min(both) - 1)
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "within": sum(error <= RIGHT for error in errors) / len(errors),
        "verdicts_right": sum(verdicts) / len(verdicts) if verdicts else None,
        "worst_loss": max(losses),
    }


def _print(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['model']}, ms of a step: predicted / measured (error)", title_justify="left")
    names = list(dict.fromkeys(row["method"] for row in result["rows"]))
    table.add_column("P, Mbit/s")
    for name in names:
        table.add_column(name, justify="right")
    for place in dict.fromkeys((row["ranks"], row["mbit"]) for row in result["rows"]):
        cells = [
            f"{1e3 * row['predicted_s']:.0f} / {1e3 * row['measured_s']:.0f} ({100 * row['error']:+.0f} %)"
            for row in result["rows"]
            if (row["ranks"], row["mbit"]) == place
        ]
        table.add_row(f"{place[0]}, {place[1]:g}", *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
