"""The command line: plan, lists, one whole run, and errors of one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import oktopk
from oktopk.cli.root import app, load
from oktopk.train import cli
from oktopk.train.config import Config
from oktopk.train.rundir import RunDir, RunError
from tests.integrations.examples import ROOT
from tests.train.test_dist_env import SRUN


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OKTOPK_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """Return the one line that says why."""
    result = call(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error ")
    return str(lines[0])


def test_dry_run_says_what_would_be_and_writes_nothing(tmp_path: Path) -> None:
    result = call("train", "--dry-run", "--runs", tmp_path / "runs", "--max-epochs", 10, "--nproc", 2)
    assert result.exit_code == 0, result.output
    assert "320 in 10 epochs of 32: 128 dense, 192 sparse" in result.output
    assert "a dense step sends 4.25 MB a worker, a sparse one about" in result.output
    assert "would write" in result.output
    assert "WARNING" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_dry_run_warns_when_no_step_will_be_sparse(tmp_path: Path) -> None:
    result = call("train", "--dry-run", "--runs", tmp_path / "runs", "--max-epochs", 1, "--nproc", 2)
    assert "32 in 1 epochs of 32: 32 dense, 0 sparse" in result.output
    assert "WARNING no step will be sparse" in result.output


@pytest.mark.parametrize("lr", ["0.001", "0.01"])
def test_their_command(speech: Path, lr: str) -> None:
    """The command that users of the research code know, word for word."""
    result = call(
        "train", "--dnn", "lstman4", "--dataset", "an4", "--data-dir", speech, "--max-epochs", "1", "--batch-size", "8",
        "--lr", lr, "--compressor", "oktopk", "--density", "0.02", "--dry-run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"lr {lr}" in result.output
    assert "lstman4, 27," in result.output
    assert "density 0.02" in result.output


def test_a_hint_for_what_was_meant() -> None:
    assert "Did you mean 'lr'?" in refused("train", "--set", "lrr=1", "--dry-run")
    assert "Did you mean 'oktopk'?" in refused("train", "--compressor", "oktop", "--dry-run")
    assert "Did you mean 'lstman4'?" in refused("train", "--dnn", "lstman", "--dry-run")
    assert "Did you mean 'an4-small'?" in refused("train", "--recipe", "an4small", "--dry-run")

    assert "Did you mean 'an4-small'?" in refused("train", "--set", "recipe=an4small", "--dry-run")
    assert "--set wants key=value, not 'lr'" in refused("train", "--set", "lr", "--dry-run")
    assert "lr wants a number, not 'fast'" in refused("train", "--set", "lr=fast", "--dry-run")


def test_lists() -> None:
    settings = call("train", "--settings").output
    assert "dense_steps" in settings
    assert "lstman4-extended" in settings
    assert call("--version").output == f"oktopk {oktopk.__version__}\n"


def test_a_run_from_the_command_line(tmp_path: Path, speech: Path) -> None:
    """In this process, where every warning is an error."""
    result = call(
        "train", "--data-dir", speech, "--runs", tmp_path, "--name", "a", "--nproc", 1, "--batch-size", 4,
        "--max-epochs", 1, "--dense-steps", 2, "--set", "max_steps=4", "--set", "threads=1", "--set", "device=cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "compression was active on 2 of 4 steps" in result.output
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["steps"] == 4
    assert RunDir.open(tmp_path / "a").load_config().lr == 0.01  # of the recipe
    for name in ("config.json", "versions.json", "metrics.jsonl", "logs/rank0.log", "tensorboard", "checkpoints/last"):
        assert (tmp_path / "a" / name).exists()
    assert _going_on(tmp_path / "a", "--max-epochs", 1, "--set", "max_steps=6").endswith("6 of 6")


def _going_on(run: Path, *more: object) -> str:
    result = call("train", "--resume", run, *more)
    assert result.exit_code == 0, result.output
    assert "going on from" in result.output
    summary = json.loads((run / "summary.json").read_text())
    return f"{summary['steps']} of {RunDir.open(run).load_config().max_steps}"


def test_a_name_again_gets_a_number(tmp_path: Path) -> None:
    made = [RunDir.create(tmp_path, "a", Config()).path.name for _ in range(3)]
    assert made == ["a", "a-2", "a-3"]


def test_resume_wants_a_run(tmp_path: Path) -> None:
    assert "is not the folder of a run: it has no config.json" in refused("train", "--resume", tmp_path)
    run = RunDir.create(tmp_path, "a", Config())
    assert "leave --recipe out" in refused("train", "--resume", run.path, "--recipe", "lstman4")
    assert "no checkpoint to go on from" in refused("train", "--resume", run.path)
    (run.checkpoints / "step-00000001").mkdir()
    (run.checkpoints / "last").write_text("step-00000001")
    assert "the checkpoint has no" in refused("train", "--resume", run.path)
    run.config.write_text("{")
    assert f"{run.config} is no config of a run" in refused("train", "--resume", run.path)
    with pytest.raises(RunError):
        RunDir.open(tmp_path / "b")


def test_nothing_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is one line, however narrow the terminal: it is there to be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    assert "x" * 90 in refused("train", "--data-dir", tmp_path / ("x" * 90), "--nproc", 1)


@pytest.mark.parametrize(("asked", "starts"), [("2", 2), ("1", None), (None, None)])
def test_the_only_task_of_a_job_may_start_workers(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, starts: int | None
) -> None:
    """As in the shell that `srun --pty bash` opens: its single place is no reason to refuse --nproc."""
    env = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_GTIDS": "0"}
    monkeypatch.setattr(cli, "os", SimpleNamespace(environ=env))
    started, worked = list[int](), list[int]()
    monkeypatch.setattr(cli, "_start", lambda _, workers, __: started.append(workers))
    monkeypatch.setattr(cli, "work", lambda _, place: worked.append(place.size))
    ran = call("train", *(["--nproc", asked] if asked else []))
    assert ran.exit_code == 0, ran.output
    assert (started, worked) == (([starts], []) if starts else ([], [1]))


def test_another_number_of_workers_is_refused_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "os", SimpleNamespace(environ=SRUN))
    assert "srun started 3 workers: leave --nproc 2 out" in refused("train", "--nproc", "2")


# The job scripts


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("slurm.sh", "srun --kill-on-bad-exit=1 oktopk train", ""),
        ("pbs.sh", "mpiexec -n 8 --ppn 4 ", "from x1:20123\n"),
    ],
)
def test_a_job_script_starts_our_command_with_flags_that_exist(
    name: str, begins: str, ends: str, tmp_path: Path
) -> None:
    """With stand-ins for srun and mpiexec, which print their arguments and the master."""
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")
    for launcher in ("srun", "mpiexec"):
        (tmp_path / launcher).write_text(
            f'#!/bin/sh\necho {launcher} "$@" from "${{MASTER_ADDR-}}:${{MASTER_PORT-}}"\n'
        )
        (tmp_path / launcher).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "PBS_JOBID": "123[4].pbs"}
    env |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        script = ["bash", str(ROOT / "examples" / "launch" / name)]
        return subprocess.run(
            script, env=env | more, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
        )

    done = run(DATA_DIR="d")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(begins)
    assert done.stdout.endswith(ends)
    flags = set(re.findall(r"--[a-z][a-z-]*", done.stdout.partition("oktopk train")[2]))
    known = {flag for each in load("train").params for flag in each.opts}
    assert len(flags) > 5
    assert flags <= known
    done = run()
    assert done.returncode != 0
    assert "say where the data is" in done.stderr
