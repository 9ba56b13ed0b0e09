"""The plan as a table, a plot, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from oktopk.errors import SettingError
from oktopk.plan.methods import DENSE, Method
from oktopk.plan.profile import Profile
from oktopk.plan.read import Money
from oktopk.plan.topology import Topology
from oktopk.plan.verdict import Row, Verdict, rows_of
from oktopk.telemetry.format import format_bytes, format_seconds

VERSION = 1
JSON, PLOT = "plan.json", "plan.svg"
SPEEDS = [10 ** (exponent / 8) for exponent in range(8, 41)]
"""Mbit/s of the plot: 10 Mbit/s to 100 Gbit/s."""

UNKNOWN = "n/a"
HOUR_S = 3600.0
DRAWN = 6


def to_json(
    rows: Sequence[Row], verdict: Verdict, profile: Profile, topology: Topology, steps: int | None, money: Money | None
) -> dict[str, Any]:
    """Return the whole plan as plain data."""
    return {
        "version": VERSION,
        "model": {
            "name": profile.name,
            "numel": profile.numel,
            "optimizer": profile.optimizer,
            "forward_s": profile.forward_s,
            "backward_s": profile.backward_s,
            "optimizer_s": profile.optimizer_s,
            "host": asdict(profile.host),
        },
        "ranks": topology.size,
        "levels": [asdict(level) for level in topology.levels],
        "methods": [_row(row, rows, topology, steps, money) for row in rows],
        "verdict": asdict(verdict),
        "plot": {"mbit": SPEEDS, "seconds": curves(rows, verdict, profile, topology)},
    }


def _row(row: Row, rows: Sequence[Row], topology: Topology, steps: int | None, money: Money | None) -> dict[str, Any]:
    made, dense = row.prediction, rows[0].prediction
    hours = None if steps is None or row.seconds is None else steps * row.seconds / HOUR_S
    return {
        "name": made.method.name,
        "step_s": made.step_s,
        "exchange_s": made.exchange_s,
        "hidden_s": made.hidden_s,
        "than_dense": dense.step_s / made.step_s if made.step_s else 1.0,
        "sent_bytes": made.sent_bytes,
        "outer_bytes": made.outer_bytes,
        "memory_bytes": made.memory_bytes,
        "learning": None if row.factor is None else asdict(row.factor),
        "to_loss_s": row.seconds,
        "hours": hours,
        "cost": _cost(row, topology, steps, hours, money),
        "code": made.method.code,
    }


def _cost(row: Row, topology: Topology, steps: int | None, hours: float | None, money: Money | None) -> float | None:
    """Return the price of the training: of the ranks' hours, and of the bytes that leave each outermost part."""
    if money is None or hours is None or steps is None or row.factor is None:
        return None
    gigabytes = 1e-9 * row.prediction.outer_bytes * topology.levels[-1].size * steps * row.factor.mean
    return hours * topology.size * money.rank_hour + gigabytes * money.gigabyte


def curves(rows: Sequence[Row], verdict: Verdict, profile: Profile, topology: Topology) -> dict[str, list[float]]:
    """Return the seconds of a step over the link speeds, for the method to use and the quickest of each kind."""
    slowest_first = sorted(rows, key=lambda row: -row.prediction.step_s)
    best = {(row.prediction.method.family, row.prediction.method.two_level): row for row in slowest_first}
    quick = sorted(best.values(), key=lambda row: row.prediction.step_s)[:DRAWN]
    names = {DENSE, verdict.use, *(row.prediction.method.name for row in quick)}
    chosen: list[Method] = [row.prediction.method for row in rows if row.prediction.method.name in names]
    found: dict[str, list[float]] = {method.name: [] for method in chosen}
    for mbit in SPEEDS:
        for row in rows_of(chosen, profile, topology.with_outer(mbit=mbit)):
            found[row.prediction.method.name].append(row.prediction.step_s)
    return found


def table_of(plan: dict[str, Any], currency: str = "") -> Table:
    """Return the table: the quickest way to the same loss first, then the methods whose learning nobody measured."""
    model = plan["model"]
    title = f"{model['name']}, {model['numel']:,} parameters, {model['optimizer']}, P = {plan['ranks']:,}"
    table = Table(title=title, title_justify="left")
    sent = f"sent by a {plan['levels'][-1]['name']}"
    columns = ["method", "a step", "x dense", "hidden", sent, "memory", "steps to a loss", "x dense to it"]
    timed = any(row["hours"] is not None for row in plan["methods"])
    priced = any(row["cost"] is not None for row in plan["methods"])
    for i, name in enumerate(
        [*columns, *(["hours"] if timed else []), *([f"cost {currency}".strip()] if priced else [])]
    ):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    dense = plan["methods"][0]
    for row in sorted(plan["methods"], key=lambda row: (row["to_loss_s"] is None, row["to_loss_s"] or row["step_s"])):
        learning = row["learning"]
        cells = [
            row["name"],
            format_seconds(row["step_s"]),
            f"{row['than_dense']:.2f}x",
            f"{100 * row['hidden_s'] / row['exchange_s']:.0f} %" if row["exchange_s"] else UNKNOWN,
            format_bytes(row["outer_bytes"]),
            format_bytes(row["memory_bytes"]),
            UNKNOWN if learning is None else _spread(learning),
            UNKNOWN if learning is None else f"{dense['step_s'] / row['to_loss_s']:.2f}x" if row["to_loss_s"] else "1x",
        ]
        cells += [_number(row["hours"])] * timed + [_number(row["cost"])] * priced
        table.add_row(*cells, style="bold" if row["name"] == plan["verdict"]["use"] else None)
    return table


def _spread(learning: dict[str, Any]) -> str:
    """Return a learning factor with its interval."""
    mean, low, high = (f"{learning[name]:g}" for name in ("mean", "low", "high"))
    return f"{mean}x" if low == high else f"{mean}x ({low}..{high})"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.1f}"


def write(plan: dict[str, Any], folder: Path) -> list[Path]:
    """Write plan.json and the plot; return their paths."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SettingError("--out draws a plot with matplotlib: pip install 'oktopk[bench]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).write_text(json.dumps(plan, allow_nan=False, indent=1) + "\n")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, seconds in plan["plot"]["seconds"].items():
        axes.loglog(plan["plot"]["mbit"], seconds, label=name, linewidth=2.2 if name == plan["verdict"]["use"] else 1.2)
    place = plan["verdict"]["break_even_mbit"]
    if place is not None:
        axes.axvline(place, color="grey", linestyle=":")
        text = f"dense as fast to a loss: {place:,.0f} Mbit/s"
        axes.annotate(text, (place, axes.get_ylim()[1]), (-3, -3), textcoords="offset points", rotation=90, va="top",
                      ha="right", fontsize=7)  # fmt: skip
    axes.set_xlabel("Mbit/s of the outermost links")
    axes.set_ylabel("seconds of a step")
    axes.legend(fontsize=7)
    figure.savefig(folder / PLOT)
    return [folder / JSON, folder / PLOT]
