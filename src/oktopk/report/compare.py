"""Several runs side by side: the figures of each, against the first, and how soon it was as good as the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oktopk.report.tables import Column, Table
from oktopk.telemetry.figures import quotient, summary_of, total
from oktopk.telemetry.run import Run

LOWER, HIGHER = min, max


def comparison_table(runs: Sequence[Run]) -> Table:
    """Return a row for each run; ratios are against the first."""
    goal = common_goal(runs)
    rows = [_row(run, goal) for run in runs]
    ratios = {
        "x fewer bytes": "sent", "x faster": "seconds a step", "x sooner": "seconds to goal",
        "x fewer bytes to goal": "bytes to goal",
    }  # fmt: skip
    for row in rows:
        row |= {ratio: quotient(rows[0][name], row[name]) for ratio, name in ratios.items()}
    columns = [Column(_heading(name, goal), kind) for name, (kind, _) in _COLUMNS.items()]
    cells = [[row[name] for name in _COLUMNS] for row in rows]
    about = f"Ratios are against the first run, {runs[0].name}. Bytes and seconds are rank 0's."
    if goal is not None:
        about += f" The goal is the lowest WER that every run reached: {goal:.4g}."
    return Table("comparison", "The runs side by side", about, columns, cells, "A training run", _best(cells))


def common_goal(runs: Sequence[Run]) -> float | None:
    """Return the lowest WER that every run reached; None if one of them was never validated."""
    best = [summary_of(run)["best_wer"] for run in runs]
    return None if any(wer is None for wer in best) else max(best)


_COLUMNS: dict[str, tuple[str, Callable[..., Any] | None]] = {
    "run": ("text", None),
    "exchange": ("text", None),
    "workers": ("count", None),
    "steps": ("count", None),
    "train loss": ("number", LOWER),
    "val loss": ("number", LOWER),
    "best WER": ("number", LOWER),
    "sent": ("bytes", LOWER),
    "x fewer bytes": ("times", HIGHER),
    "seconds a step": ("seconds", LOWER),
    "x faster": ("times", HIGHER),
    "seconds": ("seconds", LOWER),
    "seconds to goal": ("seconds", LOWER),
    "x sooner": ("times", HIGHER),
    "bytes to goal": ("bytes", LOWER),
    "x fewer bytes to goal": ("times", HIGHER),
}
"""Unit of each column, and the function that finds the best in it."""


def _heading(name: str, goal: float | None) -> str:
    return name if goal is None else name.replace("goal", f"WER {goal:.4g}")


def _row(run: Run, goal: float | None) -> dict[str, Any]:
    summary, config = summary_of(run), run.header.get("config", {})
    reached = next((e for e in run.epochs if goal is not None and e["wer"] is not None and e["wer"] <= goal), {})
    seconds = total(run.step_seconds)
    density = f" {config['density']:g}" if isinstance(config.get("density"), float) else ""
    name = config.get("compressor")
    return {
        "run": run.name,
        "exchange": None if name is None else f"{name}{'' if name == 'dense' else density}",
        "workers": run.workers,
        "steps": summary["steps"],
        "train loss": summary["train_loss"],
        "val loss": summary["val_loss"],
        "best WER": summary["best_wer"],
        "sent": summary["sent_bytes"],
        "seconds a step": quotient(seconds, summary["steps"]),
        "seconds": seconds,
        "seconds to goal": reached.get("seconds"),
        "bytes to goal": reached.get("sent_bytes"),
    }


def _best(cells: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """Return the places (row, column) of the best figures, where the runs differ at all."""
    found = []
    for column, (_, better) in enumerate(_COLUMNS.values()):
        known = [row[column] for row in cells if row[column] is not None]
        if better is not None and len(set(known)) > 1:
            best = better(known)
            found += [(i, column) for i, row in enumerate(cells) if row[column] == best]
    return found
