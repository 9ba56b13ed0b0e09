"""The laws of the trainer, on real runs: nothing is missing or NaN, all ranks agree, a stop changes nothing."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from oktopk.algorithms import ALGORITHMS
from oktopk.errors import MismatchError, PeerError
from oktopk.report.report import make_report
from oktopk.telemetry.figures import summary_of
from oktopk.telemetry.run import load_run
from oktopk.telemetry.schema import SPLIT
from oktopk.train import checkpoint, loop
from oktopk.train.config import Config
from oktopk.train.data.loader import Batch, Batches
from oktopk.train.data.manifest import read_manifest
from oktopk.train.divergence import DivergedError
from oktopk.train.metrics import Counts, Transcripts, greedy, references
from oktopk.train.models import make_model
from oktopk.train.models.ctc import ctc_loss
from tests.ddp.harness import through_a_file
from tests.train.runs import Ended, Settings, last, same_weights, succeed, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]
long = pytest.mark.long
SAMPLED = {"residual_norm", "oldest_wait_steps"}
"""Figures that are measured in some of the sparse steps."""


def assert_all_finite(ended: Ended) -> None:
    """Assert that every figure is known, in the files and in the output."""
    for step in ended.steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] is None or math.isfinite(step["grad_norm"])
    assert_no_nan(ended)


def assert_no_nan(ended: Ended) -> None:
    for path in (ended.folder / "metrics.jsonl", ended.folder / "summary.json"):
        assert "nan" not in path.read_text().lower(), path
    for text in ended.printed:
        assert "nan" not in text.lower().split(), text
        assert " inf" not in text.lower(), text


# The two phases: `mixed` makes two epochs of eight steps on two workers, three dense and thirteen sparse


def test_crossing_the_boundary(mixed: Ended) -> None:
    steps = mixed.steps
    assert [step["step"] for step in steps] == list(range(16))
    assert [step["phase"] for step in steps] == ["dense"] * 3 + ["sparse"] * 13
    assert len({frozenset(step) for step in steps}) == 1, "both phases have the same figures"
    for step in steps[:3]:
        assert (step["sparsity"], step["compression_ratio"]) == (0.0, 1.0)
        assert step["nominal_bytes"] == 4 * step["numel"]
        assert step["sent_bytes"] >= 4 * step["numel"]  # 2 (P-1)/P n words at P = 2
        unknown = {name for name, value in step.items() if value is None}
        assert unknown <= {"threshold", "global_threshold", "reason", *SAMPLED}  # of sparse steps alone
    for step in steps[3:]:
        assert step["sparsity"] == pytest.approx(0.97, abs=0.012)
        assert step["sparsity"] == 1 - step["nnz"] / step["numel"]
        assert step["compression_ratio"] == step["numel"] / step["nnz"]
        assert step["sent_bytes"] < 0.1 * steps[0]["sent_bytes"]
    assert_all_finite(mixed)


def test_every_rank_has_its_figures_from_the_first_step(mixed: Ended) -> None:
    for step in mixed.raw_steps:
        first, second = step["ranks"]
        assert first.keys() == second.keys() == mixed.raw_steps[-1]["ranks"][0].keys()
        unknown = {name for rank in step["ranks"] for name, value in rank.items() if value is None}
        assert unknown <= SAMPLED
        assert step["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
        assert step["utterances"] == 4
        assert first["seconds"] == step["seconds"]
        assert (first["messages"], first["residual_norm"]) == (step["messages"], step["residual_norm"])
        assert {name: first[name] for name in SPLIT} == step["split"]
        assert all(seconds >= 0 for seconds in (*step["seconds"].values(), *step["split"].values()))
        is_due = step["phase"] == "sparse" and step["step"] % loop.RESIDUAL_EVERY == 0
        assert (step["residual_norm"] is not None) == is_due
    assert {"select", "exchange", "reduce", "apply"} <= step["seconds"].keys()


def test_the_record_says_where_the_bytes_went(mixed: Ended) -> None:
    for step in mixed.raw_steps:
        first, second = step["ranks"]
        assert first["sent_by_phase"] == step["sent_by_phase"]
        assert sum(step["sent_by_phase"].values()) == step["sent_bytes"] == first["sent_bytes"]
        assert sum(second["sent_by_phase"].values()) == second["sent_bytes"]
        assert first["sent_bytes"] + second["sent_bytes"] == first["received_bytes"] + second["received_bytes"]
        assert step["messages"] > 0
    summary = mixed.results[0]
    assert summary["sent_bytes"] == sum(step["sent_bytes"] for step in mixed.steps)
    assert 0 < summary["sent_of_dense"] < 1


def test_the_report_of_a_run_has_every_chart_and_table(mixed: Ended) -> None:
    made = make_report([load_run(mixed.folder)]).runs[0]
    assert made.notes == []
    charts = {chart.name for section in made.charts.values() for chart in section}
    assert charts == {
        "loss", "errors", "norms", "sparsity", "ratio", "selected", "thresholds", "bytes", "messages", "split",
        "phases", "communication", "ranks", "owners",
    }  # fmt: skip
    assert all(table.rows for table in made.tables)
    assert summary_of(made.run) == mixed.results[0]


def test_a_run_tells_its_first_sparse_step_once_and_its_end(mixed: Ended) -> None:
    assert [event["step"] for event in mixed.events("first-sparse")] == [3]
    assert mixed.printed[0].count("the first sparse step") == 1
    assert "the first sparse step" not in mixed.printed[1]
    assert "compression was active on 13 of 16 steps" in mixed.printed[0]
    assert mixed.results[0]["sparse_steps"] == 13
    assert json.loads((mixed.folder / "summary.json").read_text()) == mixed.results[0]
    assert (mixed.records[-1]["event"], mixed.records[-1]["step"]) == ("end", 16)


def test_all_ranks_hold_the_same_weights(mixed: Ended) -> None:
    digests = mixed.digests(0)
    assert len(digests) == 7  # 3, 6, 9, 12, 15 are due; 8 and 16 end an epoch
    assert len(set(digests)) == len(digests)
    assert mixed.digests(1) == digests


@pytest.mark.slow
def test_a_run_shorter_than_its_dense_steps_says_so_before_and_after(tmp_path: Path, tiny: Settings) -> None:
    ended = succeed(tmp_path / "run", 1, **{**tiny, "dense_steps": 128, "max_epochs": 2, "max_steps": 28})
    printed = ended.printed[0]
    warned, began = printed.index("WARNING no step will be sparse: the run has 28 steps"), printed.index("epoch 1 step")
    assert warned < began
    assert "compression was active on 0 of 28 steps" in printed
    assert "n/a (no step was sparse)" in printed
    assert ended.events("warning")[0]["step"] == 0
    assert [step["phase"] for step in ended.steps] == ["dense"] * 28
    assert_all_finite(ended)


def nudge_rank_1(rank: int) -> None:
    """Change one weight of rank 1, by as little as there is, after its third step."""
    checkpoint_if_due = loop.Trainer._checkpoint_if_due

    def nudged(self: loop.Trainer) -> None:
        if rank == 1 and self.progress.step == 3:
            weights = next(self.net.parameters()).data.view(-1)
            weights[5] = torch.nextafter(weights[5], torch.tensor(math.inf))
        checkpoint_if_due(self)

    loop.Trainer._checkpoint_if_due = nudged  # type: ignore[method-assign]


def test_a_weight_that_differs_is_an_error_on_all_ranks(tmp_path: Path, tiny: Settings) -> None:
    ended = train(tmp_path / "run", 2, **tiny, checkpoint_every=3, prepare=nudge_rank_1)
    for result in ended.results:
        assert isinstance(result, MismatchError), result
        assert str(result) == "step 3: the weights of ranks [1] are not those of rank 0"
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_another_seed_gives_other_weights_and_another_order(tmp_path: Path, tiny: Settings, mixed: Ended) -> None:
    """That the same seed gives the same is part of every test of a resume."""
    other = succeed(tmp_path / "other", 2, **tiny, max_steps=3, seed=1)
    assert other.digests(0)[0] != mixed.digests(0)[0]  # after three steps, both
    assert characters(other) != characters(mixed)[:3]


def characters(ended: Ended) -> list[list[float]]:
    """Return the length of each worker's text in each step."""
    return [[rank["characters"] for rank in step["ranks"]] for step in ended.raw_steps]


