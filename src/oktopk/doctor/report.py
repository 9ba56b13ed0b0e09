"""The report: a table where rich is installed, plain lines where it is not, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from oktopk.doctor.finding import FAIL, INFO, NOTE, OK, Finding

STYLES = {INFO: "default", OK: "green", NOTE: "yellow", FAIL: "bold red"}


def is_well(findings: Iterable[Finding]) -> bool:
    """Return whether nothing failed."""
    return all(finding.status != FAIL for finding in findings)


def print_report(findings: Sequence[Finding], as_object: bool = False) -> None:
    """Print all findings and the verdict, or `as_object` the same as JSON."""
    if as_object:
        object_ = {"ok": is_well(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(object_, allow_nan=False, indent=1))
        return
    try:
        _print_table(findings)
    except ImportError:
        print("\n".join(map(line_of, findings)))
    print(verdict_of(findings))


def line_of(finding: Finding) -> str:
    """Return a finding as a line.

    >>> line_of(Finding("versions", "torch", "2.9.0"))
    'info  versions   torch: 2.9.0'
    """
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{finding.status:5} {finding.about:10} {finding.name}: {finding.found}{advice}"


def verdict_of(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    if not is_well(findings):
        return "something is wrong here: see the lines that say FAIL"
    notes = sum(finding.status == NOTE for finding in findings)
    return "all is well" + (f"; {notes} could be better: see note" if notes else "")


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table, about = Table("about", "what", "found", "", box=None, pad_edge=False), ""
    for finding in findings:
        found = escape(finding.found) + (f"\n[yellow]{escape(finding.advice)}[/]" if finding.advice else "")
        status = "" if finding.status == INFO else f"[{STYLES[finding.status]}]{finding.status}[/]"
        table.add_row("" if finding.about == about else finding.about, escape(finding.name), found, status)
        about = finding.about
    Console().print(table)
