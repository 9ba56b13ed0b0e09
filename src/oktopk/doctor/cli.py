"""`oktopk doctor`: the report as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oktopk.cli.errors import FAILED
from oktopk.doctor import FAIL, INFO, NOTE, OK, Finding, examine
from oktopk.doctor.text import is_well, object_of, verdict_of

STYLES = {INFO: "", OK: "green", NOTE: "yellow", FAIL: "bold red"}


def doctor(
    as_object: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")] = False,
) -> None:
    """Say what is installed here, which kernels run because of it, whether they compute right, and how fast.

    oktopk doctor           a table, in seconds; the exit status is 1 if something is wrong
    oktopk doctor --json    the same for a program, or for a bug report

    [bold]ok[/] is as it should be. [bold]note[/] works, and could be better: the line says how.
    [bold]FAIL[/] is wrong: do not train with it.

    The self-test compares the kernels in use with a slow and simple reference,
    bit by bit, on numbers that are other ones every time, and lets two ranks
    exchange gradients: nothing may be lost. The speed is that of the pass over
    a gradient of 27.6 M elements, beside a copy: more than half of it is good.
    It takes longer the first time, when kernels are compiled.
    """
    findings = list(examine())
    if as_object:
        typer.echo(json.dumps(object_of(findings), allow_nan=False, indent=1))
    else:
        console = Console()
        console.print(table_of(findings))
        console.print(verdict_of(findings), style=STYLES[OK if is_well(findings) else FAIL])
    if not is_well(findings):
        raise typer.Exit(FAILED)


def table_of(findings: Sequence[Finding]) -> Table:
    """Return the report as people read it."""
    table = Table("about", "what", "found", "", box=None, pad_edge=False)
    about = ""
    for finding in findings:
        found = escape(finding.found) + (f"\n[yellow]{escape(finding.advice)}[/]" if finding.advice else "")
        status = "" if finding.status == INFO else f"[{STYLES[finding.status]}]{finding.status}[/]"
        table.add_row("" if finding.about == about else finding.about, escape(finding.name), found, status)
        about = finding.about
    return table
