"""`oktopk doctor` as a command of typer."""

from __future__ import annotations

from typing import Annotated

import typer

from oktopk.cli.errors import FAILED
from oktopk.doctor import examine
from oktopk.doctor.report import is_well, print_report


def doctor(
    as_object: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")] = False,
) -> None:
    """Show versions, devices and kernels here, whether the kernels compute right, and how fast.

    oktopk doctor           a table, in seconds; the exit status is 1 if something is wrong
    oktopk doctor --json    the same for a program, or for a bug report

    [bold]ok[/] is as it should be. [bold]note[/] works, and could be better: the line says how.
    [bold]FAIL[/] is wrong: do not train with it.

    The self-test compares the kernels in use with a slow and simple reference,
    bit by bit, on new random numbers every time, and lets two ranks exchange
    gradients: nothing may be lost. The speed is that of the pass over a
    gradient of 27.6 M elements, beside a copy: more than half of it is good.
    It takes longer the first time, when kernels are compiled.
    """
    findings = list(examine())
    print_report(findings, as_object)
    if not is_well(findings):
        raise typer.Exit(FAILED)
