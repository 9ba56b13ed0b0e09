"""The laws of the trainer, on real runs: nothing is missing or NaN, all ranks agree, a stop changes nothing."""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from oktopk.errors import MismatchError, OktopkError, PeerError, StateError
from oktopk.report.report import make_report
from oktopk.telemetry.figures import summary_of
from oktopk.telemetry.run import load_run
from oktopk.telemetry.schema import SPLIT
from oktopk.train import checkpoint, loop
from oktopk.train.ctc import count_edits, ctc_loss, error_rates, greedy, references
from oktopk.train.data.loader import Batches
from oktopk.train.data.manifest import read_manifest
from oktopk.train.divergence import DivergedError
from oktopk.train.models import make_model
from oktopk.train.rundir import RunError
from tests.train.runs import last, succeed, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]
slow, long = (partial(pytest.param, marks=mark) for mark in (pytest.mark.slow, pytest.mark.long))
SAMPLED = {"residual_norm", "oldest_wait_steps"}  # measured in some of the sparse steps


def assert_no_nan(ended, skipped=0):
    """Assert that every loss is known but those of skipped steps, and that nobody reads NaN or Inf."""
    assert sum(step["loss"] is None for step in ended.steps) == skipped
    written = [(ended.folder / name).read_text() for name in ("metrics.jsonl", "summary.json")]
    for text in (*written, *ended.printed):
        assert not re.search(r"\b(nan|inf|infinity)\b", text.lower()), text


def test_crossing_the_boundary(mixed):
    steps = mixed.steps
    assert [step["step"] for step in steps] == list(range(16))
    assert [step["phase"] for step in steps] == ["dense"] * 3 + ["sparse"] * 13
    assert len({frozenset(step) for step in steps}) == 1, "both phases have the same figures"
    for step in steps[:3]:
        assert (step["sparsity"], step["compression_ratio"]) == (0.0, 1.0)
        assert step["nominal_bytes"] == 4 * step["numel"]
        assert step["sent_bytes"] >= 4 * step["numel"]  # 2 (P-1)/P n words at P = 2
        unknown = {name for name, value in step.items() if value is None}
        rest = {"predicted_seconds", "lost_mass"}  # of sparse steps alone, and of members that left
        assert unknown <= {"threshold", "global_threshold", "reason", *rest, *SAMPLED}
    for step in steps[3:]:
        assert step["sparsity"] == pytest.approx(0.97, abs=0.012)
        assert step["sparsity"] == 1 - step["nnz"] / step["numel"]
        assert step["compression_ratio"] == step["numel"] / step["nnz"]
        assert step["sent_bytes"] < 0.1 * steps[0]["sent_bytes"]
    for step in steps:  # the momentum falls, and the learning rate rises
        lr = 0.003 / 1.01 ** step["epoch"]
        expected = (lr, 0.9) if step["phase"] == "dense" else (5 * lr, 0.5)
        assert (step["lr"], step["momentum"]) == pytest.approx(expected)
    assert [epoch["lr"] for epoch in mixed.epochs] == [steps[7]["lr"], steps[15]["lr"]]
    assert_no_nan(mixed)


