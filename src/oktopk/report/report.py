"""`Report`: the warnings, cards, tables and charts of some runs, for page, terminal, CSV and JSON."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oktopk.report.charts import Chart, charts_of, comparison_charts
from oktopk.report.compare import comparison_table
from oktopk.report.tables import Card, Table, cards_of, step_table, tables_of
from oktopk.report.warnings import Note, notes_of
from oktopk.telemetry.figures import summary_of
from oktopk.telemetry.run import Run


@dataclass(frozen=True)
class RunReport:
    """The report of one run; charts by section."""

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
    """The report of some runs; with more than one of them it has a comparison."""

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


def write_csv(report: Report, folder: Path) -> list[Path]:
    """Write RUN-TABLE.csv for each run and table, its steps too; return the files. What is not known is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for prefix, each in zip(prefixes([each.run for each in report.runs]), report.runs, strict=True):
        for table in (*each.tables, step_table(each.run)):
            written.append(_write(table, folder / f"{prefix}{table.name}.csv"))
    if report.comparison is not None:
        written.append(_write(report.comparison, folder / f"{report.comparison.name}.csv"))
    return written


def prefixes(runs: Sequence[Run]) -> list[str]:
    """Return the prefix of each run's files: empty, if there is one run."""
    if len(runs) == 1:
        return [""]
    names = ["".join(c if c.isalnum() or c in "-_." else "_" for c in run.name) for run in runs]
    return [f"{name}-" if names.count(name) == 1 else f"{name}-{i}-" for i, name in enumerate(names)]


def _write(table: Table, path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([column.name for column in table.columns])
        writer.writerows(table.rows)
    return path
