"""With a GradScaler, residuals are in unscaled units: whatever the scale does, updates are what they are without it.

Scales are powers of two, so that scaling and unscaling round nothing: the two runs can be held to the same bits.
"""

from __future__ import annotations

import copy
import io
import math
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import OkTopk, OkTopkPaper, TopkA
from tests.cases import device_step
from tests.ddp.harness import (
    Books,
    Net,
    Raised,
    Worlds,
    attach,
    batch,
    check_balance,
    error_of,
    loss_of,
    relative_error,
    same_bits,
    weights_of,
)

pytestmark = pytest.mark.processes

OKTOPK = OkTopk(density=0.05)
STEPS = 14
DENSE_STEPS = 3


@dataclass(frozen=True)
class Run:
    """A run, with or without a scaler; at some steps rank 1's gradient is Inf."""

    algorithm: Any
    scaled: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of DDP
    inf_at: tuple[int, ...] = (1, 7)
    init_scale: float = 2.0**10


@dataclass(frozen=True)
class Trained:
    """How a run ended, and how its scale went."""

    weights: dict[str, Tensor]
    residual: dict[str, Tensor]
    scales: list[float]
    skipped: int


def train(run: Run) -> Trained:
    rank, model = dist.get_rank(), DDP(Net(), bucket_cap_mb=0.01, **run.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=run.scaled, init_scale=run.init_scale, growth_interval=3)
    attached = attach(
        model,
        run.algorithm,
        **{"dense_steps": DENSE_STEPS, "exclude": "*bias", "scaler": scaler, "on_nonfinite": "skip", **run.settings},
    )
    scales = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=run.autocast, enabled=run.autocast is not None):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        spoiled = step in run.inf_at and rank == 1
        scaler.scale(loss * math.inf if spoiled else loss).backward()
        scales.append(scaler.get_scale())
        if run.scaled:
            scaler.step(optimizer)
            scaler.update()
        elif all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
    attached.detach()
    return Trained(weights_of(model.module), attached.residual, scales, attached.summary().nonfinite)


@pytest.mark.parametrize(
    "run",
    [
        Run(OkTopk(density=0.05, rescale_every=4)),
        Run(OkTopkPaper(density=0.05, repartition_every=4, rethreshold_every=3), options={"static_graph": True}),
        Run(OkTopk(density=0.05), settings={"clip": 0.25}, options={"gradient_as_bucket_view": True}),
        Run(TopkA(density=0.05), settings={"dense_steps": 0, "exclude": ()}),
        Run(OkTopk(density=0.05), autocast=torch.bfloat16),
    ],
    ids=["bounded", "paper", "clip", "topka", "autocast"],
)
def test_updates_are_those_without_a_scaler_whether_attach_was_told_of_it_or_not(worlds: Worlds, run: Run) -> None:
    runs = {
        "plain": run,
        "told": replace(run, scaled=True),
        "untold": replace(run, scaled=True, settings={**run.settings, "scaler": None}),
    }
    trained = worlds.run_all(2, train, {name: (each,) for name, each in runs.items()})
    for name in ("told", "untold"):
        for ours, theirs in zip(trained[name], trained["plain"], strict=True):
            assert any(a < b for a, b in pairwise(ours.scales)), "the scale was to grow"
            assert any(a > b for a, b in pairwise(ours.scales)), "the scale was to shrink"
            assert ours.skipped == theirs.skipped == 2
            assert same_bits(ours.weights, theirs.weights)
            assert same_bits(ours.residual, theirs.residual)


def test_under_float16_autocast_updates_are_nearly_those_without_a_scaler(worlds: Worlds) -> None:
    """Nearly: float16 rounds small gradients more coarsely without a scaler. The one that attach finds is the same."""
    run = Run(OkTopk(density=1.0), True, autocast=torch.float16)
    cases = {
        "scaled": (run,),
        "plain": (replace(run, scaled=False),),
        "untold": (replace(run, settings={"scaler": None}),),
    }
    trained = worlds.run_all(2, train, cases)
    for ours, theirs, untold in zip(*trained.values(), strict=True):
        assert len(set(ours.scales)) > 1
        assert all(relative_error(ours.weights[name], theirs.weights[name]) <= 1e-3 for name in ours.weights)
        assert ours.scales == untold.scales
        assert same_bits(ours.weights, untold.weights)


def test_a_scale_that_overflows_float16_settles(worlds: Worlds) -> None:
    run = Run(OkTopk(density=0.05), True, autocast=torch.float16, init_scale=2.0**22, inf_at=())
    trained = worlds.run(2, train, run)
    for ours in trained:
        assert 0 < ours.skipped < STEPS
        assert ours.scales == trained[0].scales
        assert same_bits(ours.weights, trained[0].weights)
        assert all(bool(weight.isfinite().all()) for weight in ours.weights.values())


def test_each_of_two_scalers_that_attach_was_not_told_of_conserves_mass(worlds: Worlds) -> None:
    """Made after attach, with another scale in each step; both losses are scaled before the first backward()."""
    by_rank = worlds.run(2, two_scalers)
    for model in (0, 1):
        check_balance([books[model] for books, _ in by_rank])
    assert [said.count("oktopk: a GradScaler scales the loss") for _, said in by_rank] == [2, 0]


