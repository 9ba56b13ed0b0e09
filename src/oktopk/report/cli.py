"""`oktopk report` and `oktopk watch`: the figures of finished and of running runs."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from oktopk.cli.errors import exit_on_error
from oktopk.errors import SettingError
from oktopk.report import page
from oktopk.report.report import as_json, make_report, write_csv
from oktopk.report.text import print_report
from oktopk.report.watch import follow
from oktopk.telemetry.run import Run, load_run

PAGE = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="A run's folder, or its metrics.jsonl.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help=f"The page; without it {PAGE}, here.")] = None,
    text: Annotated[bool, typer.Option("--text", help="The tables on this terminal, and no page.")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="DIR", help="Every table as a CSV file, every step too.")] = None,
    as_object: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")] = False,
) -> None:
    """Show the figures of a run, or of several side by side: one HTML file that works offline.

    oktopk report runs/NAME                   report.html: loss, bytes, time, events
    oktopk report runs/A runs/B -o both.html  two runs, side by side
    oktopk report runs/NAME --text            the same tables here

    A run that still goes on, failed, or left a damaged file is shown as far as it got, and the report says so.
    """
    with exit_on_error():
        if text and as_object:
            raise SettingError("--text and --json both write to stdout: choose one")
        if out is None and not (text or as_object or csv):
            out = Path(PAGE)
        if out is not None:
            page.check_possible()
            page.check_replaceable(out)
        made = make_report(named_apart([load_run(path) for path in runs]))
        if csv is not None:
            Console(stderr=True).print(f"{write_csv(made, csv)} tables in {csv}", highlight=False)
        if as_object:
            typer.echo(json.dumps(as_json(made), allow_nan=False, indent=1))
        elif text:
            print_report(made, Console(soft_wrap=False))
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            done = f"replaced the report {out}" if out.exists() else f"wrote {out}"
            out.write_text(page.make_page(made), encoding="utf-8")
            Console(stderr=True, soft_wrap=True).print(done, highlight=False)


def watch(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or its metrics.jsonl.")]) -> None:
    """Follow a run in this terminal until it ends; Ctrl-C leaves it to itself."""
    with exit_on_error():
        follow(run, Console())


def named_apart(runs: list[Run]) -> list[Run]:
    """Give runs of the same name a number each."""
    seen = Counter[str]()
    for run in runs:
        seen[run.name] += 1
        if seen[run.name] > 1:
            run.name = f"{run.name} ({seen[run.name]})"
    return runs
