"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement

from oktopk.report.report import Report
from oktopk.report.tables import Card, Table
from oktopk.report.warnings import Note
from oktopk.telemetry.format import format_value

STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
MOST_TURNED = 8
"""Rows of a table that is turned if it is too wide, because each of them becomes a column."""

LONGEST = 40
"""Rows of a table on a terminal, because nobody scrolls further; CSV has all."""


def print_report(report: Report, out: Console) -> None:
    """Print every table, those of a run after its warnings."""
    if report.comparison is not None:
        out.print(as_table(report.comparison, out.width))
    for each in report.runs:
        out.rule(f"[bold]{escape(each.run.name)}[/]")
        for note in each.notes:
            out.print(as_line(note))
        out.print(headlines(each.cards))
        for table in each.tables:
            out.print(as_table(table, out.width))


def as_line(note: Note) -> str:
    """Return a banner as a line."""
    return f"[{STYLES[note.level]}]{note.level}[/] {escape(note.text)}"


def headlines(cards: Sequence[Card]) -> rich.table.Table:
    """Return the headlines as a table."""
    table = rich.table.Table(title="headlines", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for card in cards:
        table.add_row(card.name, format_value(card.value, card.kind), escape(card.note))
    return table


def as_table(table: Table, width: int) -> rich.table.Table:
    """Return a table for a terminal of this width: turned, if it is too wide, and of a long one the last rows."""
    upright, turned = _upright(table), _turned(table)
    fits = _width(upright) <= width or len(table.rows) > MOST_TURNED
    return upright if fits or _width(turned) > _width(upright) else turned


def _width(table: rich.table.Table) -> int:
    wide = Console(width=10_000)
    return Measurement.get(wide, wide.options, table).maximum


def _upright(table: Table) -> rich.table.Table:
    made = _titled(table)
    for column in table.columns:
        made.add_column(escape(column.name), justify="left" if column.kind == "text" else "right")
    first = max(0, len(table.rows) - LONGEST)
    if first:
        made.caption = f"the last {LONGEST} of {len(table.rows):,}; --csv has all"
    for i, row in enumerate(table.rows[first:], first):
        made.add_row(*(_cell(table, i, j, value) for j, value in enumerate(row)))
    return made


def _turned(table: Table) -> rich.table.Table:
    """Return the table with a row for each of its columns."""
    made = _titled(table)
    made.add_column(escape(table.columns[0].name))
    for row in table.rows:
        made.add_column(escape(format_value(row[0], table.columns[0].kind)), justify="right")
    for j, column in enumerate(table.columns[1:], 1):
        made.add_row(escape(column.name), *(_cell(table, i, j, row[j]) for i, row in enumerate(table.rows)))
    return made


def _titled(table: Table) -> rich.table.Table:
    title = f"[bold]{table.title}.[/] [dim]{escape(table.about)}[/]"
    return rich.table.Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)


def _cell(table: Table, row: int, column: int, value: object) -> str:
    text = escape(format_value(value, table.columns[column].kind))
    return f"[bold green]{text} *[/]" if (row, column) in table.best else text