def two_scalers() -> tuple[list[Books], str]:
    rank, said = dist.get_rank(), io.StringIO()
    nets = [Net(seed=seed) for seed in (1, 2)]
    local, models, books = copy.deepcopy(nets), [DDP(net, bucket_cap_mb=0.01) for net in nets], [Books(n) for n in nets]
    handles = [attach(model, OkTopk(density=0.05), exclude="*bias") for model in models]
    scalers = [torch.amp.GradScaler("cpu") for _ in models]
    with redirect_stderr(said):
        for step in range(8):
            losses = []
            for m, (scaler, model) in enumerate(zip(scalers, models, strict=True)):
                scaler.scale(torch.zeros(1))  # a scaler makes its scale when it is first used
                scaler.update(1.5 ** (3 * step % 7 + 10 * m))
                losses.append(scaler.scale([loss_of(model, rank, step)])[0])
            for m, loss in enumerate(losses):
                models[m].zero_grad()
                loss.backward()
                local[m].zero_grad()
                (loss_of(local[m], rank, step) * scalers[m].get_scale()).backward()
                books[m].enter_(nets[m], local[m], scalers[m].get_scale())
        for each, handle in zip(books, handles, strict=True):
            handle.detach()
            each.residual = handle.residual
    return books, said.getvalue()


def backward_with_scalers() -> tuple[Tensor, Tensor, Raised | None, Raised | None]:
    """Return the gradients of a loss that is scaled, and of the same loss without; at density 1 nothing is held.

    Then what a loss of two scaled parts raises, without and with a scaler given to attach.
    """
    model, scalers = DDP(Net()), [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    came, raised = [], []
    attached = attach(model)
    for scale in (scalers[0].scale, lambda loss: loss):
        model.zero_grad()
        scale(loss_of(model, dist.get_rank(), 0)).backward()
        came.append(model.module.exit.weight.grad.clone())
    attached.detach()
    for given in (None, scalers[0]):
        model = DDP(Net())
        attached = attach(model, scaler=given)
        losses = [scaler.scale(loss_of(model, dist.get_rank(), 0)) for scaler in scalers]
        raised.append(error_of(sum(losses).backward))
        attached.detach()
    return *came, *raised  # type: ignore[return-value]


def test_a_loss_that_is_not_scaled_beside_one_that_is_and_one_that_two_scalers_scale(worlds: Worlds) -> None:
    for scaled, plain, untold, told in worlds.run(2, backward_with_scalers):
        assert relative_error(scaled, 1024 * plain) <= 1e-6
        assert untold is not None
        assert "two GradScalers" in untold.message
        assert told is None


def overflow_and_raise() -> tuple[Raised | None, str]:
    """Return the error of a scaled backward(), and the words of an unscaled training after it."""
    raised = error_of(partial(train, Run(OKTOPK, True, {"on_nonfinite": "raise"})))
    with redirect_stderr(io.StringIO()) as told:
        train(Run(OKTOPK, False, {"scaler": None}, inf_at=()))
    return raised, told.getvalue()


def test_with_raise_an_overflow_is_an_error_on_all_ranks(worlds: Worlds) -> None:
    for raised, told in worlds.run(2, overflow_and_raise):
        assert "GradScaler" not in told, "the scaler of the pass that raised was taken for the next one's"
        assert raised is not None
        assert "NonFiniteError" in raised.message
        assert "rank 1" in raised.message


@pytest.mark.parametrize("phase", ["dense", "sparse", "device"])
def test_float16_parameters_lose_no_small_gradients_to_the_scale(worlds: Worlds, phase: str) -> None:
    """Unscaled, these gradients would be denormal in float16, if anything."""
    for came, expected in worlds.run(2, scaled_float16, phase):
        assert relative_error(came, expected) <= 2.0**-10


def scaled_float16(phase: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(16, 16, bias=False).half()
    model, scaler = DDP(net), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    attached = attach(model, OkTopk(density=1.0), scaler=scaler, dense_steps=int(phase == "dense"))
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randn(16, 16, generator=generator).half() for _ in range(2)]
    scaler.scale(torch.zeros(1))  # a scaler makes its scale when it is first used
    with device_step() if phase == "device" else nullcontext():
        (model(torch.eye(16).half()).float() * targets[dist.get_rank()].float()).sum().backward()
    attached.detach()
    mean = (targets[0].double() + targets[1].double()).t() / 2
    return net.weight.grad.double(), mean


@pytest.mark.parametrize("flush", [False, True], ids=["sparse", "flush"])
def test_more_than_float16_can_hold_is_delivered_in_parts_or_refused(worlds: Worlds, flush: bool) -> None:
    """What was held back for several steps is more than a float16 gradient can carry at once: nothing may be lost."""
    by_rank = worlds.run(2, too_much_for_float16, flush)
    check_balance(by_rank, held=not flush)
    for books in by_rank:
        assert bool(books.applied["weight"].isfinite().all()), "a finite gradient became infinite"


def too_much_for_float16(flush: bool) -> Books:
    net = nn.Linear(8, 8, bias=False).half()
    local, model, books = copy.deepcopy(net), DDP(net), Books(net)
    attached = attach(model, OkTopk(density=0.02), on_nonfinite="skip")
    for step in range(8):
        if step == 5 and flush:
            attached.exclude("weight")
        for each in (model, local):
            each.zero_grad()
            (each(torch.eye(8).half()).float() * 30_000.0).sum().backward()
        assert attached.last is not None
        if not attached.last.skipped:
            books.enter_(net, local)
    attached.detach()
    books.residual = attached.residual
    return books
