"""The report as a page: one file that needs no other, and nothing from the network."""

from __future__ import annotations

import base64
import json
import re
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from oktopk import __version__
from oktopk.errors import SettingError
from oktopk.report.charts import AXES, Chart, thinned
from oktopk.report.report import Report
from oktopk.telemetry.format import format_value
from oktopk.telemetry.run import Floats

NEEDED = ("jinja2", "plotly", "markdown_it")
MOST_POINTS, FEWEST_POINTS = 1000, 40
"""Limits of the places of a group of curves, because more are narrower than a pixel and fewer show no curve."""

ALL_NUMBERS = 120_000
"""Numbers in a page, because with plotly.js (4.8 MB) it then stays below 6 MB: 5.4 characters each."""


def check_possible() -> None:
    """Raise if a package that makes the page is missing."""
    for module in NEEDED:
        if find_spec(module) is None:
            raise SettingError(
                f"the page needs {module}: pip install 'oktopk[report]', or use --text, which works without it"
            )


def make_page(report: Report) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    names = [each.run.name for each in report.runs]
    environment = Environment(loader=PackageLoader("oktopk.report", "."), autoescape=True, trim_blocks=True)
    environment.globals.update(shown=format_value, anchor=anchor, axes=AXES)
    return environment.get_template("page.html").render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        report=report,
        version=__version__,
        definitions=Markup(definitions()),
        data=Markup(as_script(chart_data(report))),
        plotly=Markup(get_plotlyjs()),
        css=Markup(_own("page.css")),
        js=Markup(_own("page.js")),
    )


def as_script(value: Any) -> str:
    """Return the value as JSON that cannot end the script in which it stands."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chart_data(report: Report) -> dict[str, Any]:
    """Return all charts by their id in the page, thinned so that the page stays small."""
    charts = {chart.name: chart for chart in report.charts}
    for i, each in enumerate(report.runs):
        charts |= {f"{chart.name}-{i}": chart for section in each.charts.values() for chart in section}
    columns = sum(len(group.x) + len(group.series) for chart in charts.values() for group in chart.groups)
    points = int(min(MOST_POINTS, max(FEWEST_POINTS, ALL_NUMBERS // max(columns, 1))))
    return {name: _encoded(thinned(chart, points)) for name, chart in charts.items()}


def _encoded(chart: Chart) -> dict[str, Any]:
    return {
        "axes": {axis: AXES[axis] for axis in chart.axes},
        "xTitle": chart.x_title,
        "yTitle": chart.y_title,
        "kind": chart.kind,
        "log": chart.log,
        "fromZero": chart.from_zero,
        "labels": list(chart.labels),
        "zoom": chart.zoom and {"name": chart.zoom[0], "top": chart.zoom[1]},
        "marks": [{"at": dict(at), "name": name} for at, name in chart.marks],
        "groups": [
            {
                "rank": group.rank,
                "x": {axis: packed(group.x[axis]) for axis in chart.axes},
                "series": [
                    {"name": each.name, "color": each.color, "style": each.style, "off": each.off, "y": packed(each.y)}
                    for each in group.series
                ],
            }
            for group in chart.groups
        ],
    }


def packed(values: Floats) -> str:
    """Return the values as base64 of little-endian float32."""
    largest = np.finfo(np.float32).max
    return base64.b64encode(np.clip(values, -largest, largest).astype("<f4").tobytes()).decode()


def anchor(heading: str) -> str:
    """Return the id of a heading of docs/accounting.md.

    >>> anchor("Nominal figures (the literature's)")
    'def-nominal-figures-the-literature-s'
    """
    return "def-" + re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def definitions() -> str:
    """Return docs/accounting.md, which is linked into the package, as HTML, every heading with its id."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(_own("accounting.md"))
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", anchor(inline.content))
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def _own(name: str) -> str:
    return (files("oktopk.report") / name).read_text("utf-8")
