"""The results as tables, and as files: JSON, CSV, plots over whatever was varied, and a page with all of it."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oktopk.bench.local import METHODS as LOCAL_METHODS
from oktopk.bench.processes import Setting, link_name
from oktopk.bench.summary import series_of, side_of
from oktopk.errors import SettingError

JSON, CSV, PAGE = "results.json", "results.csv", "index.html"
NEEDED = ("matplotlib", "jinja2")
UNKNOWN = "n/a"
COLUMNS = ("method", "ms: median (min..max)", "than dense", "than bf16", "MB sent", "MB by record")
LOCAL_COLUMNS = ("method", "computing", "s a step", "MB up a step", "MB down a step")
PREDICTED = ("predicted ms", "error")
PROBED = ("", "ms a call", "ns a word", "as Mbit/s", "computing, ns an element")
SIZE_INCHES = (5.6, 4.4)
DPI = 120
CURVES = ("blue", "orange", "green", "purple", "red", "teal", "pink", "yellow")
INKED = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
DASHES = ("-", "--", ":")
"""Colours of the report's style sheet in turn, then the same with other dashes."""


def check_possible(folder: Path) -> None:
    """Raise, before anything is measured, if the folder cannot be made or a package is missing."""
    for module in NEEDED:
        if find_spec(module) is None:
            raise SettingError(f"--out draws plots and writes a page with {module}: pip install 'oktopk[bench]'")
    if (folder / JSON).exists():
        raise SettingError(f"{folder} has the results of an earlier benchmark: name another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out wants a folder to write to, and {folder} cannot be one: {error.strerror}") from None


def write_json(result: dict[str, Any], folder: Path) -> None:
    """Write the results so far."""
    (folder / JSON).write_text(json.dumps(result, allow_nan=False, indent=1) + "\n")


def write_report(result: dict[str, Any], folder: Path) -> None:
    """Write everything into the folder."""
    write_json(result, folder)
    rows = [_csv_row(setting, row, result) for setting in result["settings"] for row in setting["rows"]]
    with (folder / CSV).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    svgs = [(plot.title, draw(plot, folder)) for plot in plots_of(result["settings"])]
    what = "One exchange" if result["bench"] == "exchange" else f"A DDP step of {result['model']}"
    write_html(result, folder, tables_of(result), svgs, f"{what}, by method")


def write_html(
    result: dict[str, Any],
    folder: Path,
    tables: Sequence[dict[str, Any]],
    svgs: Sequence[tuple[str, str]],
    heading: str,
) -> None:
    """Write the page of these tables and drawings, each with its title."""
    from jinja2 import Environment, PackageLoader

    page = Environment(loader=PackageLoader("oktopk.bench", "."), autoescape=True, trim_blocks=True)
    made = page.get_template("page.html").render(result=result, tables=tables, svgs=svgs, css=_css(), heading=heading)
    (folder / PAGE).write_text(made)


def _css() -> str:
    return (files("oktopk.report") / "page.css").read_text("utf-8")


def _palette() -> dict[str, str]:
    """Return the colours of the report's style sheet on a light page, by name."""
    return dict(re.findall(r"--([\w-]+): (#\w{6})", _css().split("@media", 1)[0]))


def _csv_row(setting: dict[str, Any], row: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: result.get(name) for name in ("bench", "model", "numel")},
        "link": link_name(setting["mbit"]),
        **{name: setting[name] for name in ("ranks", "mbit", "delay_ms", "rounds")},
        **{name: row[name] for name in ("method", "density")},
        **{f"{key}_s": value for key, value in row["seconds"].items()},
        **{rival: row[rival] and row[rival]["median"] for rival in ("x_dense", "x_bf16")},
        **{name: row.get(name) for name in ("sent_bytes", "record_bytes", "predicted_s", "error_percent")},
    }


