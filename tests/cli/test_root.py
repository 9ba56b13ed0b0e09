"""The root of the command line: it imports the command that is called, and no other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from oktopk.cli.root import COMMANDS, app

PROBE = """
import json, sys
from oktopk.cli.root import main
found = {}
for command in json.loads(sys.argv[1]):
    before = set(sys.modules)
    try:
        main(command)
    except SystemExit:
        pass
    found[command[0]] = sorted({name.split(".")[1] for name in set(sys.modules) - before if name.startswith("oktopk.")})
print(json.dumps(found))
"""


def test_doctor_report_and_bench_import_no_trainer_and_no_other_command() -> None:
    """Each of them in turn, in one process, as far as it gets without work: the packages that it adds."""
    calls = [["doctor", "--help"], ["report", "no-such-run"], ["bench", "step", "--model", "no.such:thing"]]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(calls)], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert "doctor" in found["doctor"]
    assert not {"report", "train"} & set(found["doctor"])
    assert "report" in found["report"]
    assert not {"bench", "doctor", "train"} & set(found["report"])
    assert "bench" in found["bench"]
    assert "train" not in found["bench"]


def test_help_lists_the_commands() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    shown = {line.split()[1] for line in done.stdout.splitlines() if len(line.split()) > 2}
    assert shown & set(COMMANDS) == set(COMMANDS) - {"worker"}


@pytest.mark.parametrize(("name", "said"), [("docter", "Did you mean 'doctor'"), ("nothing", "No such command")])
def test_an_unknown_command_is_refused_with_a_hint(name: str, said: str) -> None:
    done = CliRunner().invoke(app, [name])
    assert done.exit_code == 2
    assert said in done.stderr
