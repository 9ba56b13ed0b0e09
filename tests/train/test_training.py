"""The laws of the trainer, on real runs: nothing is missing or NaN, all ranks agree, a stop changes nothing."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from oktopk.algorithms import ALGORITHMS
from oktopk.errors import MismatchError, PeerError
from oktopk.report.report import make_report
from oktopk.telemetry.figures import summary_of
from oktopk.telemetry.reader import read_records
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
from tests.train.runs import Ended, last, num_steps, same_weights, succeed, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]

Settings = dict[str, Any]


def assert_all_finite(ended: Ended) -> None:
    """Assert that every figure is known, in the files and in what was printed."""
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


# The two phases


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, speech: Path) -> Ended:
    """Two epochs of eight steps on two workers: three dense steps, then sparse ones."""
    folder = tmp_path_factory.mktemp("mixed")
    return succeed(folder / "run", 2, **tiny_settings(speech), max_epochs=2, checkpoint_every=3)


def tiny_settings(speech: Path) -> Settings:
    return {
        "dataset": "an4", "data_dir": str(speech), "batch_size": 2, "lr": 0.003, "clip": 20.0, "dense_steps": 3,
        "threads": 1, "device": "cpu", "timeout_s": 20.0,
    }  # fmt: skip


def test_crossing_the_boundary(mixed: Ended) -> None:
    steps = mixed.steps
    assert [step["step"] for step in steps] == list(range(16))
    assert [step["phase"] for step in steps] == ["dense"] * 3 + ["sparse"] * 13
    for step in steps[:3]:
        assert (step["sparsity"], step["compression_ratio"]) == (0.0, 1.0)
        assert step["nominal_bytes"] == 4 * step["numel"]
        assert step["sent_bytes"] >= 4 * step["numel"]  # 2 (P-1)/P n words at P = 2
    for step in steps[3:]:
        assert step["sparsity"] == pytest.approx(0.97, abs=0.005)
        assert step["compression_ratio"] == pytest.approx(step["numel"] / step["nnz"])
        assert step["sent_bytes"] < 0.1 * steps[0]["sent_bytes"]
    assert_all_finite(mixed)


def test_the_momentum_falls_and_the_learning_rate_rises_at_the_switch(mixed: Ended) -> None:
    for step in mixed.steps:
        lr = 0.003 / 1.01 ** step["epoch"]
        expected = (lr, 0.9) if step["phase"] == "dense" else (5 * lr, 0.5)
        assert (step["lr"], step["momentum"]) == pytest.approx(expected)
    assert [epoch["lr"] for epoch in mixed.epochs] == [mixed.steps[7]["lr"], mixed.steps[15]["lr"]]


def optimizer_of(config: Config) -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    rates = config.rates_at(0, "dense")
    return weight, torch.optim.SGD([weight], lr=rates.lr, momentum=rates.momentum, nesterov=True)


def update_of(weight: torch.nn.Parameter, optimizer: torch.optim.SGD, config: Config, phase: str) -> torch.Tensor:
    """Return how far one step goes under a gradient that is always the same."""
    before = weight.detach().clone()
    weight.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loop.set_rates(optimizer, config.rates_at(0, phase))
    optimizer.step()
    return before - weight.detach()


def test_a_steady_gradient_has_steps_of_one_size_through_the_switch_and_back() -> None:
    """The buffers of momentum 0.9 made the first sparse steps 2.0, 1.5 and 1.25 times too large."""
    config = Config()
    weight, optimizer = optimizer_of(config)
    for _ in range(400):
        steady = update_of(weight, optimizer, config, "dense")
    for phase in ("sparse", "sparse", "sparse", "dense", "dense"):
        torch.testing.assert_close(update_of(weight, optimizer, config, phase), steady)


def test_a_stop_at_any_step_around_the_switch_scales_the_buffers_once() -> None:
    config, phases = Config(), ["dense"] * 3 + ["sparse"] * 3
    weight, optimizer = optimizer_of(config)
    updates = [update_of(weight, optimizer, config, phase) for phase in phases]
    for stop in range(len(phases)):
        weight, optimizer = optimizer_of(config)
        resumed = []
        for step, phase in enumerate(phases):
            if step == stop:
                saved = through_a_file(optimizer.state_dict())
                optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=True)
                optimizer.load_state_dict(saved)
            resumed.append(update_of(weight, optimizer, config, phase))
        assert all(map(torch.equal, resumed, updates)), f"stopped before step {stop}"


def test_buffers_that_sgd_left_alone_at_momentum_0_are_forgotten() -> None:
    config = Config(sparse_momentum=0.0)
    weight, optimizer = optimizer_of(config)
    first = update_of(weight, optimizer, config, "dense")
    for phase in ("dense", "sparse", "sparse"):
        update_of(weight, optimizer, config, phase)
    torch.testing.assert_close(update_of(weight, optimizer, config, "dense"), first)


def test_every_rank_has_its_figures_and_rank_0s_are_those_of_the_step(mixed: Ended) -> None:
    for step in (record for record in read_records(mixed.folder / "metrics.jsonl") if record["kind"] == "step"):
        first, *others = step["ranks"]
        assert len(others) == 1
        assert first["seconds"] == step["seconds"]
        assert first["sent_by_phase"] == step["sent_by_phase"]
        assert (first["messages"], first["residual_norm"]) == (step["messages"], step["residual_norm"])
        assert {name: first[name] for name in SPLIT} == step["split"]
        for rank in step["ranks"]:
            assert sum(rank["sent_by_phase"].values()) == rank["sent_bytes"]
        assert (step["residual_norm"] is not None) == (
            step["phase"] == "sparse" and step["step"] % loop.RESIDUAL_EVERY == 0
        )


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


def test_a_run_that_ends_says_so_last(mixed: Ended) -> None:
    assert (mixed.records[-1]["event"], mixed.records[-1]["step"]) == ("end", 16)


def test_the_first_sparse_step_is_announced_once(mixed: Ended) -> None:
    assert [event["step"] for event in mixed.events("first-sparse")] == [3]
    assert mixed.printed[0].count("the first sparse step") == 1
    assert "the first sparse step" not in mixed.printed[1]


def test_the_end_says_what_was_sparse(mixed: Ended) -> None:
    assert "compression was active on 13 of 16 steps" in mixed.printed[0]
    assert mixed.results[0]["sparse_steps"] == 13
    assert json.loads((mixed.folder / "summary.json").read_text()) == mixed.results[0]


def test_all_ranks_hold_the_same_weights(mixed: Ended) -> None:
    digests = mixed.digests(0)
    assert len(digests) == 7  # 3, 6, 9, 12, 15 are due; 8 and 16 end an epoch
    assert len(set(digests)) == len(digests)
    assert mixed.digests(1) == digests


def test_every_epoch_is_validated(mixed: Ended) -> None:
    assert [epoch["epoch"] for epoch in mixed.epochs] == [0, 1]
    for epoch in mixed.epochs:
        assert math.isfinite(epoch["val_loss"])
        assert 0 < epoch["wer"] < 10  # it may pass 1.0
        assert 0 < epoch["cer"] < 10


@pytest.mark.slow
def test_a_run_shorter_than_its_dense_steps_says_so_before_and_after(tmp_path: Path, tiny: Settings) -> None:
    ended = succeed(tmp_path / "run", 1, **{**tiny, "dense_steps": 128, "max_epochs": 2, "max_steps": 28})
    printed = ended.printed[0]
    warned, began = printed.index("WARNING no step will be sparse: the run has 28 steps"), printed.index("epoch 1 step")
    assert warned < began
    assert "compression was active on 0 of 28 steps" in printed
    assert "n/a (no step was sparse)" in printed
    assert ended.events("warning")[0]["step"] == 0
    assert [step["step"] for step in ended.steps] == list(range(28))
    for step in ended.steps:
        assert (step["phase"], step["sparsity"], step["compression_ratio"]) == ("dense", 0.0, 1.0)
        assert step["nominal_bytes"] == 4 * step["numel"]
    assert_all_finite(ended)


# All ranks


@pytest.mark.long
def test_all_ranks_hold_the_same_weights_after_200_steps(tmp_path: Path, tiny: Settings) -> None:
    ended = succeed(
        tmp_path / "run", 2, **{**tiny, "dense_steps": 100, "max_epochs": 25, "validate_every": 25, "lr": 0.001}
    )
    assert len(ended.steps) == 200
    assert (ended.results[0]["dense_steps"], ended.results[0]["sparse_steps"]) == (100, 100)
    assert len(ended.digests(0)) == 25
    assert ended.digests(0) == ended.digests(1)
    assert ended.epochs[-1]["train_loss"] < ended.epochs[0]["train_loss"]
    assert_all_finite(ended)


def nudge_rank_1(rank: int) -> None:
    """Change one weight of rank 1, by as little as there is, after its third step."""
    tell = loop.Trainer._write

    def nudged(self: loop.Trainer, *args: Any) -> None:
        tell(self, *args)
        if rank == 1 and self.progress.step == 3:
            weights = next(self.net.parameters()).data.view(-1)
            weights[5] = torch.nextafter(weights[5], torch.tensor(math.inf))

    loop.Trainer._write = nudged  # type: ignore[method-assign]


def test_a_weight_that_differs_is_an_error_on_all_ranks(tmp_path: Path, tiny: Settings) -> None:
    ended = train(tmp_path / "run", 2, **tiny, checkpoint_every=3, prepare=nudge_rank_1)
    for result in ended.results:
        assert isinstance(result, MismatchError), result
        assert str(result) == "step 3: the weights of ranks [1] are not those of rank 0"
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


# Stopping and going on


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, speech: Path) -> Callable[..., Ended]:
    """Return the run of two epochs that nothing stops, made once for each set of settings."""
    made: dict[str, Ended] = {}

    def run(size: int, **more: Any) -> Ended:
        key = repr((size, sorted(more.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            made[key] = succeed(folder / "run", size, **{**tiny_settings(speech), "max_epochs": 2, **more})
        return made[key]

    return run


def assert_same_run(one: Ended, other: Ended) -> None:
    """Assert that weights, optimizer, steps and epochs are equal; only the times may differ."""
    assert one.steps == other.steps
    assert one.epochs == other.epochs
    assert one.results[0]["wer"] == other.results[0]["wer"]
    assert one.results[0]["val_loss"] == other.results[0]["val_loss"]
    assert same_weights(one, other)
    assert {**one.shared["progress"]} == {**other.shared["progress"]}


def test_resume_equals_never_having_stopped(tmp_path: Path, tiny: Settings, undisturbed: Callable[..., Ended]) -> None:
    """Stopped amid the first epoch, past the boundary."""
    whole = undisturbed(2)
    folder = tmp_path / "run"
    succeed(folder, 2, **{**tiny, "max_epochs": 2, "max_steps": 5})
    resumed = succeed(folder, 2, resume=last(folder), max_steps=0)
    assert_same_run(resumed, whole)
    assert [event["step"] for event in resumed.events("resume")] == [5]
    assert len(resumed.events("first-sparse")) == 1


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


def test_what_is_drawn_after_a_resume_is_what_would_have_been(tmp_path: Path, tiny: Settings) -> None:
    """Stopped after an odd number of draws: of the pairs that a normal distribution comes in one half is left."""
    how: Settings = {**tiny, "max_steps": 5, "prepare": draw_noise}
    whole, folder = succeed(tmp_path / "whole", **how), tmp_path / "run"
    succeed(folder, **{**how, "max_steps": 3})
    assert_same_run(succeed(folder, resume=last(folder), max_steps=5, prepare=draw_noise), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stops", "more"),
    [
        pytest.param(1, (2, 3, 17, 31), {}, marks=pytest.mark.long),
        (2, (2, 3, 8, 13), {}),  # dense, at the boundary, between epochs, sparse
        pytest.param(2, (3,), {"nsteps_update": 2}, marks=pytest.mark.long),
        pytest.param(2, (3, 5), {"sparse_momentum": 0.0}, marks=pytest.mark.long),
        (2, (5,), {"augment": True, "clip_place": "local"}),
        pytest.param(2, (5,), {"compressor": "topka"}, marks=pytest.mark.long),
        pytest.param(2, (5,), {"compressor": "dense"}, marks=pytest.mark.long),
    ],
)
def test_resume_after_several_stops(
    tmp_path: Path, tiny: Settings, undisturbed: Callable[..., Ended], size: int, stops: tuple[int, ...], more: Settings
) -> None:
    whole = undisturbed(size, **more)
    folder = tmp_path / "run"
    succeed(folder, size, **{**tiny, "max_epochs": 2, "max_steps": stops[0], **more})
    for stop in (*stops[1:], 0):
        resumed = succeed(folder, size, resume=last(folder), max_steps=stop)
    assert_same_run(resumed, whole)


def test_a_run_that_is_over_is_over(tmp_path: Path, tiny: Settings) -> None:
    folder = tmp_path / "run"
    first = succeed(folder, 1, **tiny, max_steps=2)
    steps, epochs = first.steps, first.epochs
    assert (len(steps), len(epochs)) == (2, 1)
    again = succeed(folder, 1, resume=last(folder))
    assert again.results[0] == first.results[0]
    assert (again.steps, again.epochs) == (steps, epochs)


@pytest.mark.slow
def test_going_on_from_an_earlier_checkpoint(tmp_path: Path, tiny: Settings, mixed: Ended) -> None:
    """What came after it is made again, and the checkpoints that came after it are gone."""
    folder = tmp_path / "run"
    shutil.copytree(mixed.folder, folder)
    earlier = sorted(folder.glob("checkpoints/step-*"))[-2]
    assert earlier.name == "step-00000015"
    resumed = succeed(folder, 2, resume=earlier)
    assert_same_run(resumed, mixed)
    assert not list(folder.glob("checkpoints/.*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stop", "then"),
    [
        pytest.param(2, 5, 1, marks=pytest.mark.long),
        (2, 13, 3),
        pytest.param(1, 20, 2, marks=pytest.mark.long),  # more steps than two workers need for all of it
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
@pytest.mark.parametrize("compressor", [pytest.param("topka", marks=pytest.mark.long), "dense"])
def test_another_compressor_goes_on_with_what_is_pending(tmp_path: Path, tiny: Settings, compressor: str) -> None:
    folder = tmp_path / "run"
    before = succeed(folder, 2, **{**tiny, "max_steps": 5}).steps
    ended = succeed(folder, 2, resume=last(folder), compressor=compressor, max_steps=0)
    assert ended.steps[:5] == before
    assert [step["phase"] for step in ended.steps[5:]] == ["dense" if compressor == "dense" else "sparse"] * 3
    if compressor == "dense":  # the first dense step brings what the sparse ones had held back
        own = [torch.load(last(folder) / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
        assert not any(held.any() for each in own for held in each["oktopk"]["residual"].values())
    assert_all_finite(ended)


def die_while_writing(rank: int, step: int, where: str) -> None:
    """Kill rank 0 amid the checkpoint of a step."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def half(state: object, path: Path) -> None:
        save(state, path)  # type: ignore[arg-type]
        if f"step-{step:08d}" in str(path) and path.name == "rank0.pt":
            os.truncate(path, path.stat().st_size // 2)
            die()

    def pointer(path: Path, text: str) -> None:
        if text == f"step-{step:08d}":
            die()
        write_text(path, text)

    save, write_text = checkpoint._save, checkpoint.write_text
    if rank == 0:
        checkpoint._save = half if where == "file" else save  # type: ignore[assignment]
        checkpoint.write_text = pointer if where == "pointer" else write_text  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "where"), [(2, "file"), pytest.param(1, "file", marks=pytest.mark.long), (1, "pointer")]
)
def test_killed_while_a_checkpoint_is_written(
    tmp_path: Path, tiny: Settings, undisturbed: Callable[..., Ended], size: int, where: str
) -> None:
    folder = tmp_path / "run"
    settings = {**tiny, "max_epochs": 2, "checkpoint_every": 2}
    killed = train(folder, size, **settings, prepare=partial(die_while_writing, step=6, where=where))
    assert killed.results[0] is None
    assert all(isinstance(result, PeerError) for result in killed.results[1:])
    assert last(folder).name == "step-00000004"
    assert_same_run(succeed(folder, size, resume=last(folder)), undisturbed(size))
    assert not list(folder.glob("checkpoints/.step-*"))