def tables_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table for each setting: its title, its columns, the cells of its rows, and the lines below it."""
    tables = []
    if result["bench"] == "local":
        return [_local_table(setting) for setting in result["settings"]]
    for setting in result["settings"]:
        where = Setting(setting["ranks"], setting["mbit"], setting["delay_ms"], setting["shard"])
        title = f"{where}, n = {result['numel']:,}, density {', '.join(map(str, result['densities']))}"
        if result["bench"] == "probe":
            tables.append({"title": title, "columns": PROBED, "rows": _probe_cells(setting["probe"]), "lines": []})
            continue
        rows = setting["rows"]
        columns = COLUMNS + (PREDICTED if "predicted_s" in rows[0] else ())
        lines = [_split(row) for row in rows] if result["bench"] == "step" else []
        title += f", {setting['rounds']} round{'s' * (setting['rounds'] > 1)}"
        tables.append({"title": title, "columns": columns, "rows": [_cells(row) for row in rows], "lines": lines})
    return tables


def _local_table(setting: dict[str, Any]) -> dict[str, Any]:
    """Return the table of workers that make local steps."""
    title = f"{setting['setting']}, n = {setting['numel']:,}, density {setting['density']:g}, H = {setting['every']}, "
    rows = [
        [
            LOCAL_METHODS[row["method"]],
            f"{100 * row['utilisation']:.1f} %",
            f"{row['wall_s'] / row['steps']:.3g}",
            *(UNKNOWN if row[way] is None else f"{row[way] / 1e6:.3f}" for way in ("up_bytes", "down_bytes")),
        ]
        for row in setting["rows"]
    ]
    lines = [f"computing is a sleep of {setting['compute_s']:g} s a step; bytes by the interface, headers included"]
    return {"title": title + f"{setting['rounds']} rounds", "columns": LOCAL_COLUMNS, "rows": rows, "lines": lines}


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = row["seconds"]
    cells = [
        row["name"],
        f"{_ms(seconds['median'])} ({_ms(seconds['min'])}..{_ms(seconds['max'])})",
        *(_speed(row[x]) for x in ("x_dense", "x_bf16")),
        *(UNKNOWN if row[by] is None else f"{row[by] / 1e6:.3f}" for by in ("sent_bytes", "record_bytes")),
    ]
    if "predicted_s" in row:
        error = row["error_percent"]
        cells += [_ms(row["predicted_s"]), UNKNOWN if error is None else f"{error:+.0f} %"]
    return cells


def _speed(ratios: dict[str, float] | None) -> str:
    """Return how much faster or slower a method is than a rival; "alike" where the rounds do not tell."""
    if ratios is None:
        return UNKNOWN
    side, middle = side_of(ratios), ratios["median"]
    return f"{middle:.3g}x faster" if side > 0 else f"{1 / middle:.3g}x slower" if side else "alike"


def _probe_cells(probe: dict[str, Any]) -> list[list[str]]:
    """Return a row for each collective, and one for the computing of each method."""
    rows = []
    for name, alpha_s in probe["alpha_s"].items():
        beta_s = probe["beta_s_per_word"][name]
        rows.append([name, _ms(alpha_s), f"{1e9 * beta_s:.3g}", f"{32e-6 / beta_s:.0f}" if beta_s else UNKNOWN, ""])
    for row in probe["computing_s_per_element"]:
        seconds = UNKNOWN if row["seconds"] is None else f"{1e9 * row['seconds']:.3g}"
        rows.append([f"{row['method']} {'' if row['density'] is None else row['density']}", "", "", "", seconds])
    return rows


def _split(row: dict[str, Any]) -> str:
    """Return the split of a step's time on the slowest rank; the exchange overlaps backward."""
    parts = {name: _ms(seconds) for name, seconds in row["parts_s"].items()}
    text = f"{row['name']}: forward {parts.pop('forward')} ms, backward {parts.pop('backward')}"
    if "wait" not in parts:
        return text
    waiting, phases = parts.pop("wait"), ", ".join(f"{name} {spent}" for name, spent in parts.items())
    return f"{text}, {waiting} of it waiting for the exchange: {phases}"


def _ms(seconds: float | None) -> str:
    """Return seconds as milliseconds, to three figures or a whole number of them."""
    if seconds is None:
        return UNKNOWN
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


@dataclass(frozen=True)
class Plot:
    """A plot: `curves` has the median ms of each method, at `places`; `labels` names places without a scale.

    Without places it has bars: `curves` has median, min and max of each.
    """

    name: str
    title: str
    axis: str
    places: Sequence[float]
    curves: dict[str, list[float]]
    labels: Sequence[str] = ()


def plots_of(settings: Sequence[dict[str, Any]]) -> list[Plot]:
    """Return a plot over links, ranks and densities, wherever more than one was measured; else bars of the methods."""
    return [*_over_networks(settings), *_over_densities(settings)] or [_bars(settings[0])]


def _bars(setting: dict[str, Any]) -> Plot:
    spans = {row["name"]: [1e3 * row["seconds"][key] for key in ("median", "min", "max")] for row in setting["rows"]}
    where = Setting(setting["ranks"], setting["mbit"], setting["delay_ms"])
    return Plot("methods", f"time by method, {where}", "ms: median, and from min to max", (), spans)


