"""Figures of a training, of the same over several seeds, and the table of all settings beside dense."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import mean
from typing import TYPE_CHECKING, Any

from research.learning.workload import METRICS

if TYPE_CHECKING:
    from rich.table import Table

LINKS_BPS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}

Run = dict[str, Any]
Figures = dict[str, Any]


def metric_of(runs: Sequence[Run]) -> str:
    """Return what the trainings are compared by; those of several workloads are not."""
    found = {run.get("metric", "wer") for run in runs}
    if len(found) > 1:
        raise SystemExit(f"trainings of several workloads ({', '.join(sorted(found))}): give each a folder of its own")
    return str(found.pop())


def figures_of(run: Run, losses: Sequence[float], goals: Sequence[float], compute_s: float) -> Figures:
    """Return what a training came to: where it ended, and what it took to reach these training losses and goals.

    A training loss counts as reached when its mean over one window is; a goal when an evaluation finds it.
    """
    curves, window, metric = run["curves"], window_of(run), metric_of([run])
    smooth = trailing_means(curves["loss"], window)
    evaluated = [(int(each["step"]), each[metric]) for each in run["evaluations"]]
    after = run["setting"]["dense_steps"]
    sent, chosen = curves["sent_bytes"][after:], curves["selected_over_k"][after:]
    reached = {f"loss {loss:g}": _first(enumerate(smooth, window), loss) for loss in losses}
    reached |= {f"{METRICS[metric].label} {goal:g}": _first(evaluated, goal) for goal in goals}
    return {
        "steps": run["steps"],
        "ended": run["ended"],
        "loss": smooth[-1] if smooth else None,
        metric: evaluated[-1][1] if evaluated else None,
        "bytes_per_step": mean(sent) if sent else None,
        "selected_over_k": mean(chosen) if chosen else None,
        "residual_norm": curves["residual_norm"][-1] if curves["residual_norm"] else None,
        "reached": {name: None if step is None else _price(run, step, compute_s) for name, step in reached.items()},
    }


def window_of(run: Run) -> int:
    """Return over how many steps a training loss is averaged: the workload's window, or as many as there are."""
    window = run["window"] if "window" in run else run["steps_per_epoch"]  # as older runs have it
    return max(1, min(int(window), int(run["steps"])))


def trailing_means(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each `window` neighbours.

    >>> trailing_means([1.0, 3.0, 5.0], 2)
    [2.0, 4.0]
    """
    sums = list(accumulate(values, initial=0.0))
    return [(high - low) / window for low, high in zip(sums, sums[window:], strict=False)]


def simulated_seconds(run: Run, compute_s: float, bits_per_second: float) -> list[float]:
    """Return when each step ends, if a worker computes for `compute_s` and its link carries what was sent."""
    return list(accumulate(compute_s + 8 * sent / bits_per_second for sent in run["curves"]["sent_bytes"]))


def summarise(runs: Sequence[Run], losses: Sequence[float], goals: Sequence[float], compute_s: float) -> list[Figures]:
    """Return the mean figures of each setting over its seeds, in the order they came, the dense one first."""
    names = dict.fromkeys(run["setting"]["name"] for run in runs)
    order = sorted(names, key=lambda name: name != "dense")
    metric = metric_of(runs)
    rows = [_over_seeds(name, runs, metric, losses, goals, compute_s) for name in order]
    dense = next((row for row in rows if row["name"] == "dense"), None)
    return [row | _beside(row, dense, metric) for row in rows] if dense else rows


def _over_seeds(
    name: str, runs: Sequence[Run], metric: str, losses: Sequence[float], goals: Sequence[float], compute_s: float
) -> Figures:
    chosen = [run for run in runs if run["setting"]["name"] == name]
    every = [figures_of(run, losses, goals, compute_s) for run in chosen]
    plain = ("steps", "loss", metric, "bytes_per_step", "selected_over_k", "residual_norm")
    row: Figures = {"name": name, "seeds": [run["seed"] for run in chosen]}
    row |= {key: _mean([each[key] for each in every]) for key in plain}
    row[f"{metric}s"] = [each[metric] for each in every]
    row["ended"] = [each["ended"] for each in every if each["ended"]]
    row["reached"] = {goal: _mean_price([each["reached"][goal] for each in every]) for goal in every[0]["reached"]}
    return row


def _beside(row: Figures, dense: Figures, metric: str) -> Figures:
    """Return the ratios to dense: steps to each goal, the final metric, and how many times less a sparse step sends."""
    pairs = {goal: (row["reached"][goal], dense["reached"][goal]) for goal in row["reached"]}
    return {
        "steps_over_dense": {goal: a["steps"] / b["steps"] if a and b else None for goal, (a, b) in pairs.items()},
        f"{metric}_over_dense": row[metric] / dense[metric] if row[metric] is not None and dense[metric] else None,
        "times_fewer_bytes": dense["bytes_per_step"] / row["bytes_per_step"] if row["bytes_per_step"] else None,
    }


def table_of(rows: Sequence[Figures], metric: str) -> Table:
    """Return the table as people read it."""
    from rich.table import Table

    table = Table(title="learning: steps to a goal (times dense's), where it ended, what it sent")
    goals, label = list(rows[0]["reached"]), METRICS[metric].label
    for name in ("setting", "seeds", *goals, "loss", label, "bytes a step", "fewer", "selected/k", "residual", "note"):
        table.add_column(name, justify="left" if name in ("setting", "note") else "right")
    for row in rows:
        over = row.get("steps_over_dense", {})
        cells = [_cell(row["reached"][goal], over.get(goal)) for goal in goals]
        ratio = row.get(f"{metric}_over_dense")
        ended = _number(row[metric], ".3f") + (f" ({ratio:.2f})" if ratio else "")
        sent = _number(row["bytes_per_step"] and row["bytes_per_step"] / 1e6, ".2f", " MB")
        fewer = _number(row.get("times_fewer_bytes"), ".1f", "x")
        rest = (_number(row["selected_over_k"], ".2f"), _number(row["residual_norm"], ".3g"))
        note = row["ended"][0].strip().splitlines()[-1][:40] if row["ended"] else ""
        seeds = ",".join(map(str, row["seeds"]))
        table.add_row(row["name"], seeds, *cells, _number(row["loss"], ".2f"), ended, sent, fewer, *rest, note)
    return table


def _cell(price: Figures | None, over: float | None) -> str:
    if price is None:
        return "-"
    return f"{price['steps']:.0f}" + (f" ({over:.2f})" if over else "")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _first(points: Any, goal: float) -> int | None:
    return next((int(step) for step, value in points if value <= goal), None)


def _price(run: Run, step: int, compute_s: float) -> Figures:
    """Return what the first `step` steps took: measured, and on links of several speeds."""
    curves = run["curves"]
    links = {name: simulated_seconds(run, compute_s, bps)[step - 1] for name, bps in LINKS_BPS.items()}
    return {"steps": step, "seconds": sum(curves["seconds"][:step]), "bytes": sum(curves["sent_bytes"][:step]), **links}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _mean_price(prices: Sequence[Figures | None]) -> Figures | None:
    known = [price for price in prices if price is not None]
    if not known or len(known) < len(prices):
        return None
    return {key: mean(price[key] for price in known) for key in known[0]}
