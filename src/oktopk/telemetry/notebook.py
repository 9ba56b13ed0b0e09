"""A summary as HTML, for notebooks: its table, and bars for the bytes and the seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from oktopk.telemetry.format import format_value

COLOURS = {"dense": "#8a8f98", "sparse": "#3b82f6"}
"""Colours of the phases, readable on light and on dark pages."""

BAR, ROW, LABEL = 260, 22, 130
"""Pixels: length of the longest bar, height of a row, width of the names."""

CELL = 'style="text-align:right;padding-left:1em"'


def as_html(
    rows: Sequence[tuple[str, ...]], bars: Mapping[str, tuple[str, Mapping[str, float | None]]], said: str
) -> str:
    """Return a table of texts, a figure of `bars` (title: unit, value by phase), and sentences below them."""
    head = "".join(f"<th {CELL}>{escape(phase)}</th>" for phase in ("", *COLOURS))
    body = "".join(f"<tr><td>{escape(row[0])}</td>{''.join(f'<td {CELL}>{escape(each)}</td>' for each in row[1:])}</tr>"
                   for row in rows)  # fmt: skip
    below = "".join(f"<p>{escape(line)}</p>" for line in said.splitlines())
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{_figure(bars)}{below}"


def _figure(bars: Mapping[str, tuple[str, Mapping[str, float | None]]]) -> str:
    lines, y = [], 0
    for title, (unit, values) in bars.items():
        largest = max((value for value in values.values() if value), default=0.0)
        if not largest:
            continue
        lines.append(f'<text x="0" y="{y + 15}" font-weight="bold">{escape(title)}</text>')
        for phase, value in values.items():
            y += ROW
            width = BAR * (value or 0.0) / largest
            lines += [
                f'<text x="12" y="{y + 15}">{phase}</text>',
                f'<rect x="{LABEL}" y="{y + 3}" width="{width:.1f}" height="16" fill="{COLOURS[phase]}"/>',
                f'<text x="{LABEL + width + 6:.1f}" y="{y + 15}">{format_value(value, unit)}</text>',
            ]
        y += ROW + 6
    if not lines:
        return ""
    size = f'width="{LABEL + BAR + 110}" height="{y}" font-family="sans-serif" font-size="13" fill="currentColor"'
    label = 'role="img" aria-label="Bytes and seconds of a step"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {label} {size}>{"".join(lines)}</svg>'
