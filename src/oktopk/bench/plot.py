"""Plots of the results: time over link speed, over the number of ranks and over density, whichever was varied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oktopk.bench.settings import link_name

SIZE_INCHES = (8, 5)
DPI = 120


@dataclass(frozen=True)
class Plot:
    """A plot: `curves` has the median ms of each method, at `places`; `labels` names places without a scale."""

    name: str
    title: str
    axis: str
    places: Sequence[float]
    curves: dict[str, list[float]]
    labels: Sequence[str] = ()


def plots_of(result: dict[str, Any]) -> list[Plot]:
    """Return a plot over links, ranks and densities, wherever more than one was measured."""
    settings = result["settings"]
    return [*_over_links(settings), *_over_ranks(settings), *_over_densities(settings)]


def draw(plot: Plot, folder: Path) -> str:
    """Write NAME.png and NAME.svg, and return the svg element."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab10" if len(plot.curves) <= 10 else "tab20"]
    for i, (name, ms) in enumerate(plot.curves.items()):
        axes.plot(plot.places, ms, marker="o", color=colors(i), label=name)
    axes.set_yscale("log")
    if not plot.labels:
        axes.set_xscale("log")
    axes.set_xticks(plot.places, plot.labels or [f"{place:g}" for place in plot.places])
    axes.set_xticks([], minor=True)
    axes.set(title=plot.title, xlabel=plot.axis, ylabel="ms, median")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(folder / f"{plot.name}.png", dpi=DPI)
    svg = folder / f"{plot.name}.svg"
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        figure.savefig(svg, metadata={"Date": None})
    text = svg.read_text()
    return text[text.index("<svg") :]


def _over_links(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    for ranks in dict.fromkeys(setting["ranks"] for setting in settings):
        chosen = sorted((s for s in settings if s["ranks"] == ranks), key=lambda s: float(s["mbit"] or "inf"))
        if len(chosen) > 1:
            places, labels = range(len(chosen)), [link_name(setting["mbit"]) for setting in chosen]
            yield Plot(f"links-p{ranks}", f"time over link speed, P = {ranks}", "link", places, _curves(chosen), labels)


def _over_ranks(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    for mbit in dict.fromkeys(setting["mbit"] for setting in settings):
        chosen = sorted((s for s in settings if s["mbit"] == mbit), key=lambda s: int(s["ranks"]))
        if len(chosen) > 1:
            title, places = f"time over ranks, {link_name(mbit)}", [setting["ranks"] for setting in chosen]
            yield Plot(f"ranks-{_slug(mbit)}", title, "ranks", places, _curves(chosen))


def _over_densities(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    """Yield a plot for each setting; the curve of a method without a density is level."""
    densities = sorted({row["density"] for row in settings[0]["rows"]} - {None}) if settings else []
    for setting in settings if len(densities) > 1 else ():
        curves: dict[str, list[float]] = {}
        for row in sorted(setting["rows"], key=lambda row: row["density"] or 0.0):
            count = len(densities) if row["density"] is None else 1
            curves.setdefault(row["method"], []).extend([1e3 * row["seconds"]["median"]] * count)
        name = f"densities-p{setting['ranks']}-{_slug(setting['mbit'])}"
        title = f"time over density, P = {setting['ranks']}, {link_name(setting['mbit'])}"
        yield Plot(name, title, "density", densities, curves)


def _curves(settings: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    rows = [[row["seconds"]["median"] for row in setting["rows"]] for setting in settings]
    names = [row["name"] for row in settings[0]["rows"]]
    return {name: [1e3 * seconds for seconds in column] for name, column in zip(names, zip(*rows), strict=True)}  # noqa: B905


def _slug(mbit: float | None) -> str:
    """Return a link's name for a file."""
    return f"{mbit:g}mbit" if mbit else link_name(mbit).split()[0]
