"""`Finding`, a line of the report, and the report as lines or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

INFO, OK, NOTE, FAIL = "info", "ok", "note", "FAIL"
"""Status of a finding: nothing to judge; as it should be; works, but could be better; wrong."""


@dataclass(frozen=True)
class Finding:
    """Subject and result of a check, for people; its status, advice if it is not `ok`, and figures for programs.

    >>> print(Finding("versions", "torch", "2.9.0"))
    info  versions   torch                2.9.0
    """

    about: str
    name: str
    found: str
    status: str = INFO
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        advice = f" -> {self.advice}" if self.advice else ""
        return f"{self.status:5} {self.about:10} {self.name:20} {self.found}{advice}"


def print_report(findings: Sequence[Finding], as_object: bool = False) -> bool:
    """Print all findings and the verdict, or `as_object` the same as JSON; return whether nothing failed."""
    is_well = all(finding.status != FAIL for finding in findings)
    if as_object:
        object_ = {"ok": is_well, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(object_, allow_nan=False, indent=1))
        return is_well
    print(*findings, sep="\n")
    notes = sum(finding.status == NOTE for finding in findings)
    better = f"; {notes} could be better: see note" if notes else ""
    print(f"all is well{better}" if is_well else "something is wrong here: see the lines that say FAIL")
    return is_well