def draw(plot: Plot, folder: Path) -> str:
    """Save a plot, see `save`."""
    paint = _draw_curves if plot.places else _draw_bars
    return save(plot.name, folder, lambda axes, palette: paint(axes, plot, palette))


def save(name: str, folder: Path, paint: Callable[[Any, dict[str, str]], None]) -> str:
    """Write NAME.png and NAME.svg, and return the svg element in the colours of the page, dark or light.

    `paint` gets the axes, and the colours by name.
    """
    import matplotlib.figure

    palette = _palette()
    style: dict[Any, Any] = dict.fromkeys(INKED, palette["ink"]) | {"svg.fonttype": "none", "svg.hashsalt": name}
    svg = folder / f"{name}.svg"
    with matplotlib.rc_context(style):
        figure = matplotlib.figure.Figure(figsize=SIZE_INCHES, layout="constrained")
        paint(figure.subplots(), palette)
        figure.savefig(folder / f"{name}.png", dpi=DPI)
        figure.savefig(svg, metadata={"Date": None}, transparent=True)
    text = svg.read_text()
    for colour in ("ink", "soft", *CURVES):
        text = text.replace(palette[colour], f"var(--{colour})")
    return text[text.index("<svg") :]


def _draw_curves(axes: Any, plot: Plot, palette: dict[str, str]) -> None:
    for i, (name, ms) in enumerate(plot.curves.items()):
        dashes = DASHES[i // len(CURVES) % len(DASHES)]
        axes.plot(plot.places, ms, dashes, marker="o", color=palette[CURVES[i % len(CURVES)]], label=name)
    axes.set_yscale("log")
    if not plot.labels:
        axes.set_xscale("log")
    axes.set_xticks(plot.places, plot.labels or [f"{place:g}" for place in plot.places])
    axes.set_xticks([], minor=True)
    axes.set(title=plot.title, xlabel=plot.axis, ylabel="ms, median")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _draw_bars(axes: Any, plot: Plot, palette: dict[str, str]) -> None:
    medians, lows, highs = zip(*plot.curves.values(), strict=True)
    spans = [
        [m - low for m, low in zip(medians, lows, strict=True)],
        [h - m for m, h in zip(medians, highs, strict=True)],
    ]
    axes.barh(range(len(medians)), medians, xerr=spans, color=palette["blue"], ecolor=palette["soft"], capsize=3)
    axes.set_yticks(range(len(medians)), list(plot.curves))
    axes.invert_yaxis()
    axes.set(title=plot.title, xlabel=plot.axis)
    axes.grid(visible=True, axis="x", alpha=0.3)


def _over_networks(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    for over, where, chosen in series_of(settings):
        if len(chosen) == 1:
            continue
        medians = [[1e3 * row["seconds"]["median"] for row in setting["rows"]] for setting in chosen]
        names = [row["name"] for row in chosen[0]["rows"]]
        curves = {name: list(ms) for name, ms in zip(names, zip(*medians, strict=True), strict=True)}
        if over == "mbit":
            name, labels = f"links-p{chosen[0]['ranks']}", [link_name(setting["mbit"]) for setting in chosen]
            yield Plot(name, f"time over link speed, {where}", "link", range(len(chosen)), curves, labels)
        else:
            name, places = f"ranks-{_slug(chosen[0]['mbit'])}", [setting["ranks"] for setting in chosen]
            yield Plot(name, f"time over ranks, {where}", "ranks", places, curves)


def _over_densities(settings: Sequence[dict[str, Any]]) -> Iterator[Plot]:
    """Yield a plot for each setting; the curve of a method without a density is level."""
    densities = sorted({row["density"] for row in settings[0]["rows"]} - {None})
    for setting in settings if len(densities) > 1 else ():
        curves: dict[str, list[float]] = {}
        for row in sorted(setting["rows"], key=lambda row: row["density"] or 0.0):
            count = len(densities) if row["density"] is None else 1
            curves.setdefault(row["method"], []).extend([1e3 * row["seconds"]["median"]] * count)
        name = f"densities-p{setting['ranks']}-{_slug(setting['mbit'])}"
        title = f"time over density, P = {setting['ranks']}, {link_name(setting['mbit'])}"
        yield Plot(name, title, "density", densities, curves)


def _slug(mbit: float | None) -> str:
    """Return a link's name for a file."""
    return f"{mbit:g}mbit" if mbit else link_name(mbit).split()[0]
