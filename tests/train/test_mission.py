"""What users of the research code lived through, row by row, and the tests that keep it from happening again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rich.console

from oktopk.telemetry.figures import summarise
from oktopk.train.console import end_table
from oktopk.train.divergence import shown
from oktopk.train.metrics import Counts
from oktopk.train.plan import Plan
from tests.integrations.examples import run as run_python
from tests.train.runs import Ended, succeed

pytestmark = pytest.mark.timeout(280)  # real runs, also on a machine that is busy

ROWS: dict[str, list[str]] = {
    "nan, [], 1.0 and 0.0 in one log": [
        "../telemetry/test_figures.py::test_no_figure_is_ever_nan",
        "../telemetry/test_figures.py::test_a_mean_over_nothing_is_none",
        "test_training.py::test_a_nan_stops_all_ranks_with_one_message",
        "test_training.py::test_skip_goes_on_and_tells",
        "test_training.py::test_every_epoch_is_validated",
        "test_mission.py::test_what_is_not_known_says_so_and_why",
        "test_mission.py::test_wer_may_pass_one",
    ],
    "the compressor could not tell the trainer": [
        "../telemetry/test_record.py::test_the_record_of_a_sparse_step",
        "test_training.py::test_crossing_the_boundary",
        "test_mission.py::test_the_record_of_a_step_is_complete_from_the_first_one",
    ],
    "28 steps, 128 of them dense": [
        "test_plan.py::test_the_run_of_28_steps",
        "test_training.py::test_a_run_shorter_than_its_dense_steps_says_so_before_and_after",
        "test_training.py::test_the_first_sparse_step_is_announced_once",
        "test_cli.py::test_dry_run_warns_when_no_step_will_be_sparse",
    ],
    "metrics in the sparse path only": [
        "test_training.py::test_crossing_the_boundary",
        "test_mission.py::test_both_phases_are_accounted_alike",
    ],
    "learning rate 1.0": [
        "test_training.py::test_lr_1_is_named_as_what_it_is",
        "test_training.py::test_an_explosion_is_seen_after_a_resume_too",
        "test_recipes.py::test_every_recipe_is_a_config",
        "test_cli.py::test_their_command",
        "test_mission.py::test_divergence_ends_the_command_with_one_message",
    ],
    "CTC of raw logits": [
        "models/test_ctc.py::test_equals_an_independent_computation",
        "models/test_ctc.py::test_raw_logits_would_not_and_are_refused",
        "test_training.py::test_the_loss_is_ctc_of_log_probabilities",
        "test_training.py::test_dense_steps_are_those_of_plain_pytorch",
    ],
    "clipping of what was already sent": [
        "test_training.py::test_dense_steps_are_those_of_plain_pytorch",
        "test_training.py::test_a_local_clip_bounds_what_is_sent",
        "test_training.py::test_a_global_clip_bounds_the_step",
    ],
    "deprecated PyTorch calls": [
        "test_cli.py::test_a_run_from_the_command_line",
        "test_mission.py::test_no_worker_makes_a_deprecated_call",
    ],
    "manifests with the author's paths": [
        "data/test_manifest.py::test_a_folder_can_be_moved",
        "data/test_manifest.py::test_reading_names_the_first_file_that_will_not_do",
        "test_bad_input.py::test_bad_data_is_named_before_anything_starts",
    ],
    "mpirun -np 2, if everything else was right": [
        "test_spawn.py::",
        "test_training.py::test_another_number_of_workers_goes_on_and_ends",
    ],
    "hung for ever": [
        "../test_failures.py::test_one_rank_raising_ends_all_processes_within_the_groups_timeout",
        "test_training.py::test_ten_kills_change_nothing",
        "test_training.py::test_killed_while_a_checkpoint_is_written",
        "test_training.py::test_a_weight_that_differs_is_an_error_on_all_ranks",
        "test_bad_input.py::test_a_truncated_checkpoint_ends_all_workers",
    ],
    "residuals were never saved": [
        "test_training.py::test_resume_equals_never_having_stopped",
        "test_training.py::test_resume_after_several_stops",
        "test_checkpoint.py::test_at_another_number_of_workers_the_pending_update_is_the_same",
    ],
    "eight scripts that contradicted each other": [
        "../telemetry/test_figures.py::test_figures_by_hand",
        "test_mission.py::test_the_runs_own_record_says_where_bytes_and_seconds_went",
    ],
    "gradients in, gradients out": [
        "../ddp/test_density_one.py::test_every_step_gives_plain_ddps_gradients",
        "../gpu/test_cuda.py::",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({name for names in ROWS.values() for name in names}))
def test_the_table_names_tests_that_exist(name: str) -> None:
    file, _, test = name.partition("::")
    path = (Path(__file__).parent / file).resolve()
    assert path.is_file()
    if test:
        assert re.search(rf"^def {test}\(", path.read_text(encoding="utf-8"), re.M)


# What has no other place


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, speech: Path) -> Ended:
    """Six steps on two workers, three of them sparse."""
    settings: dict[str, Any] = {"dataset": "an4", "data_dir": str(speech), "batch_size": 2, "dense_steps": 3}
    return succeed(tmp_path_factory.mktemp("mission") / "run", 2, **settings, max_steps=6, threads=1, device="cpu")


def raw_steps(ended: Ended) -> list[dict[str, Any]]:
    """Return the records of the steps, times included."""
    lines = (ended.folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


@pytest.mark.processes
def test_both_phases_are_accounted_alike(ended: Ended) -> None:
    dense, sparse = raw_steps(ended)[0], raw_steps(ended)[-1]
    assert (dense["phase"], sparse["phase"]) == ("dense", "sparse")
    assert dense.keys() == sparse.keys()
    assert dense["nominal_bytes"] == 4 * dense["numel"]
    assert sparse["sparsity"] == 1 - sparse["nnz"] / sparse["numel"]
    assert sparse["compression_ratio"] == sparse["numel"] / sparse["nnz"]
    known = {name for name, value in dense.items() if value is None}
    assert known <= {"threshold", "global_threshold", "reason", "residual_norm"}  # which a dense step does not have


@pytest.mark.processes
def test_the_record_of_a_step_is_complete_from_the_first_one(ended: Ended) -> None:
    for number, step in enumerate(raw_steps(ended)):
        assert step["step"] == number
        assert [len(rank) for rank in step["ranks"]] == [14, 14]
        unknown = {name for rank in step["ranks"] for name, value in rank.items() if value is None}
        assert unknown <= {"residual_norm"}  # which is looked at now and then
        assert step["loss"] == pytest.approx(sum(rank["loss"] for rank in step["ranks"]) / 2)
        assert step["utterances"] == 4
        assert set(step["split"]) == {"data", "compute", "wait", "update"}


@pytest.mark.processes
def test_the_runs_own_record_says_where_bytes_and_seconds_went(ended: Ended) -> None:
    for step in raw_steps(ended):
        assert sum(step["sent_by_phase"].values()) == step["sent_bytes"] == step["ranks"][0]["sent_bytes"]
        assert step["sent_bytes"] + step["ranks"][1]["sent_bytes"] == sum(
            rank["received_bytes"] for rank in step["ranks"]
        )
        assert step["messages"] > 0
        assert all(seconds >= 0 for seconds in (*step["seconds"].values(), *step["split"].values()))
    assert {"select", "exchange", "reduce", "apply"} <= raw_steps(ended)[-1]["seconds"].keys()
    summary = ended.results[0]
    assert summary["sent_bytes"] == sum(step["sent_bytes"] for step in raw_steps(ended))
    assert 0 < summary["sent_of_dense"] < 1


def test_wer_may_pass_one() -> None:
    assert Counts(word_edits=3, words=2).wer == 1.5
    assert shown(1.5) == "1.5"


def test_what_is_not_known_says_so_and_why() -> None:
    plan = Plan.__new__(Plan)
    object.__setattr__(plan, "workers", 1)
    out = rich.console.Console(width=120)
    with out.capture() as captured:
        out.print(end_table(summarise([]), plan, {}))
    assert "nan" not in captured.get().lower().split()
    assert "n/a" in captured.get()
    assert "n/a (no step was sparse)" in captured.get()


# As users run it


@pytest.fixture
def command(speech: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return what runs `oktopk train` on two workers: status and output."""

    def run(*more: object, **environment: str) -> tuple[int, str]:
        settings = ("--set", "threads=1", "--set", "device=cpu", "--set", "timeout_s=30")
        words = ("--data-dir", speech, "--runs", tmp_path, "--name", "a", "--batch-size", 2, "--nproc", 2, *settings)
        done = run_python("-m", "oktopk", "train", *words, *more, **environment)
        return done.returncode, done.stdout

    return run


@pytest.mark.processes
@pytest.mark.slow
def test_no_worker_makes_a_deprecated_call(command: Callable[..., tuple[int, str]]) -> None:
    """With every warning of a thing that will go away an error, in all workers."""
    wrong = "error::DeprecationWarning,error::FutureWarning,error::PendingDeprecationWarning"
    status, output = command(
        "--max-epochs", 1, "--dense-steps", 2, "--set", "max_steps=4", PYTHONWARNINGS=wrong
    )  # fmt: skip
    assert status == 0, output
    assert "compression was active on 2 of 4 steps" in output
    assert "Warning:" not in output


@pytest.mark.processes
@pytest.mark.slow
def test_divergence_ends_the_command_with_one_message(command: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, output = command("--lr", "1.0", "--set", "clip=0", "--max-epochs", 4)
    assert status == 1, output
    assert "Traceback" not in output
    told = [line for line in output.splitlines() if "is not finite" in line or "exploded" in line]
    assert len(told) == 1, output
    for word in ("step ", "rank ", "lr 1", "gradient norm", "'"):
        assert word in told[0]
    assert "nan" not in output.lower().split()
    assert "nan" not in (tmp_path / "a" / "metrics.jsonl").read_text().lower()
