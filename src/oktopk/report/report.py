"""`Report`: the warnings, cards, tables and charts of some runs, for page, terminal, CSV and JSON."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oktopk.report.charts import Chart, charts_of, comparison_charts
from oktopk.report.tables import Card, Table, cards_of, comparison_table, step_table, tables_of
from oktopk.telemetry.figures import summary_of, verdict_of
from oktopk.telemetry.format import count
from oktopk.telemetry.run import Run
from oktopk.telemetry.schema import VERSION

SHOWN_LINES = 5
SECTIONS = {
    "Learning": ("epochs", "events"), "Compression": ("phases",), "Traffic": ("bytes", "messages"), "Time": ("time",),
    "Balance": ("ranks", "regions"),
}  # fmt: skip
"""Tables of the sections of a page."""


@dataclass(frozen=True)
class Note:
    """A banner; `level` is "error", "warning" or "info"."""

    level: str
    text: str


@dataclass(frozen=True)
class RunReport:
    """The report of one run; charts by section. The verdict says whether compression paid, if that is known."""

    run: Run
    verdict: str | None
    notes: Sequence[Note]
    cards: Sequence[Card]
    tables: Sequence[Table]
    charts: dict[str, list[Chart]]

    def has(self, section: str) -> bool:
        """Whether a section of the page has something to show."""
        return bool(self.charts[section]) or any(self.table(name).rows for name in SECTIONS[section])

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
    reports = [
        RunReport(run, verdict_of(run), notes_of(run), cards_of(run), tables_of(run), charts_of(run)) for run in runs
    ]
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
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def write_csv(report: Report, folder: Path) -> int:
    """Write RUN-TABLE.csv for each run and table, its steps too; return the number of files."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {} if report.comparison is None else {"comparison": report.comparison}
    for prefix, each in zip(_prefixes([each.run.name for each in report.runs]), report.runs, strict=True):
        tables |= {f"{prefix}{table.name}": table for table in (*each.tables, step_table(each.run))}
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([table.columns, *table.rows])
    return len(tables)


def _prefixes(runs: Sequence[str]) -> list[str]:
    """Return the prefix of each run's files: empty, if there is one run."""
    if len(runs) == 1:
        return [""]
    names = [re.sub(r"[^\w.-]", "_", run) for run in runs]
    return [f"{name}-" if names.count(name) == 1 else f"{name}-{i}-" for i, name in enumerate(names)]


def notes_of(run: Run) -> list[Note]:
    """Return the warnings and notes of a run."""
    if not run.num_steps and not run.events and not run.header:
        return [Note("warning", "The file holds no record yet."), *_damage(run)]
    return [*_ending(run), *_damage(run), *_content(run)]


def _ending(run: Run) -> Iterator[Note]:
    planned = run.header.get("steps")
    made = f"{run.num_steps:,} of {planned:,} steps" if isinstance(planned, int) else count(run.num_steps, "step")
    if run.state == "failed":
        yield Note("error", f"The run failed after {made}: {run.events[-1]['message']}")
    elif run.state == "stopped":
        yield Note("warning", f"The run was stopped by Ctrl-C after {made}.")
    elif run.state == "running":
        yield Note("info", f"The run is still going on: {made} so far.")
    elif run.state == "unfinished" and run.header:
        yield Note("warning", f"The run was killed, or its record was cut: it has {made}.")


def _damage(run: Run) -> Iterator[Note]:
    if run.is_cut:
        yield Note("warning", "The file ends amid a line, which is left out: it is being written, or was cut off.")
    if run.bad_lines:
        lines = ", ".join(map(str, run.bad_lines[:SHOWN_LINES])) + ", ..." * (len(run.bad_lines) > SHOWN_LINES)
        yield Note("warning", f"Left out, being no records: {count(len(run.bad_lines), 'line')} ({lines}).")
    version = run.header.get("version", VERSION)
    if version != VERSION:
        versions = f"version {version!r}, this report knows version {VERSION}"
        yield Note("warning", f"The file is of {versions}: what it has under other names is missing here.")


def _content(run: Run) -> Iterator[Note]:
    if not run.header:
        yield Note("info", "No line says what the run was: settings are not known.")
    if len(run.writers) > 1:
        how = 'give each rank a file of its own, as in JsonlSink(f"metrics-{rank}.jsonl")'
        yield Note("warning", f"Several ranks wrote this file, so that steps repeat and times mix: {how}.")
    elif (np.diff(run.steps) <= 0).any():
        yield Note("warning", "Step numbers repeat: the file seems to hold several runs, shown as one.")
    if run.num_steps and not run.is_sparse.any():
        yield Note("info", "No step was sparse: compression was not active.")
    if run.is_skipped.any():
        skipped = count(int(run.is_skipped.sum()), "step")
        yield Note("warning", f"Skipped {skipped}, because a gradient was not finite.")
    if run.header.get("rank") is not None:
        yield Note("info", f"The file is of rank {run.header['rank']}: others write files of their own.")
        return
    there = {"phases of every rank": run.names("ranks.0.seconds"), "message sizes": run.messages}
    missing = " and no ".join(name for name, found in there.items() if not found)
    if run.num_steps and missing:
        who = "an earlier version, or a script of one's own, wrote it"
        yield Note("info", f"The file has no {missing}: {who}. They are shown as n/a.")
