"""The report as lines of text, and as one JSON object: neither wants more than torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from oktopk.doctor.finding import FAIL, NOTE, Finding


def line_of(finding: Finding) -> str:
    """Return a finding as a line.

    >>> line_of(Finding("versions", "torch", "2.9.0"))
    'info  versions   torch: 2.9.0'
    """
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{finding.status:5} {finding.about:10} {finding.name}: {finding.found}{advice}"


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.status != FAIL for finding in findings)


def verdict_of(findings: Sequence[Finding]) -> str:
    """Return the last line."""
    if not is_well(findings):
        return "something is wrong here: see the lines that say FAIL"
    notes = sum(finding.status == NOTE for finding in findings)
    return "all is well" + (f"; {notes} could be better: see note" if notes else "")


def object_of(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {"ok": is_well(findings), "findings": [finding.as_json() for finding in findings]}
