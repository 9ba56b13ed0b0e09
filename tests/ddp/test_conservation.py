"""Nothing is lost: what was applied, and what is still held back, is the sum of all gradients that ever were.

    sum of applied gradients + mean over ranks of the residual = sum of the mean dense gradients

Kept in float64 while everything happens that can happen to a run; a step that was refused is on neither side.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA
from tests.ddp.harness import (
    Net,
    Worlds,
    attach,
    in_memory_order,
    loss_of,
    mean_of,
    name_of,
    num_buckets,
    same_weights_,
    through_a_file,
)

pytestmark = pytest.mark.processes

RELATIVE = 1e-5  # of all that an element's gradients add up to, signs aside


@dataclass
class Books:
    """One rank's accounts, by parameter, in float64."""

    applied: dict[str, Tensor]
    gradient: dict[str, Tensor]
    magnitude: dict[str, Tensor]
    residual: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, net: nn.Module) -> Books:
        applied, gradient, magnitude = (
            {n: torch.zeros(p.numel(), dtype=torch.float64) for n, p in net.named_parameters()} for _ in range(3)
        )
        return cls(applied, gradient, magnitude)


def enter_(books: Books, applied: nn.Module, local: nn.Module, refused: bool, scale: float = 1.0) -> None:
    """Enter a step: the gradients that DDP delivered, and those that a copy outside of DDP had, unscaled."""
    if refused:
        return
    for name, parameter in applied.named_parameters():
        if parameter.grad is not None:
            books.applied[name] += in_memory_order(parameter.grad).double() / scale
    for name, parameter in local.named_parameters():
        if parameter.grad is not None:
            books.gradient[name] += in_memory_order(parameter.grad).double() / scale
            books.magnitude[name] += in_memory_order(parameter.grad).double().abs() / scale


def check_balance(by_rank: Sequence[Books]) -> None:
    gradient, magnitude, residual = (
        mean_of([getattr(books, what) for books in by_rank]) for what in ("gradient", "magnitude", "residual")
    )
    for name in gradient:
        for books in by_rank:
            missing = (books.applied[name] + residual[name] - gradient[name]).abs()
            assert bool((missing <= RELATIVE * magnitude[name]).all()), (
                f"{name} lost {float((missing / magnitude[name]).nan_to_num().max()):.3g} of its gradients"
            )


class Trainer:
    """A net under DDP, a copy of it outside, and their books.

    DDP rebuilds its buckets only if it is not told to look for unused parameters: a run with both has two trainers.
    """

    def __init__(
        self, net: nn.Module, books: Books, algorithm: Any, bucket_cap_mb: float, unused: bool = True, **settings: Any
    ) -> None:
        self.model = DDP(net, find_unused_parameters=unused, bucket_cap_mb=bucket_cap_mb)
        self.attached = attach(self.model, algorithm, on_nonfinite="skip", **settings)
        self.local = copy.deepcopy(net)
        self.books = books
        self.unused = unused
        self.buckets = {num_buckets(self.model)}

    def step(self, step: int, nan: bool = False) -> None:
        rank = dist.get_rank()
        branch = not self.unused or (step % 5 != 0 and (step + rank) % 3 != 0)  # all, some, or no ranks use it
        same_weights_(self.local, self.model.module)
        for net in (self.local, self.model):
            net.zero_grad()
            loss = loss_of(net, rank, step, branch=branch)
            (loss * float("nan") if nan and rank == 0 else loss).backward()
        assert self.attached.last is not None
        enter_(self.books, self.model.module, self.local, refused=self.attached.last.skipped)
        self.buckets.add(num_buckets(self.model))
        if not self.attached.last.skipped:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad

    def resumed(self, algorithm: Any, bucket_cap_mb: float, **settings: Any) -> Trainer:
        """Return a new trainer that goes on where this one is saved and dropped."""
        state = through_a_file({"net": self.model.module.state_dict(), "oktopk": self.attached.state_dict()})
        self.attached.detach()
        net = Net(seed=99)
        net.load_state_dict(state["net"])
        trainer = Trainer(net, self.books, algorithm, bucket_cap_mb, **settings)
        trainer.attached.load_state_dict(state["oktopk"])
        return trainer

    def snapshot(self) -> Books:
        books = copy.deepcopy(self.books)
        books.residual = self.attached.residual
        books.notes = {"buckets": self.buckets, "held": sum(float(t.abs().sum()) for t in books.residual.values())}
        return books


def everything_happens(pace: int) -> list[Books]:
    """Return the books after every event of a run of 30 * `pace` steps at density 1 %."""
    bounded = OkTopk(density=0.01)
    paper = OkTopkPaper(density=0.01, repartition_every=16, rethreshold_every=8)
    trainer = Trainer(net := Net(), Books.of(net), bounded, bucket_cap_mb=0.01, unused=False, dense_steps=pace)
    snapshots, nan_steps = [], (1, 10 * pace, 25 * pace)
    for step in range(30 * pace):
        attached = trainer.attached
        if step == 4 * pace:
            attached.exclude(("*bias", "body.0.*"))
        elif step == 6 * pace:
            attached.density = 0.05
        elif step == 8 * pace:
            attached.density = 0.01
            attached.exclude("norm.*")
        elif step == 12 * pace:
            attached.algorithm = paper
        elif step == 14 * pace:
            attached.algorithm = TopkA(density=0.01)
        elif step == 16 * pace:
            attached.algorithm = bounded
        elif step == 18 * pace:
            trainer = trainer.resumed(bounded, bucket_cap_mb=0.03, exclude="norm.*")
        elif step == 24 * pace:
            trainer = trainer.resumed(bounded, bucket_cap_mb=0.005, dense_steps=24 * pace + 2)
        trainer.step(step, nan=step in nan_steps)
        if step % (2 * pace) == 2 * pace - 1:
            snapshots.append(trainer.snapshot())
    snapshots[-1].notes["skipped"] = trainer.attached.summary().nonfinite
    trainer.attached.detach()
    return snapshots