# The switch of momentum


def test_the_momentum_falls_and_the_learning_rate_rises_at_the_switch(mixed: Ended) -> None:
    for step in mixed.steps:
        lr = 0.003 / 1.01 ** step["epoch"]
        expected = (lr, 0.9) if step["phase"] == "dense" else (5 * lr, 0.5)
        assert (step["lr"], step["momentum"]) == pytest.approx(expected)
    assert [epoch["lr"] for epoch in mixed.epochs] == [mixed.steps[7]["lr"], mixed.steps[15]["lr"]]


class Momentum:
    """A weight under a gradient that is always the same, and its optimizer."""

    def __init__(self, **settings: float) -> None:
        self.config = Config(**settings)  # type: ignore[arg-type]
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, momentum=0.9, nesterov=True)

    def updates(self, *phases: str) -> list[torch.Tensor]:
        """Return the update of each step."""
        return [self._update(phase) for phase in phases]

    def _update(self, phase: str) -> torch.Tensor:
        before = self.weight.detach().clone()
        self.weight.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        loop.set_rates(self.optimizer, self.config.rates_at(0, phase))
        self.optimizer.step()
        return before - self.weight.detach()


def test_a_steady_gradient_has_steps_of_one_size_through_the_switch_and_back() -> None:
    """The buffers of momentum 0.9 made the first sparse steps 2.0, 1.5 and 1.25 times too large."""
    run = Momentum()
    steady = run.updates(*["dense"] * 400)[-1]
    for update in run.updates("sparse", "sparse", "sparse", "dense", "dense"):
        torch.testing.assert_close(update, steady)


