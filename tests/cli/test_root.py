"""The command line's root: version, help, typos and completion need neither torch nor an extra."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oktopk.__main__ import SHELLS
from oktopk.cli import COMMANDS, WORDS
from oktopk.cli.root import load

PROBE = """
import json, sys
from oktopk.__main__ import main
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
WITHOUT = """
import sys
for name in sys.argv.pop(1).split():
    sys.modules[name] = None  # an import of it fails
from oktopk.__main__ import main
main(sys.argv[1:])
"""


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False)


def bare(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where only the standard library can be imported."""
    return run(sys.executable, "-c", WITHOUT, "torch numpy typer click rich", *args, **env)


def test_doctor_report_and_bench_import_no_trainer_and_no_other_command() -> None:
    """Each of them in turn, in one process, as far as it gets without work: the packages that it adds."""
    calls = [["doctor", "--help"], ["report", "no-such-run"], ["bench", "step", "--model", "no.such:thing"]]
    done = run(sys.executable, "-c", PROBE, json.dumps(calls))
    found = json.loads(done.stdout.splitlines()[-1])
    strangers = {"doctor": {"report", "train"}, "report": {"bench", "doctor", "train"}, "bench": {"train"}}
    for own, others in strangers.items():
        assert own in found[own]
        assert not others & set(found[own])


@pytest.mark.parametrize(("args", "status", "said"), [
    (["--version"], 0, "oktopk 0."),
    (["--help"], 0, "Usage: oktopk COMMAND"),
    (["-h"], 0, "oktopk --completion SH"),
    ([], 0, "Usage: oktopk COMMAND"),
    (["docter"], 2, "no such command: 'docter'. Did you mean 'doctor'?"),
    (["--verson"], 2, "Did you mean '--version'?"),
    (["nothing"], 2, "Try oktopk --help"),
    (["report", "x"], 2, "oktopk report needs typer: pip install 'oktopk[report]'"),
    (["worker"], 2, "oktopk worker needs typer: pip install 'oktopk[train]'"),
    (["--completion", "tcsh"], 2, "--completion wants bash, zsh or fish, and got 'tcsh'"),
])  # fmt: skip
def test_the_root_needs_only_python(args: list[str], status: int, said: str) -> None:
    done = bare(*args)
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True)


@pytest.mark.parametrize("args", [["report", "--text", "RUN"], ["report", "RUN"], ["watch", "RUN"], ["report", "-h"]])
def test_report_and_watch_need_no_torch(args: list[str], tmp_path: Path) -> None:
    """They start in a fraction of a second, also on a laptop to which a run was copied."""
    lines = [{"kind": "run", "version": 1, "workers": 2}, {"kind": "event", "event": "end", "step": 0, "message": "."}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    given = [str(tmp_path) if word == "RUN" else word for word in args]
    out = ["-o", str(tmp_path / "page.html")] if args == ["report", "RUN"] else []
    done = run(sys.executable, "-c", WITHOUT, "torch", *given, *out)
    assert done.returncode == 0, done.stderr


def test_help_lists_the_commands() -> None:
    assert {line.split()[0] for line in bare("--help").stdout.splitlines() if line.startswith("  ")} > set(COMMANDS)


@pytest.mark.parametrize("words", [*COMMANDS, "bench exchange", "data an4"])
def test_a_commands_help_is_plain_and_keeps_the_lines_of_examples(words: str) -> None:
    from tests.commands import invoke

    done = invoke(*words.split(), "-h", columns=40)
    assert (done.exit_code, "─" in done.stdout) == (0, False)
    examples = {"bench exchange": "--mbit 100,1000,0 --out results\n", "data an4": ".tar.gz --out data/an4\n"}
    assert examples.get(words, "-h, --help") in done.stdout


@pytest.mark.parametrize("group", ["bench", "data"])
def test_lines_about_commands_are_whole_at_80_columns(group: str) -> None:
    from tests.commands import invoke

    shown = invoke(group, "-h", columns=80).stdout
    assert "..." not in shown.split("Commands:")[1]


@pytest.mark.parametrize(("typed", "offered"), [
    ("re", "report"),
    ("--v", "--version"),
    ("report --j", "--json"),
    ("bench exchange --ranks 2 --mb", "--mbit"),
    ("bench ", "exchange step local chaos probe"),
    ("report ", ""),  # files, which the shell offers
    ("nothing --j", ""),
])  # fmt: skip
def test_completion_needs_only_python(typed: str, offered: str) -> None:
    assert bare(*typed.split(" "), _OKTOPK_COMPLETE="1").stdout.split() == offered.split()


def test_completion_has_every_option_of_every_command() -> None:
    def words_of(name: str, command: Any) -> dict[str, str]:
        below = getattr(command, "commands", {})
        options = (option for each in command.params for option in each.opts if option.startswith("--"))
        found = {name: " ".join(below or options)}
        for sub, each in below.items():
            found |= words_of(f"{name} {sub}", each)
        return found

    loaded = [words_of(name, load(name)) for name in COMMANDS if name != "doctor"]
    root = f"{' '.join(COMMANDS)} --help --version --completion"
    assert {"": root, "doctor": "--json", **{name: words for each in loaded for name, words in each.items()}} == WORDS


def test_bash_completes(tmp_path: Path) -> None:
    (tmp_path / "oktopk").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m oktopk "$@"\n')
    (tmp_path / "oktopk").chmod(0o755)
    script = f'{SHELLS["bash"]}\nCOMP_WORDS=(oktopk do); COMP_CWORD=1; _oktopk; echo "${{COMPREPLY[@]}}"'
    assert run("bash", "-c", script, PATH=f"{tmp_path}:{os.environ['PATH']}").stdout.split() == ["doctor"]