def test_every_rank_has_its_figures_from_the_first_step_and_the_bytes_add_up(mixed):
    for step in mixed.of("step"):
        first, second = step["ranks"]
        assert first.keys() == second.keys() == mixed.of("step")[-1]["ranks"][0].keys()
        assert {name for rank in step["ranks"] for name, value in rank.items() if value is None} <= SAMPLED
        assert step["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
        assert step["utterances"] == 4
        for name in ("seconds", "messages", "residual_norm", "sent_by_phase", "sent_bytes"):
            assert first[name] == step[name], name
        assert {name: first[name] for name in SPLIT} == step["split"]
        assert all(seconds >= 0 for seconds in (*step["seconds"].values(), *step["split"].values()))
        is_due = step["phase"] == "sparse" and step["step"] % loop.RESIDUAL_EVERY == 0
        assert (step["residual_norm"] is not None) == is_due
        assert all(sum(rank["sent_by_phase"].values()) == rank["sent_bytes"] for rank in step["ranks"])
        assert first["sent_bytes"] + second["sent_bytes"] == first["received_bytes"] + second["received_bytes"]
        assert step["messages"] > 0
    assert {"select", "exchange", "reduce", "apply"} <= step["seconds"].keys()


def test_the_summary_and_the_report_have_every_figure(mixed):
    summary = mixed.results[0]
    assert summary["sparse_steps"] == 13
    assert summary["sent_bytes"] == sum(step["sent_bytes"] for step in mixed.steps)
    assert 0 < summary["sent_of_dense"] < 1
    made = make_report([load_run(mixed.folder)]).runs[0]
    assert made.notes == []
    charts = (
        "loss errors norms sparsity ratio selected thresholds bytes messages split phases communication ranks owners"
    )
    assert {chart.name for section in made.charts.values() for chart in section} == set(charts.split())
    assert all(table.rows for table in made.tables)
    assert json.loads((mixed.folder / "summary.json").read_text()) == summary_of(made.run) == summary


def test_the_first_sparse_step_and_the_end_are_told_once_and_all_ranks_hold_the_same_weights(mixed):
    assert [event["step"] for event in mixed.events("first-sparse")] == [3]
    assert [printed.count("the first sparse step") for printed in mixed.printed] == [1, 0]
    assert "compression was active on 13 of 16 steps" in mixed.printed[0]
    assert (mixed.records[-1]["event"], mixed.records[-1]["step"]) == ("end", 16)
    digests = mixed.digests(0)
    assert len(set(digests)) == len(digests) == 7  # 3, 6, 9, 12, 15 are due; 8 and 16 end an epoch
    assert mixed.digests(1) == digests


def nudge_rank_1(rank):
    """Change one weight of rank 1, by as little as there is, before its first checkpoint."""
    check = loop.check_same_weights

    def nudged(model, step):
        weights = next(model.parameters()).data.view(-1)
        weights[5] = torch.nextafter(weights[5], torch.tensor(math.inf)) if rank == 1 else weights[5]
        return check(model, step)

    loop.check_same_weights = nudged


def test_a_weight_that_differs_is_an_error_on_all_ranks(tmp_path, tiny):
    ended = train(tmp_path / "run", 2, **tiny, checkpoint_every=3, prepare=nudge_rank_1)
    assert [type(result) for result in ended.results] == [MismatchError] * 2
    assert {str(each) for each in ended.results} == {"step 3: the weights of ranks [1] are not those of rank 0"}
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_another_seed_gives_other_weights_and_another_order(tmp_path, tiny, mixed):
    """That the same seed gives the same is part of every test of a resume."""
    other = succeed(tmp_path / "other", 2, **tiny, max_steps=3, seed=1)
    assert other.digests(0)[0] != mixed.digests(0)[0]  # after three steps, both
    one, another = ([step["ranks"][0]["characters"] for step in run.of("step")[:3]] for run in (mixed, other))
    assert one != another


def assert_same_run(one, other):
    """Assert that weights, optimizer, steps and epochs are equal; only the times may differ."""
    assert one.steps == other.steps
    assert one.epochs == other.epochs
    assert all(one.results[0][name] == other.results[0][name] for name in ("wer", "val_loss"))
    mine, theirs = ({name: run.shared[name] for name in ("net", "optimizers", "progress")} for run in (one, other))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_resume_equals_never_having_stopped(tmp_path, mixed):
    """From an earlier checkpoint, amid an epoch: later steps are made again. A run that is over is over."""
    folder = Path(shutil.copytree(mixed.folder, tmp_path / "run"))
    resumed = succeed(folder, 2, resume=folder / "checkpoints" / "step-00000015")
    assert_same_run(resumed, mixed)
    assert [event["step"] for event in resumed.events("resume")] == [15]
    assert len(resumed.events("first-sparse")) == 1
    assert not list(folder.glob("checkpoints/.*"))
    again = succeed(folder, 2, resume=last(folder))
    assert (again.results[0], again.steps, again.epochs) == (resumed.results[0], mixed.steps, mixed.epochs)


def draw_noise(rank):
    """Let the inputs depend on every generator on the host, as those of a net with dropout would."""
    forward_backward = loop.Trainer._forward_backward
    random.seed(rank)
    np.random.seed(rank)

    def noisy(self, work):
        for batch in work:
            batch.inputs.add_(random.gauss(0, 1) + np.random.normal() + torch.randn_like(batch.inputs))
        return forward_backward(self, work)

    loop.Trainer._forward_backward = noisy


def test_a_resumed_run_draws_the_numbers_that_it_would_have_drawn(tmp_path, tiny):
    """Stopped after an odd number of draws: of the pairs that a normal distribution comes in one half is left."""
    ended = succeed(tmp_path / "whole", **tiny, max_steps=5, checkpoint_every=3, prepare=draw_noise)
    folder = Path(shutil.copytree(ended.folder, tmp_path / "run"))
    resumed = succeed(folder, resume=folder / "checkpoints" / "step-00000003", prepare=draw_noise)
    assert_same_run(resumed, ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stops", "more"),
    [
        long(1, (2, 3, 17, 31), {}),
        (2, (2, 3, 8, 13), {}),  # dense, at the boundary, between epochs, sparse
        long(2, (3,), {"nsteps_update": 2}),
        long(2, (3, 5), {"sparse_momentum": 0.0}),
        (2, (5,), {"augment": True, "clip_place": "local"}),
        long(2, (5,), {"compressor": "topka"}),
        long(2, (5,), {"compressor": "dense"}),
    ],
)
def test_resume_after_several_stops(tmp_path, tiny, size, stops, more):
    folder, settings = tmp_path / "run", {**tiny, "max_epochs": 2, **more}
    succeed(folder, size, **settings, max_steps=stops[0])
    for stop in (*stops[1:], 0):
        resumed = succeed(folder, size, resume=last(folder), max_steps=stop)
    assert_same_run(resumed, succeed(tmp_path / "undisturbed", size, **settings))


# The last makes more steps before the stop than two workers need for all of it.
@pytest.mark.slow
@pytest.mark.parametrize(("size", "stop", "then"), [long(2, 5, 1), (2, 13, 3), long(1, 20, 2)])
def test_another_number_of_workers_goes_on_and_ends(tmp_path, tiny, size, stop, then):
    folder = tmp_path / "run"
    before = succeed(folder, size, **{**tiny, "max_epochs": 2, "max_steps": stop}).steps
    ended = succeed(folder, then, resume=last(folder), max_steps=0)
    per_epoch, old_per_epoch = 16 // then, 16 // size
    gone = stop % old_per_epoch * per_epoch // old_per_epoch
    left = 2 * per_epoch - stop // old_per_epoch * per_epoch - gone
    assert [step["step"] for step in ended.steps] == list(range(stop + left))
    assert ended.steps[:stop] == before
    assert [epoch["epoch"] for epoch in ended.epochs] == [0, 1]
    assert all(step["phase"] == "sparse" for step in ended.steps[3:])
    assert_no_nan(ended)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [long("topka"), "dense"])