def test_a_stop_at_any_step_around_the_switch_scales_the_buffers_once() -> None:
    phases = ["dense"] * 3 + ["sparse"] * 3
    updates = Momentum().updates(*phases)
    for stop in range(len(phases)):
        run = Momentum()
        before, saved = run.updates(*phases[:stop]), through_a_file(run.optimizer.state_dict())
        run.optimizer = torch.optim.SGD([run.weight], lr=1.0, momentum=0.9, nesterov=True)
        run.optimizer.load_state_dict(saved)
        resumed = before + run.updates(*phases[stop:])
        assert all(map(torch.equal, resumed, updates)), f"stopped before step {stop}"


def test_buffers_that_sgd_left_alone_at_momentum_0_are_forgotten() -> None:
    first, *_, again = Momentum(sparse_momentum=0.0).updates("dense", "dense", "sparse", "sparse", "dense")
    torch.testing.assert_close(again, first)


# Stopping and going on


def assert_same_run(one: Ended, other: Ended) -> None:
    """Assert that weights, optimizer, steps and epochs are equal; only the times may differ."""
    assert one.steps == other.steps
    assert one.epochs == other.epochs
    assert one.results[0]["wer"] == other.results[0]["wer"]
    assert one.results[0]["val_loss"] == other.results[0]["val_loss"]
    assert same_weights(one, other)
    assert one.shared["progress"] == other.shared["progress"]


