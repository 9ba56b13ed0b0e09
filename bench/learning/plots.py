"""Loss and metric (WER, error) against steps, against bytes, and against time on links of several speeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.learning.tables import LINKS_BPS, Run, metric_of, simulated_seconds, trailing_means, window_of
from bench.learning.workload import METRICS

PANEL_INCHES = (4.2, 3.6)
DPI = 110


def draw(runs: Sequence[Run], compute_s: float, folder: Path) -> list[Path]:
    """Write loss.png and one named by the metric, a panel for each axis and a line for each training; return them."""
    return [_draw(what, runs, compute_s, folder) for what in ("loss", metric_of(runs))]


def _draw(what: str, runs: Sequence[Run], compute_s: float, folder: Path) -> Path:
    import matplotlib
    from matplotlib.figure import Figure

    axes = _axes(compute_s)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(axes), height), layout="constrained")
    names = list(dict.fromkeys(run["setting"]["name"] for run in runs))
    colour = matplotlib.colormaps["tab20"]
    for panel, (label, place) in zip(figure.subplots(1, len(axes)), axes.items(), strict=True):
        for run in runs:
            at, values = _points(what, run, place(run))
            name = run["setting"]["name"]
            i = names.index(name)
            first = run is next(each for each in runs if each["setting"]["name"] == name)
            style = (
                {"color": "black"}
                if name == "dense"
                else {"color": colour(i % 20), "ls": ("-", "--", ":")[i // 20 % 3]}
            )
            panel.plot(at, values, lw=1.1, label=name if first else None, **style)
        panel.set(xlabel=label, ylabel="training loss" if what == "loss" else METRICS[what].label)
        if label != "steps":
            panel.set_xscale("log")
        if what == "loss":
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path = folder / f"{what}.png"
    figure.savefig(path, dpi=DPI)
    return path


def _axes(compute_s: float) -> dict[str, Any]:
    """Return, by its label, what gives the place of each step."""
    axes: dict[str, Any] = {
        "steps": lambda run: list(range(1, run["steps"] + 1)),
        "GB sent by a worker": lambda run: [sent / 1e9 for sent in accumulate(run["curves"]["sent_bytes"])],
    }
    for name, bps in LINKS_BPS.items():
        axes[f"seconds at {name}"] = lambda run, bps=bps: simulated_seconds(run, compute_s, bps)
    return axes


def _points(what: str, run: Run, places: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    if what == "loss":
        window = window_of(run)
        return places[window - 1 :], trailing_means(run["curves"]["loss"], window)
    evaluated = run["evaluations"]
    return [places[int(each["step"]) - 1] for each in evaluated], [each[what] for each in evaluated]
