"""A plan of a job's ranks: `--hosts` by a stand-in for ssh that runs the command here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oktopk.plan.job import topology_of
from tests.commands import refused

SSH = '#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\nexec sh -c "$1"\n'


def test_the_slowest_link_either_way_counts() -> None:
    links = [
        {"latency_s": 0.001, "up_mbit": 900, "down_mbit": 40},
        {"latency_s": 0.003, "up_mbit": 950, "down_mbit": 990},
    ]
    (level,) = topology_of(links).levels
    assert (level.size, level.mbit, level.latency_s) == (2, 40, 0.002)


@pytest.mark.parametrize(("words", "says"), [
    ("--hosts a --model wide", "--hosts wants two hosts or more"),
    ("--hosts a,b", "name it with --model"),
])  # fmt: skip
def test_hosts_that_cannot_plan_are_refused(words: str, says: str) -> None:
    assert says in refused("plan", words)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_hosts_profile_the_model_and_measure_their_links(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "oktopk",
        "plan",
        "--model",
        "gpt-tiny",
        "--hosts",
        "127.0.0.1,127.0.0.1",
        "--json",
    ]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "PATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout.splitlines()[-1])
    assert (plan["ranks"], plan["model"]["numel"]) == (2, 426_624)
    assert plan["levels"][0]["mbit"] > 0
