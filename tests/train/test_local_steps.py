"""Local steps in the trainer: nothing is sent between two exchanges, all workers agree, and a stop changes nothing."""

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from oktopk.report.report import make_report
from oktopk.report.tables import tables_of
from oktopk.telemetry.figures import summary_of
from oktopk.telemetry.run import load_run
from oktopk.train.config import Config
from oktopk.train.data.loader import Batches
from oktopk.train.data.manifest import read_manifest
from oktopk.train.divergence import DivergedError
from oktopk.train.models import make_model
from tests.train.runs import last, succeed, train
from tests.train.test_loop import assert_no_nan, loss_of, poison

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]
slow = partial(pytest.param, marks=pytest.mark.slow)
H = 3
ALONE = {"local_steps": H, "dense_steps": 0, "max_epochs": 2, "checkpoint_every": 4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny):
    """Two epochs of eight steps on two workers, with five exchanges. Copy its folder to change it."""
    return succeed(tmp_path_factory.mktemp("alone") / "run", 2, **{**tiny, **ALONE})


def own_states(run):
    """Return the state of each worker, without the generators and texts."""
    states = [torch.load(last(run.folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for state in states:
        del state["generators"], state["oktopk"]["algorithm"]
    return states


def test_a_run_exchanges_every_h_steps_and_nothing_in_between(alone):
    phases = (["local"] * (H - 1) + ["sparse"]) * 5 + ["local"]
    assert [step["phase"] for step in alone.steps] == phases
    assert [step["step"] for step in alone.steps] == list(range(16))
    for step in alone.of("step"):
        assert (step["sent_bytes"] > 0) == (step["phase"] == "sparse")
        assert step["momentum"] == 0.9
        assert step["loss"] == pytest.approx(sum(rank["loss"] for rank in step["ranks"]) / 2)
        assert (step["residual_norm"] is None) == (step["phase"] == "local")
    assert [event["step"] for event in alone.events("first-sparse")] == [H - 1]
    assert len(alone.digests(0)) == 4
    assert alone.digests(0) == alone.digests(1)
    mine, theirs = own_states(alone)
    assert any(
        bool((mine["oktopk"]["weights"][name] != each).any()) for name, each in theirs["oktopk"]["weights"].items()
    )
    assert_no_nan(alone)


def test_the_summary_and_the_report_tell_local_steps_from_exchanges(alone):
    run = load_run(alone.folder)
    summary = summary_of(run)
    assert (summary["steps"], summary["sparse_steps"], summary["dense_steps"]) == (16, 5, 0)
    assert summary["sent_of_dense"] < 0.05
    (phases,) = (table for table in tables_of(run) if table.name == "phases")
    assert {row[0]: row[1] for row in phases.rows} == {"dense": 0, "sparse": 5, "local": 11}
    made = make_report([run]).runs[0]
    assert made.notes == []
    assert [card.note for card in made.cards if card.name == "steps"] == ["0 dense, 5 sparse, 11 local"]
    printed = " ".join(alone.printed[0].split())
    assert "5 exchanges, one after each 3 steps" in printed
    assert "5 exchanges in 16 steps" in printed


def test_validation_is_that_of_the_agreed_point_in_the_checkpoint(alone, speech):
    net = make_model("lstman4-small").eval()
    net.load_state_dict(alone.shared["net"])
    utterances = read_manifest(speech / "an4_val_manifest.csv")
    with torch.no_grad():
        losses = [loss_of(net, batch)[0] for batch in Batches(utterances, batch_size=1, evaluation=True).epoch(0)]
    assert alone.epochs[-1]["val_loss"] == pytest.approx(float(sum(losses)) / len(utterances), rel=1e-6)
    for state in own_states(alone):
        assert all(torch.equal(alone.shared["net"][name], each) for name, each in state["oktopk"]["agreed"].items())


@pytest.mark.parametrize("step", [4, slow(8), slow(12), slow(15)])  # amid a round, between epochs, at an exchange
def test_resume_equals_never_having_stopped(tmp_path, tiny, alone, step):
    folder = tmp_path / "run"
    stopped = succeed(folder, 2, **{**tiny, **ALONE, "max_steps": step})
    assert stopped.steps == alone.steps[:step]
    resumed = succeed(folder, 2, resume=last(folder), max_steps=0)
    assert resumed.steps == alone.steps
    mine, theirs = ([own_states(run), run.shared["net"]] for run in (resumed, alone))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("then", [1, 3])
def test_another_number_of_workers_goes_on_from_the_agreed_point(tmp_path, alone, then):
    folder = Path(shutil.copytree(alone.folder, tmp_path / "run"))
    ended = succeed(folder, then, resume=last(folder), max_epochs=3)
    assert ended.steps[:16] == alone.steps
    assert {"local", "sparse"} == {step["phase"] for step in ended.steps[16:]}
    assert_no_nan(ended)


def test_a_worker_leaves_out_its_own_step_with_a_nan(tmp_path, tiny):
    how = {**ALONE, "max_steps": 7, "on_nonfinite": "skip", "prepare": partial(poison, steps=(1, 5), on=1)}
    ended = succeed(tmp_path / "run", 2, **{**tiny, **how})
    assert [step["step"] for step in ended.steps if step["loss"] is None] == [1, 5]
    assert [event["step"] for event in ended.events("non-finite")] == [1, 5]
    assert "the loss is not finite on rank 1" in ended.events("non-finite")[0]["message"]
    assert not any(step["skipped"] for step in ended.steps)  # the exchange delivered
    assert_no_nan(ended, skipped=2)


@pytest.mark.slow
def test_a_nan_ends_all_workers_at_the_next_exchange(tmp_path, tiny):
    ended = train(tmp_path / "run", 2, **{**tiny, **ALONE}, prepare=partial(poison, steps=(3,), on=1))
    assert [type(result) for result in ended.results] == [DivergedError] * 2
    assert "step 3:" in str(ended.results[0])


@pytest.mark.slow
def test_a_dense_exchange_with_an_outer_optimizer_trains(tmp_path, tiny):
    """DiLoCo: the exchange of movements is a plain all_reduce."""
    ended = succeed(tmp_path / "run", 2, **{**tiny, **ALONE, "compressor": "dense", "outer": "nesterov"})
    assert [step["phase"] for step in ended.steps] == (["local"] * (H - 1) + ["dense"]) * 5 + ["local"]
    assert math.isfinite(ended.epochs[-1]["val_loss"])
    assert ended.digests(0) == ended.digests(1)


def test_settings_of_an_exchange_in_every_step_are_refused():
    for settings, word in (
        ({"dense_steps": 5}, "dense_steps"),
        ({"dense_steps": 0, "clip_place": "local"}, "clip_place"),
    ):
        with pytest.raises(ValueError, match=f"leave {word} out"):
            Config(local_steps=30, **settings)