@pytest.mark.parametrize(
    ("size", "pace"),
    [(2, 3), pytest.param(2, 10, marks=pytest.mark.slow), pytest.param(3, 10, marks=pytest.mark.long)],
)
def test_nothing_is_lost_in_a_run_in_which_everything_happens(worlds: Worlds, size: int, pace: int) -> None:
    by_rank = worlds.run(size, everything_happens, pace)
    for books in zip(*by_rank, strict=True):
        check_balance(books)
    first, last = by_rank[0][0].notes, by_rank[0][-1].notes
    assert len(first["buckets"]) > 1, "DDP was to rebuild its buckets"
    assert last["skipped"] == 1
    assert last["held"] > 0


def test_a_dense_step_flushes_what_was_held_back(worlds: Worlds) -> None:
    for books in worlds.run(2, flush):
        assert books.notes["before"] > 0
        assert all(not bool(tensor.any()) for tensor in books.residual.values())


def flush() -> Books:
    trainer = Trainer(net := Net(), Books.of(net), OkTopk(density=0.01), bucket_cap_mb=25)
    for step in (1, 2, 3, 4):
        trainer.step(step)
    before = trainer.snapshot().notes["held"]
    trainer = trainer.resumed(OkTopk(density=0.01), bucket_cap_mb=25, dense_steps=6)
    trainer.step(6)
    books = trainer.snapshot()
    books.notes["before"] = before
    trainer.attached.detach()
    return books


ALGORITHMS = [
    OkTopk(density=0.02, wire="bf16"),
    OkTopk(density=0.02, ranking="scaled"),
    OkTopkPaper(density=0.02, repartition_every=8, rethreshold_every=4),
    OkTopkPaper(density=0.02, ranking="scaled", wire="bf16", repartition_every=8, rethreshold_every=4),
    TopkA(density=0.02),
    TopkDSA(density=0.02),
    GTopk(density=0.02),
    GaussianK(density=0.02),
    Dense(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
@pytest.mark.parametrize(("size", "steps"), [(2, 12), pytest.param(3, 60, marks=pytest.mark.slow)])
def test_no_algorithm_loses_anything(worlds: Worlds, algorithm: Any, size: int, steps: int) -> None:
    check_balance(worlds.run(size, train, algorithm, steps))


def train(algorithm: Any, steps: int) -> Books:
    trainer = Trainer(net := Net(), Books.of(net), algorithm, bucket_cap_mb=0.01, dense_steps=2)
    for step in range(steps):
        trainer.step(step, nan=step in (1, steps // 2))
    trainer.attached.detach()
    return trainer.snapshot()


@dataclass(frozen=True)
class Kind:
    """Parameters of one dtype, or of several."""

    body: torch.dtype
    exit: torch.dtype


KINDS = [
    Kind(torch.bfloat16, torch.bfloat16),
    Kind(torch.float16, torch.float16),
    Kind(torch.float64, torch.float64),
    Kind(torch.bfloat16, torch.float32),
    Kind(torch.float64, torch.float16),
]


@pytest.mark.parametrize("wire", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.body} {kind.exit}".replace("torch.", ""))
def test_rounding_to_narrow_parameters_loses_nothing(worlds: Worlds, kind: Kind, wire: str) -> None:
    check_balance(worlds.run(2, train_narrow, kind, OkTopk(density=0.05, wire=wire), ()))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.body} {kind.exit}".replace("torch.", ""))
def test_rounding_of_parameters_that_travel_dense_loses_nothing(worlds: Worlds, kind: Kind) -> None:
    check_balance(worlds.run(2, train_narrow, kind, OkTopk(density=0.05), ("*bias", "exit.weight")))


@pytest.mark.parametrize("exclude", [(), ("*bias", "exit.weight")], ids=["sparse", "dense"])
@pytest.mark.parametrize("kind", KINDS[:2], ids=["bfloat16", "float16"])
def test_what_rounding_keeps_back_is_in_unscaled_units_too(worlds: Worlds, kind: Kind, exclude: Sequence[str]) -> None:
    check_balance(worlds.run(2, train_narrow, kind, OkTopk(density=0.05), exclude, (64.0, 16.0, 256.0)))


class TwoParts(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 96).to(kind.body)
        self.exit = nn.Linear(96, 40).to(kind.exit)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x.to(self.body.weight.dtype)))
        return self.exit(hidden.to(self.exit.weight.dtype)).double()


def train_narrow(
    kind: Kind, algorithm: Any, exclude: Sequence[str], scales: Sequence[float] = (1.0,), steps: int = 20
) -> Books:
    """Train with a loss scale that goes through `scales`, if they are several."""
    rank, net = dist.get_rank(), TwoParts(kind)
    local, model, books = copy.deepcopy(net), DDP(net), Books.of(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], enabled=len(scales) > 1)
    attached = attach(model, algorithm, exclude=exclude, scaler=scaler)
    for step in range(steps):
        scale = scales[step * len(scales) // steps]
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 40, generator=generator)
        for each in (local, model):
            each.zero_grad()
            scaler.scale(nn.functional.mse_loss(each(x), y.double())).backward()
        enter_(books, net, local, refused=False, scale=scale)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.05 / scale * parameter.grad
        same_weights_(local, net)
        if scaler.is_enabled() and step + 1 < steps:
            scaler.update(scales[(step + 1) * len(scales) // steps])
    books.residual = attached.residual
    attached.detach()
    return books