def test_resume_equals_never_having_stopped(tmp_path: Path, mixed: Ended) -> None:
    """From an earlier checkpoint, amid an epoch: later steps are made again, and their checkpoints are gone."""
    folder = tmp_path / "run"
    shutil.copytree(mixed.folder, folder)
    earlier = sorted(folder.glob("checkpoints/step-*"))[-2]
    assert earlier.name == "step-00000015"
    resumed = succeed(folder, 2, resume=earlier)
    assert_same_run(resumed, mixed)
    assert [event["step"] for event in resumed.events("resume")] == [15]
    assert len(resumed.events("first-sparse")) == 1
    assert not list(folder.glob("checkpoints/.*"))


def test_a_run_that_is_over_is_over(tmp_path: Path, mixed: Ended) -> None:
    folder = tmp_path / "run"
    shutil.copytree(mixed.folder, folder)
    again = succeed(folder, 2, resume=last(folder))
    assert again.results[0] == mixed.results[0]
    assert (again.steps, again.epochs) == (mixed.steps, mixed.epochs)


def draw_noise(rank: int) -> None:
    """Let the inputs depend on every generator on the host, as those of a net with dropout would."""
    forward_backward = loop.Trainer._forward_backward
    random.seed(rank)
    np.random.seed(rank)

    def noisy(self: loop.Trainer, work: list[Batch]) -> float:
        for batch in work:
            batch.inputs.add_(random.gauss(0, 1) + np.random.normal() + torch.randn_like(batch.inputs))
        return forward_backward(self, work)

    loop.Trainer._forward_backward = noisy  # type: ignore[method-assign]


def test_a_resumed_run_draws_the_numbers_that_it_would_have_drawn(tmp_path: Path, tiny: Settings) -> None:
    """Stopped after an odd number of draws: of the pairs that a normal distribution comes in one half is left."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    ended = succeed(whole, **tiny, max_steps=5, checkpoint_every=3, prepare=draw_noise)
    shutil.copytree(whole, folder)
    resumed = succeed(folder, resume=folder / "checkpoints" / "step-00000003", prepare=draw_noise)
    assert_same_run(resumed, ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stops", "more"),
    [
        pytest.param(1, (2, 3, 17, 31), {}, marks=long),
        (2, (2, 3, 8, 13), {}),  # dense, at the boundary, between epochs, sparse
        pytest.param(2, (3,), {"nsteps_update": 2}, marks=long),
        pytest.param(2, (3, 5), {"sparse_momentum": 0.0}, marks=long),
        (2, (5,), {"augment": True, "clip_place": "local"}),
        pytest.param(2, (5,), {"compressor": "topka"}, marks=long),
        pytest.param(2, (5,), {"compressor": "dense"}, marks=long),
    ],
)
def test_resume_after_several_stops(
    tmp_path: Path, tiny: Settings, size: int, stops: tuple[int, ...], more: Settings
) -> None:
    folder, settings = tmp_path / "run", {**tiny, "max_epochs": 2, **more}
    succeed(folder, size, **settings, max_steps=stops[0])
    for stop in (*stops[1:], 0):
        resumed = succeed(folder, size, resume=last(folder), max_steps=stop)
    assert_same_run(resumed, succeed(tmp_path / "undisturbed", size, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stop", "then"),
    [
        pytest.param(2, 5, 1, marks=long),
        (2, 13, 3),
        pytest.param(1, 20, 2, marks=long),  # more steps than two workers need for all of it
    ],
)
def test_another_number_of_workers_goes_on_and_ends(
    tmp_path: Path, tiny: Settings, size: int, stop: int, then: int
) -> None:
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
    assert_all_finite(ended)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [pytest.param("topka", marks=long), "dense"])
def test_another_compressor_goes_on_with_the_pending_update(tmp_path: Path, tiny: Settings, compressor: str) -> None:
    folder = tmp_path / "run"
    before = succeed(folder, 2, **{**tiny, "max_steps": 5}).steps
    ended = succeed(folder, 2, resume=last(folder), compressor=compressor, max_steps=0)
    assert ended.steps[:5] == before
    assert [step["phase"] for step in ended.steps[5:]] == ["dense" if compressor == "dense" else "sparse"] * 3
    if compressor == "dense":  # the first dense step brings what the sparse ones had held back
        own = [torch.load(last(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
        assert not any(held.any() for each in own for held in each["oktopk"]["residual"].values())
    assert_all_finite(ended)


def die_while_writing(rank: int) -> None:
    """Kill rank 0 amid the checkpoint of step 6."""
    save = checkpoint._save

    def half(state: object, path: Path) -> None:
        save(state, path)  # type: ignore[arg-type]
        if "step-00000006" in str(path) and rank == 0 and path.name == "rank0.pt":
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._save = half  # type: ignore[assignment]


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(tmp_path: Path, tiny: Settings, mixed: Ended) -> None:
    """The worker that is left ends by itself, soon; the resumed run ends where the undisturbed run does."""
    folder = tmp_path / "run"
    killed = train(folder, 2, **{**tiny, "max_epochs": 2, "checkpoint_every": 2}, prepare=die_while_writing)
    assert killed.results[0] is None
    assert isinstance(killed.results[1], PeerError)
    assert last(folder).name == "step-00000004"
    assert_same_run(succeed(folder, 2, resume=last(folder)), mixed)
    assert not list(folder.glob("checkpoints/.step-*"))


# What a step is


def hand_written(speech: Path, settings: Settings, size: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights after `max_steps` steps of plain PyTorch on the same batches, and the losses."""
    utterances = read_manifest(speech / "an4_train_manifest.csv")
    passes, batch_size = settings.get("nsteps_update", 1), settings["batch_size"]
    shares = [
        list(Batches(utterances, batch_size=batch_size, rank=rank, world_size=size).epoch(0)) for rank in range(size)
    ]
    torch.manual_seed(0)
    net = make_model("lstman4-small")
    optimizer = torch.optim.SGD(net.parameters(), lr=settings["lr"], momentum=0.9, nesterov=True)
    losses = []
    for step in range(settings["max_steps"]):
        if step == settings["dense_steps"]:
            optimizer.param_groups[0].update(lr=5 * settings["lr"], momentum=0.5)
            for state in optimizer.state.values():
                state["momentum_buffer"] *= 0.2  # (1 - 0.9) / (1 - 0.5)
        optimizer.zero_grad()
        work = [batch for share in shares for batch in share[step * passes : (step + 1) * passes]]
        losses.append(math.fsum(_backward(net, batch, len(work)) for batch in work))
        clip_grad_norm_(net.parameters(), settings["clip"])
        optimizer.step()
    return dict(net.named_parameters()), losses