class Assassin:
    """Kills a worker at some moment after it got somewhere."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = folder, dice

    def __call__(self, processes: list[Any]) -> None:
        steps, wanted = num_steps(self.folder), self.dice.randint(1, 3)
        deadline = time.monotonic() + 20
        while num_steps(self.folder) in range(steps + wanted) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(self.dice.random() / 5)
        self.dice.choice(processes).kill()


@pytest.mark.long
def test_ten_kills_change_nothing(tmp_path: Path, tiny: Settings, undisturbed: Callable[..., Ended]) -> None:
    """The worker that is left ends by itself, soon; what is resumed ends where the undisturbed run does."""
    folder, dice = tmp_path / "run", random.Random(0)
    epochs = 12  # more than ten killers wait for, on a machine however quick
    succeed(folder, 2, **{**tiny, "max_epochs": epochs, "checkpoint_every": 1}, max_steps=1)
    kills = 0
    for _ in range(10):
        ended = train(folder, 2, resume=last(folder), max_steps=0, watch=Assassin(folder, dice))
        kills += ended.results.count(None)
        left = [result for result in ended.results if result is not None]
        assert all(isinstance(result, PeerError) for result in left), left
    assert kills == 10
    assert_same_run(succeed(folder, 2, resume=last(folder)), undisturbed(2, max_epochs=epochs))


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
        pytest.param(1, {"nsteps_update": 3, "clip": 1e9}, marks=pytest.mark.long),
        (2, {"clip": 1.0, "clip_place": "local"}),  # which holds for dense steps too
        pytest.param(3, {"clip": 1.0}, marks=pytest.mark.long),
    ],
)
def test_dense_steps_are_those_of_plain_pytorch(
    tmp_path: Path, tiny: Settings, speech: Path, size: int, more: Settings
) -> None:
    """One pass after another, averaged; clipped after that; the mean over workers."""
    settings = {**tiny, "max_steps": 3, **more}
    weights, losses = hand_written(speech, settings, size)
    ended = succeed(tmp_path / "run", size, **settings)
    assert [step["loss"] for step in ended.steps] == pytest.approx(losses, rel=1e-4)
    for name, expected in weights.items():
        torch.testing.assert_close(ended.shared["net"][name], expected.data, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_at_density_1_sparse_steps_are_those_of_plain_pytorch_with_less_momentum(
    tmp_path: Path, tiny: Settings, speech: Path
) -> None:
    """Across the switch: the momentum buffers are scaled to the momentum of sparse steps."""
    settings = {**tiny, "dense_steps": 2, "max_steps": 5, "density": 1.0}
    weights, losses = hand_written(speech, settings, 2)
    ended = succeed(tmp_path / "run", 2, **settings)
    assert [step["phase"] for step in ended.steps] == ["dense"] * 2 + ["sparse"] * 3
    assert [step["loss"] for step in ended.steps] == pytest.approx(losses, rel=1e-3)
    for name, expected in weights.items():
        torch.testing.assert_close(ended.shared["net"][name], expected.data, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_local_clip_bounds_what_is_sent(tmp_path: Path, tiny: Settings) -> None:
    """From the first sparse step on, with nothing held back yet: the mean of clipped gradients, minus the held."""
    settings = {**tiny, "dense_steps": 0, "max_steps": 1, "clip": 2.0}
    clipped = succeed(tmp_path / "local", 2, **settings, clip_place="local").steps[0]["grad_norm"]
    free = succeed(tmp_path / "free", 2, **{**settings, "clip": 0.0}).steps[0]["grad_norm"]
    assert 0 < clipped <= 2.0 / math.sqrt(2) * 1.001
    assert free > 2.0


def test_a_global_clip_bounds_the_step(tmp_path: Path, tiny: Settings, speech: Path) -> None:
    settings = {**tiny, "dense_steps": 0, "max_steps": 1, "clip": 2.0, "momentum": 0.0, "lr": 0.5}
    ended = succeed(tmp_path / "run", 1, **settings)
    torch.manual_seed(0)
    start = dict(make_model("lstman4-small").named_parameters())
    moved = sum(float((ended.shared["net"][name] - start[name].data).square().sum()) for name in start)
    assert ended.steps[0]["grad_norm"] > 2.0  # the norm before
    assert math.sqrt(moved) == pytest.approx(0.5 * 2.0, rel=1e-3)


def test_the_loss_is_ctc_of_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop.ctc_loss is ctc_loss  # which refuses anything else, and is checked against the definition
    logits = torch.randn(20, 1, 29)
    with pytest.raises(ValueError, match="log-probabilities"):
        loop.ctc_loss(logits, torch.tensor([20]), torch.tensor([3, 4]), torch.tensor([2]))


IN_CI = ("gtopk", "oktopk_paper")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.long) for n in ALGORITHMS])
def test_every_compressor_trains(tmp_path: Path, tiny: Settings, name: str) -> None:
    settings = {**tiny, "compressor": name, "dense_steps": 2, "max_steps": 6}
    ended = succeed(tmp_path / "run", 2, **settings)
    sparse = 0 if name == "dense" else 4
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


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])  # dense, sparse
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
    ended = succeed(
        tmp_path / "run", size, **tiny, max_steps=7, on_nonfinite="skip", prepare=partial(poison, steps=(1, 5), on=0)
    )
    assert [step["step"] for step in ended.steps if step["skipped"]] == [1, 5]
    assert [step["step"] for step in ended.steps if step["loss"] is None] == [1, 5]
    assert [event["step"] for event in ended.events("non-finite")] == [1, 5]
    assert "7 steps, 2 skipped" in ended.printed[0]
    assert ended.printed[0].count("WARNING step") == 2
    assert all(torch.isfinite(tensor.float()).all() for tensor in ended.shared["net"].values())
    assert ended.epochs[0]["val_loss"] is not None  # no running mean has kept the NaN
    assert_no_nan(ended)


def test_a_skipped_step_leaves_no_trace(tmp_path: Path, tiny: Settings) -> None:
    """The first step of a run is skipped: the weights and the running statistics are those of the beginning."""
    how: Settings = {**tiny, "max_steps": 1, "on_nonfinite": "skip"}
    ended = succeed(tmp_path / "run", 1, **how, prepare=partial(poison, steps=(0,), on=0))
    torch.manual_seed(0)
    for name, tensor in make_model("lstman4-small").state_dict().items():
        assert torch.equal(ended.shared["net"][name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("clip", [20.0, pytest.param(0.0, marks=pytest.mark.long)])
def test_lr_1_is_named_as_what_it_is(tmp_path: Path, tiny: Settings, clip: float) -> None:
    """With a clip the loss explodes; without one the gradient is soon not finite."""
    steady = {"lr": 1.0, "lr_anneal": 1.0, "sparse_momentum": 0.9}
    ended = train(tmp_path / "run", 1, **{**tiny, **steady, "clip": clip, "max_epochs": 8})
    assert isinstance(ended.results[0], DivergedError), ended.results
    message = str(ended.results[0])
    for word in ("step ", "rank 0", "lr 1,", "gradient norm", "lower --lr"):
        assert word in message
    assert "exploded" in message if clip else "not finite" in message
    assert "nan" not in (tmp_path / "run" / "metrics.jsonl").read_text().lower()


@pytest.mark.slow
def test_an_explosion_is_seen_after_a_resume_too(tmp_path: Path, tiny: Settings) -> None:
    """What the loss was at the start is part of a checkpoint."""
    folder, wild = tmp_path / "run", {**tiny, "lr": 1.0, "max_epochs": 8, "checkpoint_every": 1}
    whole = train(tmp_path / "whole", 1, **wild)
    step = int(str(whole.results[0]).split()[1].rstrip(",:"))
    succeed(folder, 1, **wild, max_steps=step - 1)
    resumed = train(folder, 1, resume=last(folder), max_steps=0)
    assert str(resumed.results[0]) == str(whole.results[0])


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


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_validation_is_that_of_the_saved_net_on_any_number_of_workers(
    tmp_path: Path, tiny: Settings, speech: Path, size: int
) -> None:
    ended = succeed(tmp_path / "run", size, **tiny, max_steps=4)
    net = make_model("lstman4-small")
    net.load_state_dict(ended.shared["net"])
    loss, counts = validated_by_hand(net, speech)
    assert ended.epochs[0]["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert (ended.epochs[0]["wer"], ended.epochs[0]["cer"]) == (counts.wer, counts.cer)


# The seed


def test_the_same_seed_gives_the_same_weights(
    tmp_path: Path, tiny: Settings, undisturbed: Callable[..., Ended], mixed: Ended
) -> None:
    assert characters(mixed) == characters(undisturbed(2))
    assert same_weights(mixed, undisturbed(2))  # which differ in how often they save
    other = succeed(tmp_path / "other", 2, **tiny, max_steps=3, seed=1)
    assert other.digests(0)[0] != mixed.digests(0)[0]  # after three steps, both
    assert characters(other) != characters(mixed)[:3]  # another order too


def characters(ended: Ended) -> list[list[float]]:
    """Return how much text each worker had in each step."""
    lines = map(json.loads, (ended.folder / "metrics.jsonl").read_text().splitlines())
    return [[rank["characters"] for rank in record["ranks"]] for record in lines if record["kind"] == "step"]
