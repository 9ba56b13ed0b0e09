"""The report on a terminal."""

from collections.abc import Sequence

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement

from oktopk.report.report import Note, Report
from oktopk.report.tables import Card, Table
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
        out.print(_headlines(each.cards))
        if each.verdict:
            out.print(f"[bold]verdict[/] {escape(each.verdict)}")
        for table in (table for table in each.tables if table.rows):
            out.print(as_table(table, out.width))


def as_line(note: Note) -> str:
    """Return a banner as a line."""
    return f"[{STYLES[note.level]}]{note.level}[/] {escape(note.text)}"


def _headlines(cards: Sequence[Card]) -> rich.table.Table:
    table = rich.table.Table(title="headlines", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for card in cards:
        table.add_row(card.name, format_value(card.value, card.kind), escape(card.note))
    return table


def as_table(table: Table, width: int) -> rich.table.Table:
    """Return a table for a terminal of this width: turned, if it is too wide, and of a long one the last rows."""
    first, names = max(0, len(table.rows) - LONGEST), [escape(name) for name in table.columns]
    cells = [_cells(table, row) for row in range(first, len(table.rows))]
    upright = _grid(table, [names, *cells], [unit == "text" for unit in table.columns.values()])
    if first:
        upright.caption = f"the last {LONGEST} of {len(table.rows):,}; --csv has all"
    if _width(upright) <= width or len(cells) > MOST_TURNED:
        return upright
    turned = _grid(table, list(zip(names, *cells, strict=True)), [True] + [False] * len(cells))
    return upright if _width(turned) > _width(upright) else turned


def _cells(table: Table, row: int) -> list[str]:
    texts = map(escape, map(format_value, table.rows[row], table.columns.values()))
    return [f"[bold green]{text} *[/]" if (row, i) in table.best else text for i, text in enumerate(texts)]


def _grid(table: Table, lines: Sequence[Sequence[str]], is_left: Sequence[bool]) -> rich.table.Table:
    """Return a table of these lines, the first of them its headings."""
    title = f"[bold]{table.title}.[/] [dim]{escape(table.about)}[/]"
    made = rich.table.Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    for heading, left in zip(lines[0], is_left, strict=True):
        made.add_column(heading, justify="left" if left else "right")
    for line in lines[1:]:
        made.add_row(*line)
    return made


def _width(table: rich.table.Table) -> int:
    wide = Console(width=10_000)
    return Measurement.get(wide, wide.options, table).maximum
