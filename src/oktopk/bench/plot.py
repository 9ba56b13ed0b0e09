"""Plots of the results: time over link speed, over the number of ranks and over density, whatever was varied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oktopk.bench.settings import link_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (8, 5)
DPI = 120


@dataclass(frozen=True)
class Curve:
    """Median ms at each place, by one method."""

    name: str
    places: Sequence[float]
    ms: Sequence[float]


@dataclass(frozen=True)
class Plot:
    """What one plot shows; `labels` are the places' names, where a place is only the n-th of some."""

    name: str
    title: str
    axis: str
    curves: Sequence[Curve]
    labels: Sequence[str] = ()


def plots_of(result: dict[str, Any]) -> list[Plot]:
    """Return a plot for everything of which more than one value was measured."""
    settings = result["settings"]
    return [*_over_links(settings), *_over_ranks(settings), *_over_densities(settings)]


def draw(plot: Plot, folder: Path) -> Path:
    """Write NAME.png and NAME.svg, and return the latter."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=SIZE_INCHES, layout="constrained")
    _fill(figure.subplots(), plot)
    figure.savefig(folder / f"{plot.name}.png", dpi=DPI)
    svg = folder / f"{plot.name}.svg"
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        figure.savefig(svg, metadata={"Date": None})
    return svg


def _over_links(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    for ranks in _unique(setting["ranks"] for setting in settings):
        chosen = sorted((s for s in settings if s["ranks"] == ranks), key=lambda s: float(s["mbit"] or "inf"))
        if len(chosen) > 1:
            labels = [link_name(setting["mbit"]) for setting in chosen]
            curves = _curves(chosen, range(len(chosen)))
            yield Plot(f"links-p{ranks}", f"time over link speed, P = {ranks}", "link", curves, labels)


def _over_ranks(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    for mbit in _unique(setting["mbit"] for setting in settings):
        chosen = sorted((s for s in settings if s["mbit"] == mbit), key=lambda s: int(s["ranks"]))
        if len(chosen) > 1:
            name = f"ranks-{_slug(mbit)}"
            curves = _curves(chosen, [setting["ranks"] for setting in chosen])
            yield Plot(name, f"time over ranks, {link_name(mbit)}", "ranks", curves)


def _over_densities(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    densities = sorted({row["density"] for row in settings[0]["rows"]} - {None}) if settings else []
    for setting in settings if len(densities) > 1 else ():
        link = link_name(setting["mbit"])
        name = f"densities-p{setting['ranks']}-{_slug(setting['mbit'])}"
        curves = [
            _density_curve([row for row in setting["rows"] if row["method"] == method], densities)
            for method in _unique(row["method"] for row in setting["rows"])
        ]
        yield Plot(name, f"time over density, P = {setting['ranks']}, {link}", "density", curves)


def _density_curve(rows: Sequence[dict[str, Any]], densities: Sequence[float]) -> Curve:
    """Return one method's curve: level, where it has no density."""
    level = [rows[0]] * len(densities) if rows[0]["density"] is None else rows
    places = densities if rows[0]["density"] is None else [row["density"] for row in rows]
    return Curve(rows[0]["method"], places, [1e3 * row["seconds"]["median"] for row in level])


def _curves(settings: Sequence[dict[str, Any]], places: Sequence[float]) -> list[Curve]:
    return [
        Curve(row["name"], places, [1e3 * setting["rows"][i]["seconds"]["median"] for setting in settings])
        for i, row in enumerate(settings[0]["rows"])
    ]


def _fill(axes: Axes, plot: Plot) -> None:
    import matplotlib

    colors = matplotlib.colormaps["tab10" if len(plot.curves) <= 10 else "tab20"]
    for i, curve in enumerate(plot.curves):
        axes.plot(curve.places, curve.ms, marker="o", color=colors(i), label=curve.name)
    axes.set_yscale("log")
    if not plot.labels:
        axes.set_xscale("log")
        places = sorted({place for curve in plot.curves for place in curve.places})
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.set_xticks([], minor=True)
    else:
        axes.set_xticks(range(len(plot.labels)), plot.labels)
    axes.set(title=plot.title, xlabel=plot.axis, ylabel="ms, median")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _slug(mbit: float | None) -> str:
    """Return a link's name for a file."""
    return f"{mbit:g}mbit" if mbit else link_name(mbit).split()[0]


def _unique(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
