"""The promises to the users of the research code that no other file here keeps. The others are kept by

every figure is measured or n/a      test_run_logger, test_loop: NaN and skip, validation; telemetry
the record of every step             test_loop: both phases, every rank, from the first step
dense and sparse steps are told      test_plan, test_cli: the plan; test_loop: the first sparse step, the end
tuned recipes, lr 0.01               test_recipes, test_cli; divergence: test_divergence, test_loop
CTC of log-probabilities             models/test_ctc, test_loop: steps of plain PyTorch
one place to clip                    test_loop: local and global clip, steps of plain PyTorch
manifests with relative paths        data/test_manifest, test_bad_input
any launcher, any number of workers  test_dist_env, test_dist, test_spawn; test_loop: another number of workers
nothing hangs                        test_spawn, test_bad_input, test_loop: killed while it writes
checkpoints hold the residuals       test_loop: resume; test_checkpoint: another number of workers
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rich.console

from oktopk.telemetry.figures import summarise
from oktopk.telemetry.format import format_value
from oktopk.train.console import end_table
from oktopk.train.metrics import Counts
from oktopk.train.plan import Plan
from tests.integrations.examples import run as run_python


def test_wer_may_pass_one() -> None:
    assert Counts(word_edits=3, words=2).wer == 1.5
    assert format_value(1.5) == "1.5"


def test_an_unknown_figure_says_so_and_why() -> None:
    plan = Plan.__new__(Plan)
    object.__setattr__(plan, "workers", 1)
    out = rich.console.Console(width=120)
    with out.capture() as captured:
        out.print(end_table(summarise([]), plan, {}))
    assert "nan" not in captured.get().lower().split()
    assert "n/a" in captured.get()
    assert "n/a (no step was sparse)" in captured.get()


@pytest.fixture
def command(speech: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that runs `oktopk train` on two workers: status and output."""

    def run(*more: object, **environment: str) -> tuple[int, str]:
        settings = ("--set", "threads=1", "--set", "device=cpu", "--set", "timeout_s=30")
        words = ("--data-dir", speech, "--runs", tmp_path, "--name", "a", "--batch-size", 2, "--nproc", 2, *settings)
        done = run_python("-m", "oktopk", "train", *words, *more, **environment)
        return done.returncode, done.stdout

    return run


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_no_worker_makes_a_deprecated_call(command: Callable[..., tuple[int, str]]) -> None:
    """With every deprecation an error, in all workers."""
    wrong = "error::DeprecationWarning,error::FutureWarning,error::PendingDeprecationWarning"
    more = ("--max-epochs", 1, "--dense-steps", 2, "--set", "max_steps=4")
    status, output = command(*more, PYTHONWARNINGS=wrong)
    assert status == 0, output
    assert "compression was active on 2 of 4 steps" in output
    assert "Warning:" not in output


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_divergence_ends_the_command_with_one_message(command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, output = command("--lr", "1.0", "--set", "clip=0", "--max-epochs", 4)
    assert status == 1, output
    assert "Traceback" not in output
    told = [line for line in output.splitlines() if "is not finite" in line or "exploded" in line]
    assert len(told) == 1, output
    for word in ("step ", "rank ", "lr 1", "gradient norm", "'", "lower --lr"):
        assert word in told[0]
    assert "nan" not in output.lower().split()
    assert "nan" not in (tmp_path / "a" / "metrics.jsonl").read_text().lower()
