"""The report as a page: one file that needs no other, and nothing from the network."""

import base64
import json
import re
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oktopk import __version__
from oktopk.errors import SettingError
from oktopk.report.charts import Chart, thinned
from oktopk.report.report import SECTIONS, Report
from oktopk.telemetry.format import format_value
from oktopk.telemetry.run import Floats

MADE_BY = '<meta name="generator" content="oktopk report">'
NEEDED = ("jinja2", "plotly", "markdown_it")
MOST_POINTS, FEWEST_POINTS = 1000, 40
"""Limits of the places of a group of curves, because more are narrower than a pixel and fewer show no curve."""

ALL_NUMBERS = 120_000
"""Numbers in a page, because with plotly.js (4.8 MB) it then stays below 6 MB: 5.4 characters each."""


def check_possible() -> None:
    """Raise if a package that makes the page is missing."""
    missing = ", ".join(module for module in NEEDED if find_spec(module) is None)
    if missing:
        advice = "pip install 'oktopk[report]', or use --text, which works without it"
        raise SettingError(f"the page needs {missing}: {advice}")


def check_replaceable(path: Path) -> None:
    """Refuse to write over a file that is no report."""
    if path.exists() and (path.is_dir() or MADE_BY not in path.read_bytes()[:2000].decode(errors="replace")):
        raise SettingError(f"{path} is there already, and is no report of oktopk: choose another name with -o")


def make_page(report: Report) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    names = [each.run.name for each in report.runs]
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    safe = {"css": _own("page.css"), "js": _own("page.js"), "plotly": get_plotlyjs()}
    safe |= {"definitions": definitions(), "data": as_script(chart_data(report))}
    environment = Environment(loader=PackageLoader("oktopk.report", "."), autoescape=True, trim_blocks=True)
    environment.globals.update(shown=format_value, anchor=anchor, zip=zip, version=__version__, sections=SECTIONS)
    page = environment.get_template("page.html")
    return page.render(title=title, report=report, **{name: Markup(text) for name, text in safe.items()})


def as_script(value: Any) -> str:
    """Return charts as JSON that cannot end the script in which it stands."""

    def plain(each: Any) -> Any:
        return packed(each) if isinstance(each, np.ndarray) else vars(each)

    text = json.dumps(value, default=plain, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chart_data(report: Report) -> dict[str, Chart]:
    """Return all charts by their id in the page, thinned so that the page stays small."""
    charts = {chart.name: chart for chart in report.charts}
    for i, each in enumerate(report.runs):
        charts |= {f"{chart.name}-{i}": chart for section in each.charts.values() for chart in section}
    columns = sum(len(group.x) + len(group.series) for chart in charts.values() for group in chart.groups)
    points = int(min(MOST_POINTS, max(FEWEST_POINTS, ALL_NUMBERS // max(columns, 1))))
    return {name: thinned(chart, points) for name, chart in charts.items()}


def packed(values: Floats) -> str:
    """Return the values as base64 of little-endian float32."""
    largest = np.finfo(np.float32).max
    return base64.b64encode(np.clip(values, -largest, largest).astype("<f4").tobytes()).decode()


def anchor(heading: str) -> str:
    """Return the id of a heading of docs/accounting.md."""
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
