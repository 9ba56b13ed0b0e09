"""Every table of a report as a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from oktopk.report.report import Report
from oktopk.report.tables import Table, step_table
from oktopk.telemetry.run import Run


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
    """Return what the files of each run begin with: nothing, if there is one run."""
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
