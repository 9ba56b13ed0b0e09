"""`Report`: everything that is to be shown of some runs, whoever shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oktopk.report.charts import Chart, charts_of, comparison_charts
from oktopk.report.compare import comparison_table
from oktopk.report.tables import Card, Table, cards_of, tables_of
from oktopk.report.warnings import Note, notes_of
from oktopk.telemetry.figures import summary_of
from oktopk.telemetry.run import Run


@dataclass(frozen=True)
class RunReport:
    """What is shown of one run; charts by section."""

    run: Run
    notes: Sequence[Note]
    cards: Sequence[Card]
    tables: Sequence[Table]
    charts: dict[str, list[Chart]]

    def table(self, name: str) -> Table:
        """Return the table of this name."""
        return next(table for table in self.tables if table.name == name)


@dataclass(frozen=True)
class Report:
    """What is shown of some runs; what compares them is there if they are more than one."""

    runs: Sequence[RunReport]
    comparison: Table | None
    charts: Sequence[Chart]


def make_report(runs: Sequence[Run]) -> Report:
    """Return the report of one run or several."""
    reports = [RunReport(run, notes_of(run), cards_of(run), tables_of(run), charts_of(run)) for run in runs]
    several = len(runs) > 1
    return Report(reports, comparison_table(runs) if several else None, comparison_charts(runs) if several else [])


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as one object of raw figures; null where one is not known. Charts are for the page."""
    return {
        "runs": [
            {
                "name": each.run.name,
                "state": each.run.state,
                "notes": [asdict(note) for note in each.notes],
                "summary": summary_of(each.run),
                "tables": {table.name: _objects(table) for table in each.tables},
            }
            for each in report.runs
        ],
        "comparison": None if report.comparison is None else _objects(report.comparison),
    }


def _objects(table: Table) -> list[dict[str, Any]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]
