"""Loss and metric (WER, error) against steps, against bytes, and against time on links of several speeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from research.learning.tables import LINKS_BPS, Run, metric_of, simulated_seconds, trailing_means, window_of
from research.learning.workload import METRICS

PANEL_INCHES = (4.2, 3.6)
COLUMNS = 3
DPI = 110


def draw(runs: Sequence[Run], compute_s: float, folder: Path) -> list[Path]:
    """Write loss.png and one named by the metric, a panel for each axis and a line for each training; return them."""
    return [_draw(what, runs, compute_s, folder) for what in ("loss", metric_of(runs))]


def _draw(what: str, runs: Sequence[Run], compute_s: float, folder: Path) -> Path:
    from matplotlib.figure import Figure

    axes, styles = _axes(compute_s), _styles(runs)
    width, height = PANEL_INCHES
    rows = len(axes) // COLUMNS + 1  # one panel more, for the legend
    figure = Figure(figsize=(width * COLUMNS, height * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS).flat
    for panel, (label, place) in zip(panels, axes.items(), strict=False):
        for run in runs:
            name = run["setting"]["name"]
            first = run is next(each for each in runs if each["setting"]["name"] == name)
            panel.plot(*_points(what, run, place(run)), lw=1.1, label=name if first else None, **styles[name])
        panel.set(xlabel=label, ylabel="training loss" if what == "loss" else METRICS[what].label)
        if label != "steps":
            _make_log(panel.xaxis, panel.set_xscale)
        if what == "loss":
            _make_log(panel.yaxis, panel.set_yscale)
        panel.grid(alpha=0.3)
    for panel in figure.axes[len(axes) :]:
        panel.axis("off")
    figure.axes[len(axes)].legend(*figure.axes[0].get_legend_handles_labels(), loc="upper left", fontsize="small")
    path = folder / f"{what}.png"
    figure.savefig(path, dpi=DPI)
    return path


def _styles(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return how each setting's lines look: dense's are black."""
    import matplotlib

    colour = matplotlib.colormaps["tab10"]
    others = [name for name in dict.fromkeys(run["setting"]["name"] for run in runs) if name != "dense"]
    styles = {name: {"color": colour(i % 10), "ls": ("-", "--", ":")[i // 10 % 3]} for i, name in enumerate(others)}
    return {"dense": {"color": "black"}, **styles}


def _make_log(axis: Any, set_scale: Any) -> None:
    """Make an axis logarithmic, with labels at 1, 2 and 5: some have less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


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