def _backward(net: torch.nn.Module, batch: Batch, parts: int) -> float:
    log_probs, frames = net(batch.inputs, batch.frames)
    loss = ctc_loss(log_probs, frames, batch.targets, batch.target_lengths) / parts
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    ("size", "more"),
    [
        pytest.param(2, {"nsteps_update": 2, "clip": 20.0}, marks=pytest.mark.slow),
        pytest.param(1, {"nsteps_update": 3, "clip": 1e9}, marks=long),
        (2, {"clip": 1.0, "clip_place": "local"}),  # dense steps are clipped after the exchange all the same
        pytest.param(3, {"clip": 1.0}, marks=long),
        # at density 1, across the switch: the momentum buffers are scaled to the momentum of sparse steps
        pytest.param(2, {"dense_steps": 2, "max_steps": 5, "density": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_plain_pytorch(
    tmp_path: Path, tiny: Settings, speech: Path, size: int, more: Settings
) -> None:
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


@pytest.mark.slow
def test_a_local_clip_bounds_what_is_sent(tmp_path: Path, tiny: Settings) -> None:
    """In the first sparse step, with nothing held back yet: a part of the mean of clipped gradients."""
    settings = {**tiny, "dense_steps": 0, "max_steps": 1, "clip": 2.0}
    clipped = succeed(tmp_path / "local", 2, **settings, clip_place="local").steps[0]["grad_norm"]
    free = succeed(tmp_path / "free", 2, **{**settings, "clip": 0.0}).steps[0]["grad_norm"]
    assert 0 < clipped <= 2.0 / math.sqrt(2) * 1.001
    assert free > 2.0


def test_a_global_clip_bounds_the_step(tmp_path: Path, tiny: Settings) -> None:
    settings = {**tiny, "dense_steps": 0, "max_steps": 1, "clip": 2.0, "momentum": 0.0, "lr": 0.5}
    ended = succeed(tmp_path / "run", 1, **settings)
    torch.manual_seed(0)
    start = dict(make_model("lstman4-small").named_parameters())
    moved = sum(float((ended.shared["net"][name] - start[name].data).square().sum()) for name in start)
    assert ended.steps[0]["grad_norm"] > 2.0  # the norm before
    assert math.sqrt(moved) == pytest.approx(0.5 * 2.0, rel=1e-3)


def test_the_loss_is_ctc_of_log_probabilities() -> None:
    assert loop.ctc_loss is ctc_loss  # which refuses anything else, and is checked against the definition
    with pytest.raises(ValueError, match="log-probabilities"):
        loop.ctc_loss(torch.randn(20, 1, 29), torch.tensor([20]), torch.tensor([3, 4]), torch.tensor([2]))


IN_CI = ("gtopk", "oktopk_paper")


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [n if n in IN_CI else pytest.param(n, marks=long) for n in sorted(ALGORITHMS)])
def test_every_compressor_trains(tmp_path: Path, tiny: Settings, compressor: str) -> None:
    ended = succeed(tmp_path / "run", 2, **{**tiny, "compressor": compressor, "dense_steps": 2, "max_steps": 6})
    sparse = 0 if compressor == "dense" else 4
    assert [step["phase"] for step in ended.steps] == ["dense"] * (6 - sparse) + ["sparse"] * sparse
    assert ended.digests(0) == ended.digests(1) != []
    assert_all_finite(ended)


# What is not finite


def poison(rank: int, steps: tuple[int, ...], on: int) -> None:
    """Put a NaN into the features of these training batches of one rank."""
    batch_of, calls = Batches._batch, [0]

    def poisoned(self: Batches, epoch: int, indices: list[int]) -> Batch:
        batch = batch_of(self, epoch, indices)
        if not self.evaluation and rank == on:
            if calls[0] in steps:
                batch.inputs[0, 0, 3, 4] = math.nan
            calls[0] += 1
        return batch

    Batches._batch = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])  # dense, sparse
