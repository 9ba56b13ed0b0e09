"""Nothing is lost: what was applied, and what is still held back, is the sum of all gradients that ever were.

Accounts are kept in float64 while everything happens that can happen to a run; a step that was refused is on neither
side of them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import OkTopk, OkTopkPaper, TopkA
from tests.cases import COVER, algorithms
from tests.ddp.harness import (
    Books,
    Net,
    Worlds,
    attach,
    check_balance,
    descend_,
    loss_of,
    num_buckets,
    same_weights_,
    through_a_file,
)

pytestmark = pytest.mark.processes


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
        self.buckets.add(num_buckets(self.model))
        assert self.attached.last is not None
        if not self.attached.last.skipped:
            self.books.enter_(self.model.module, self.local)
            descend_(self.model)

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
        return books


def everything_happens(pace: int) -> tuple[list[Books], int, int]:
    """Return the books after every event of a run of 30 * `pace` steps at density 1 %, the numbers of buckets that
    DDP had before the first restart, and the steps skipped after the last one."""
    bounded = OkTopk(density=0.01)
    trainer = Trainer(net := Net(), Books(net), bounded, bucket_cap_mb=0.01, unused=False, dense_steps=pace)
    snapshots, buckets, nan_steps = [], set[int](), (1, 10 * pace, 25 * pace)
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
            attached.algorithm = OkTopkPaper(density=0.01, repartition_every=16, rethreshold_every=8)
        elif step == 14 * pace:
            attached.algorithm = TopkA(density=0.01)
        elif step == 16 * pace:
            attached.algorithm = bounded
        elif step == 18 * pace:
            buckets = trainer.buckets
            trainer = trainer.resumed(bounded, bucket_cap_mb=0.03, exclude="norm.*")
        elif step == 24 * pace:
            trainer = trainer.resumed(bounded, bucket_cap_mb=0.005, dense_steps=24 * pace + 2)
        trainer.step(step, nan=step in nan_steps)
        if step % (2 * pace) == 2 * pace - 1:
            snapshots.append(trainer.snapshot())
    trainer.attached.detach()
    return snapshots, len(buckets), trainer.attached.summary().nonfinite


@pytest.mark.parametrize(
    ("size", "pace"),
    [(2, 3), pytest.param(2, 10, marks=pytest.mark.slow), pytest.param(3, 10, marks=pytest.mark.long)],
)
def test_nothing_is_lost_in_a_run_in_which_everything_happens(worlds: Worlds, size: int, pace: int) -> None:
    by_rank = worlds.run(size, everything_happens, pace)
    for number, books in enumerate(zip(*(snapshots for snapshots, _, _ in by_rank), strict=True)):
        check_balance(books, held=number == 14)
    for _, buckets, skipped in by_rank:
        assert buckets > 1, "DDP was to rebuild its buckets"
        assert skipped == 1


def flush() -> tuple[Books, Books]:
    trainer = Trainer(net := Net(), Books(net), OkTopk(density=0.01), bucket_cap_mb=25)
    for step in (1, 2, 3, 4):
        trainer.step(step)
    before = trainer.snapshot()
    trainer = trainer.resumed(OkTopk(density=0.01), bucket_cap_mb=25, dense_steps=6)
    trainer.step(6)
    trainer.attached.detach()
    return before, trainer.snapshot()


def test_a_dense_step_flushes_what_was_held_back(worlds: Worlds) -> None:
    for before, after in worlds.run(2, flush):
        assert any(bool(tensor.any()) for tensor in before.residual.values())
        assert all(not bool(tensor.any()) for tensor in after.residual.values())


def train(algorithm: Any, steps: int) -> Books:
    trainer = Trainer(net := Net(), Books(net), algorithm, bucket_cap_mb=0.01, dense_steps=2)
    for step in range(steps):
        trainer.step(step, nan=step in (1, steps // 2))
    trainer.attached.detach()
    return trainer.snapshot()


@pytest.mark.parametrize(("size", "steps"), [(2, 12), pytest.param(3, 60, marks=pytest.mark.slow)])
def test_no_algorithm_loses_anything(worlds: Worlds, size: int, steps: int) -> None:
    made = algorithms(0.02, repartition_every=8, rethreshold_every=4)
    cases = {name: (made[name], steps) for name in (*COVER, "oktopk-bounded-scaled-bf16")}
    for name, by_rank in worlds.run_all(size, train, cases).items():
        check_balance(by_rank, held=name != "dense")


class TwoParts(nn.Module):
    def __init__(self, body: torch.dtype, exit: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 96).to(body)
        self.exit = nn.Linear(96, 40).to(exit)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x.to(self.body.weight.dtype)))
        return self.exit(hidden.to(self.exit.weight.dtype)).double()


@dataclass(frozen=True)
class Narrow:
    """A run with parameters of one dtype, or of two, and a loss scaled by each of the scales in turn."""

    body: torch.dtype
    exit: torch.dtype
    exclude: tuple[str, ...] = ()
    scales: tuple[float, ...] = (1.0,)
    wire: str = "fp32"
    steps: int = 20


def train_narrow(run: Narrow) -> Books:
    rank, net, steps = dist.get_rank(), TwoParts(run.body, run.exit), run.steps
    local, model, books = copy.deepcopy(net), DDP(net), Books(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=run.scales[0], enabled=len(run.scales) > 1)
    attached = attach(model, OkTopk(density=0.05, wire=run.wire), exclude=run.exclude, scaler=scaler)
    for step in range(steps):
        scale = run.scales[step * len(run.scales) // steps]
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 40, generator=generator)
        for each in (local, model):
            each.zero_grad()
            scaler.scale(nn.functional.mse_loss(each(x), y.double())).backward()
        books.enter_(net, local, scale)
        descend_(net, 0.05 / scale)
        same_weights_(local, net)
        if scaler.is_enabled() and step + 1 < steps:
            scaler.update(run.scales[(step + 1) * len(run.scales) // steps])
    books.residual = attached.residual
    attached.detach()
    return books


SINGLE, DOUBLE, BRAIN, HALF = torch.float32, torch.float64, torch.bfloat16, torch.float16
DENSE, SCALES = ("*bias", "exit.weight"), (64.0, 16.0, 256.0)
NARROW = [
    *(Narrow(*kind) for kind in ((BRAIN, BRAIN), (HALF, HALF), (DOUBLE, DOUBLE), (BRAIN, SINGLE), (DOUBLE, HALF))),
    *(
        Narrow(*kind, DENSE)
        for kind in ((BRAIN, BRAIN), (HALF, HALF), (DOUBLE, DOUBLE), (BRAIN, SINGLE), (DOUBLE, HALF))
    ),
    *(Narrow(kind, kind, exclude, SCALES) for kind in (BRAIN, HALF) for exclude in ((), DENSE)),
    *(Narrow(*kind, wire="bf16") for kind in ((BRAIN, BRAIN), (DOUBLE, HALF))),
]


def test_rounding_to_narrow_parameters_loses_nothing(worlds: Worlds) -> None:
    """Of sparse parameters and of those that travel dense, in unscaled units."""
    for by_rank in worlds.run_all(2, train_narrow, {str(run): (run,) for run in NARROW}).values():
        check_balance(by_rank)