def test_another_compressor_goes_on_with_the_pending_update(tmp_path, tiny, compressor):
    folder, phase = tmp_path / "run", "dense" if compressor == "dense" else "sparse"
    before = succeed(folder, 2, **{**tiny, "max_steps": 5}).steps
    ended = succeed(folder, 2, resume=last(folder), compressor=compressor, max_steps=0)
    assert ended.steps[:5] == before
    assert [step["phase"] for step in ended.steps[5:]] == [phase] * 3
    if compressor == "dense":  # the first dense step brings what the sparse ones had held back
        own = [torch.load(last(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
        assert not any(held.any() for each in own for held in each["oktopk"]["residual"].values())
    assert_no_nan(ended)


def die_while_writing(rank):
    """Kill rank 0 amid the checkpoint of step 6."""
    write = checkpoint._write

    def half(files):
        write(files)
        path = next(iter(files))
        if "step-00000006" in str(path) and rank == 0:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._write = half


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(tmp_path, tiny, mixed):
    """The worker that is left ends by itself, soon; the resumed run ends where the undisturbed run does."""
    folder = tmp_path / "run"
    killed = train(folder, 2, **{**tiny, "max_epochs": 2, "checkpoint_every": 2}, prepare=die_while_writing)
    assert killed.results[0] is None
    assert isinstance(killed.results[1], PeerError)
    assert last(folder).name == "step-00000004"
    assert_same_run(succeed(folder, 2, resume=last(folder)), mixed)
    assert not list(folder.glob("checkpoints/.step-*"))


def small_files_on_rank_1(rank):
    """Let rank 1 write no file as large as a checkpoint: its writer cannot tell this from a full disk."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_a_checkpoint_that_one_rank_cannot_write_is_there_on_none(tmp_path, tiny):
    ended = train(tmp_path / "run", 2, **tiny, max_steps=1, prepare=small_files_on_rank_1)
    assert [type(result) for result in ended.results] == [PeerError, RunError]
    assert re.search(r"writing a checkpoint failed on rank 1.*rank1\.pt", str(ended.results[0]))
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_truncated_checkpoint_ends_all_workers(tmp_path, mixed):
    folder = Path(shutil.copytree(mixed.folder, tmp_path / "run"))
    part = last(folder) / "rank1.pt"
    os.truncate(part, 1000)
    ended = train(folder, 2, resume=part.parent)
    assert [type(result) for result in ended.results] == [PeerError, StateError]
    assert all(str(part) in str(result) for result in ended.results)
    assert f"--resume {folder / 'checkpoints' / 'step-00000015'}" in str(ended.results[1])


def test_bad_data_ends_workers_that_a_launcher_started(tmp_path, tiny, speech):
    """As under mpirun, where no process has checked the data before."""
    corpus = Path(shutil.copytree(speech, tmp_path / "corpus"))
    wav = next(corpus.glob("*/**/*.wav"))
    wav.write_bytes(b"")
    for more, said in (({"data_dir": str(corpus)}, str(wav)), ({"nsteps_update": 9}, "36 in all")):
        ended = train(tmp_path / "run", 2, **{**tiny, **more})
        assert all(isinstance(result, OktopkError) and said in str(result) for result in ended.results)
        assert not (tmp_path / "run").exists()


def untrained():
    """Return the net with which a run of seed 0 begins."""
    torch.manual_seed(0)
    return make_model("lstman4-small")


def hand_written(speech, settings, size):
    """Return the weights after `max_steps` steps of plain PyTorch on the same batches, and the losses."""
    passes, of_all = settings.get("nsteps_update", 1), {"batch_size": settings["batch_size"], "world_size": size}
    utterances = read_manifest(speech / "an4_train_manifest.csv")
    shares = [list(Batches(utterances, rank=rank, **of_all).epoch(0)) for rank in range(size)]
    net, losses = untrained(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=settings["lr"], momentum=0.9, nesterov=True)
    for step in range(settings["max_steps"]):
        if step == settings["dense_steps"]:
            optimizer.param_groups[0].update(lr=5 * settings["lr"], momentum=0.5)
            for state in optimizer.state.values():
                state["momentum_buffer"] *= 0.2  # (1 - 0.9) / (1 - 0.5)
        optimizer.zero_grad()
        work = [batch for share in shares for batch in share[step * passes : (step + 1) * passes]]
        loss = sum(loss_of(net, batch)[0] for batch in work) / len(work)
        loss.backward()
        losses.append(loss.item())
        clip_grad_norm_(net.parameters(), settings["clip"])
        optimizer.step()
    return dict(net.named_parameters()), losses


def loss_of(net, batch):
    """Return the loss of a batch, and the texts that the net writes."""
    log_probs, frames = net(batch.inputs, batch.frames)
    return ctc_loss(log_probs, frames, batch.targets, batch.target_lengths), greedy(log_probs, frames)


@pytest.mark.parametrize(
    ("size", "more"),
    [
        slow(2, {"nsteps_update": 2, "clip": 20.0}),
        long(1, {"nsteps_update": 3, "clip": 1e9}),
        (2, {"clip": 1.0, "clip_place": "local"}),  # dense steps are clipped after the exchange all the same
        long(3, {"clip": 1.0}),
        # at density 1, across the switch: the momentum buffers are scaled to the momentum of sparse steps
        slow(2, {"dense_steps": 2, "max_steps": 5, "density": 1.0}),
    ],
)
def test_steps_are_those_of_plain_pytorch(tmp_path, tiny, speech, size, more):
    """One pass after another, averaged; clipped after that; the mean over workers."""
    settings = {**tiny, "max_steps": 3, **more}
    weights, losses = hand_written(speech, settings, size)
    ended = succeed(tmp_path / "run", size, **settings)
    dense, sparse = settings["dense_steps"], settings["max_steps"] - settings["dense_steps"]
    assert [step["phase"] for step in ended.steps] == ["dense"] * dense + ["sparse"] * sparse
    assert [step["loss"] for step in ended.steps] == pytest.approx(losses, rel=1e-3 if sparse else 1e-4)
    for name, expected in weights.items():
        atol = 1e-4 if sparse else 1e-5
        torch.testing.assert_close(ended.shared["net"][name], expected.data, rtol=1e-3, atol=atol)
    assert_no_nan(ended)
    if not sparse:  # which is said before and after, and is an event
        said = "WARNING no step will be sparse: the run has 3 steps.*was active on 0 of 3 steps"
        printed = " ".join(ended.printed[0].split())
        assert re.search(said, printed)
        assert ended.events("warning")[0]["step"] == 0


@pytest.mark.slow
def test_a_local_clip_bounds_what_is_sent(tmp_path, tiny):
    """In the first sparse step, with nothing held back yet: a part of the mean of clipped gradients."""
    settings = {**tiny, "dense_steps": 0, "max_steps": 1, "clip_place": "local"}
    clipped, free = (succeed(tmp_path / f"{clip}", 2, **{**settings, "clip": clip}).steps[0] for clip in (2.0, 0.0))
    assert 0 < clipped["grad_norm"] <= 2.0 / math.sqrt(2) * 1.001
    assert free["grad_norm"] > 2.0


def test_a_global_clip_bounds_the_step(tmp_path, tiny):
    settings = {**tiny, "dense_steps": 0, "max_steps": 1, "clip": 2.0, "momentum": 0.0, "lr": 0.5}
    ended, start = succeed(tmp_path / "run", 1, **settings), untrained()
    moved = [(ended.shared["net"][name] - parameter.data).norm() for name, parameter in start.named_parameters()]
    assert ended.steps[0]["grad_norm"] > 2.0  # the norm before
    assert float(torch.stack(moved).norm()) == pytest.approx(0.5 * 2.0, rel=1e-3)


def poison(rank, steps, on):
    """Put a NaN into the features of these training batches of one rank."""
    batch_of, calls = Batches.batch, count()

    def poisoned(self, epoch, indices):
        batch = batch_of(self, epoch, indices)
        if not self.evaluation and rank == on and next(calls) in steps:
            batch.inputs[0, 0, 3, 4] = math.nan
        return batch

    Batches.batch = poisoned


@pytest.mark.parametrize("step", [slow(1), 3])  # dense, sparse
def test_a_nan_stops_all_ranks_with_one_message(tmp_path, tiny, step):
    ended = train(tmp_path / "run", 2, **tiny, prepare=partial(poison, steps=(step,), on=1))
    assert [type(result) for result in ended.results] == [DivergedError] * 2
    message = str(ended.results[0])
    lr = tiny["lr"] * (1 if step < tiny["dense_steps"] else 5)
    words = (f"step {step}:", "rank 1", f"lr {lr:g}", "gradient norm", "the gradient of '")
    assert [word for word in words if word not in message] == []
    assert [event["message"] for event in ended.events("non-finite")] == [message]
    assert message not in str(ended.results[1])
    assert "nan" not in message.lower().split()
    assert len(ended.steps) == step  # the step that was none is an event
    failed = ended.records[-1]
    assert (failed["kind"], failed["event"], failed["step"]) == ("event", "failed", step)
    assert message in failed["message"]


@pytest.mark.parametrize("size", [1, slow(2)])
def test_skip_goes_on_and_tells(tmp_path, tiny, size):
    how = {"max_steps": 6, "on_nonfinite": "skip", "prepare": partial(poison, steps=(1, 4), on=0)}
    ended = succeed(tmp_path / "run", size, **tiny, **how)
    assert [step["step"] for step in ended.steps if step["skipped"]] == [1, 4]
    assert [step["step"] for step in ended.steps if step["loss"] is None] == [1, 4]
    assert [event["step"] for event in ended.events("non-finite")] == [1, 4]
    assert "6 steps, 2 skipped" in ended.printed[0]
    assert ended.printed[0].count("WARNING step") == 2
    assert all(torch.isfinite(tensor.float()).all() for tensor in ended.shared["net"].values())
    assert ended.epochs[0]["val_loss"] is not None  # no running mean has kept the NaN
    assert_no_nan(ended, skipped=2)


def test_a_skipped_first_step_leaves_no_trace(tmp_path, tiny):
    """The weights and the running statistics are those of the beginning."""
    how = {"max_steps": 1, "on_nonfinite": "skip", "prepare": partial(poison, steps=(0,), on=0)}
    ended = succeed(tmp_path / "run", 1, **tiny, **how)
    torch.testing.assert_close(ended.shared["net"], untrained().state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_an_explosion_is_seen_after_a_resume_too(tmp_path, tiny):
    """The losses of the first steps are part of a checkpoint."""
    folder, wild = tmp_path / "run", {**tiny, "lr": 1.0, "max_epochs": 8, "checkpoint_every": 1}
    (whole,) = train(tmp_path / "whole", 1, **wild).results
    assert isinstance(whole, DivergedError), whole
    found = re.match(r"step (\d+), rank 0: the loss exploded.*lr .*gradient norm .*lower --lr", str(whole))
    assert found, whole
    succeed(folder, 1, **wild, max_steps=int(found[1]) - 1)
    resumed = train(folder, 1, resume=last(folder), max_steps=0)
    assert str(resumed.results[0]) == str(whole)


@pytest.mark.slow
def test_validation_every_n_epochs_and_after_the_last(tmp_path, tiny):
    ended = succeed(tmp_path / "run", 2, **{**tiny, "max_epochs": 5, "validate_every": 3, "batch_size": 8})
    assert [epoch["validated"] for epoch in ended.epochs] == [False, False, True, False, True]
    assert [epoch["wer"] is not None for epoch in ended.epochs] == [False, False, True, False, True]
    assert ended.printed[0].count("not validated") == 3


@pytest.mark.parametrize("size", [long(1), 2, slow(3)])
def test_validation_is_that_of_the_saved_net_on_any_number_of_workers(tmp_path, tiny, speech, mixed, size):
    ended = mixed if size == 2 else succeed(tmp_path / "run", size, **tiny, max_steps=4)
    net = make_model("lstman4-small").eval()
    net.load_state_dict(ended.shared["net"])
    utterances = read_manifest(speech / "an4_val_manifest.csv")
    batches = list(Batches(utterances, batch_size=1, evaluation=True).epoch(0))
    with torch.no_grad():
        losses, texts = zip(*(loss_of(net, batch) for batch in batches), strict=True)
    said = [references(batch.targets, batch.target_lengths)[0] for batch in batches]
    epoch = ended.epochs[-1]
    assert epoch["val_loss"] == pytest.approx(float(sum(losses)) / len(utterances), rel=1e-6)
    assert error_rates(count_edits(said, [text for (text,) in texts])) == {"wer": epoch["wer"], "cer": epoch["cer"]}