def test_a_nan_stops_all_ranks_with_one_message(tmp_path: Path, tiny: Settings, step: int) -> None:
    ended = train(tmp_path / "run", 2, **tiny, prepare=partial(poison, steps=(step,), on=1))
    assert all(isinstance(result, DivergedError) for result in ended.results), ended.results
    message = str(ended.results[0])
    lr = tiny["lr"] * (1 if step < tiny["dense_steps"] else 5)
    for word in (f"step {step}:", "rank 1", f"lr {lr:g}", "gradient norm", "the gradient of '"):
        assert word in message
    told = [event["message"] for event in ended.events("non-finite")]
    assert told == [message]
    assert message not in str(ended.results[1])
    assert "nan" not in message.lower().split()
    assert len(ended.steps) == step  # the step that was none is an event
    failed = ended.records[-1]
    assert (failed["event"], failed["step"]) == ("failed", step)
    assert message in failed["message"]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_skip_goes_on_and_tells(tmp_path: Path, tiny: Settings, size: int) -> None:
    how = {"max_steps": 6, "on_nonfinite": "skip", "prepare": partial(poison, steps=(1, 4), on=0)}
    ended = succeed(tmp_path / "run", size, **tiny, **how)
    assert [step["step"] for step in ended.steps if step["skipped"]] == [1, 4]
    assert [step["step"] for step in ended.steps if step["loss"] is None] == [1, 4]
    assert [event["step"] for event in ended.events("non-finite")] == [1, 4]
    assert "6 steps, 2 skipped" in ended.printed[0]
    assert ended.printed[0].count("WARNING step") == 2
    assert all(torch.isfinite(tensor.float()).all() for tensor in ended.shared["net"].values())
    assert ended.epochs[0]["val_loss"] is not None  # no running mean has kept the NaN
    assert_no_nan(ended)


def test_a_skipped_first_step_leaves_no_trace(tmp_path: Path, tiny: Settings) -> None:
    """The weights and the running statistics are those of the beginning."""
    how = {"max_steps": 1, "on_nonfinite": "skip", "prepare": partial(poison, steps=(0,), on=0)}
    ended = succeed(tmp_path / "run", 1, **tiny, **how)
    torch.manual_seed(0)
    for name, tensor in make_model("lstman4-small").state_dict().items():
        assert torch.equal(ended.shared["net"][name], tensor), name


@pytest.mark.slow
def test_an_explosion_is_seen_after_a_resume_too(tmp_path: Path, tiny: Settings) -> None:
    """The losses of the first steps are part of a checkpoint."""
    folder, wild = tmp_path / "run", {**tiny, "lr": 1.0, "max_epochs": 8, "checkpoint_every": 1}
    whole = train(tmp_path / "whole", 1, **wild)
    message = str(whole.results[0])
    assert isinstance(whole.results[0], DivergedError), whole.results
    for word in ("step ", "rank 0", "exploded", "lr ", "gradient norm", "lower --lr"):
        assert word in message
    step = int(message.split()[1].rstrip(",:"))
    succeed(folder, 1, **wild, max_steps=step - 1)
    resumed = train(folder, 1, resume=last(folder), max_steps=0)
    assert str(resumed.results[0]) == message


# Validation


@pytest.mark.slow
def test_validation_every_n_epochs_and_after_the_last(tmp_path: Path, tiny: Settings) -> None:
    ended = succeed(tmp_path / "run", 2, **{**tiny, "max_epochs": 5, "validate_every": 3, "batch_size": 8})
    assert [epoch["validated"] for epoch in ended.epochs] == [False, False, True, False, True]
    assert [epoch["wer"] is not None for epoch in ended.epochs] == [False, False, True, False, True]
    assert ended.printed[0].count("not validated") == 3


def validated_by_hand(net: torch.nn.Module, speech: Path) -> tuple[float, Counts]:
    """Return loss and edits over the validation set, one utterance after the other."""
    utterances = read_manifest(speech / "an4_val_manifest.csv")
    transcripts, losses = Transcripts(), []
    net.eval()
    for batch in Batches(utterances, batch_size=1, evaluation=True).epoch(0):
        with torch.no_grad():
            log_probs, frames = net(batch.inputs, batch.frames)
        losses.append(float(ctc_loss(log_probs, frames, batch.targets, batch.target_lengths)))
        transcripts.add(references(batch.targets, batch.target_lengths), greedy(log_probs, frames))
    return math.fsum(losses) / len(utterances), transcripts.counts()


@pytest.mark.parametrize("size", [pytest.param(1, marks=long), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_validation_is_that_of_the_saved_net_on_any_number_of_workers(
    tmp_path: Path, tiny: Settings, speech: Path, mixed: Ended, size: int
) -> None:
    ended = mixed if size == 2 else succeed(tmp_path / "run", size, **tiny, max_steps=4)
    for epoch in ended.epochs:
        assert math.isfinite(epoch["val_loss"])
        assert 0 < epoch["wer"] < 10  # it may pass 1.0
    net = make_model("lstman4-small")
    net.load_state_dict(ended.shared["net"])
    loss, counts = validated_by_hand(net, speech)
    assert ended.epochs[-1]["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert (ended.epochs[-1]["wer"], ended.epochs[-1]["cer"]) == (counts.wer, counts.cer)
