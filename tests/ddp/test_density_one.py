"""At density 1 everything is delivered, so that every step's gradients are plain DDP's, whatever DDP is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA
from tests.ddp.harness import (
    Net,
    Worlds,
    attach,
    grads_of,
    loss_of,
    name_of,
    num_buckets,
    relative_error,
    same_weights_,
)

pytestmark = pytest.mark.processes

RELATIVE = 1e-6  # of the largest gradient of the same tensor


@dataclass(frozen=True)
class Parity:
    """A run of two nets with the same weights and data: one under plain DDP, one attached."""

    algorithm: Any = None  # Ok-Topk
    steps: int = 50
    width: int = 32
    bucket_cap_mb: float = 25
    unused: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """What one rank saw: the largest relative difference of each step, and DDP's buckets before and after."""

    errors: list[float]
    which_are_none_differed: bool
    buckets: tuple[int, int]
    left_over: float


def uses_branch(rank: int, step: int) -> bool:
    """Which ranks use the branch: all, some, or (every fourth step) none."""
    return step % 4 != 3 and (step + rank) % 3 != 0


def compare(parity: Parity) -> Compared:
    rank = dist.get_rank()
    options = {"bucket_cap_mb": parity.bucket_cap_mb, "find_unused_parameters": parity.unused}
    theirs, ours = (DDP(Net(parity.width), **options) for _ in range(2))
    attached = attach(ours, parity.algorithm, **parity.settings)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.005, momentum=0.9)
    errors, differed, first_buckets = [], False, num_buckets(ours)
    for step in range(parity.steps):
        same_weights_(theirs, ours)
        for model in (theirs, ours):
            model.zero_grad()
            loss_of(model, rank, step, branch=not parity.unused or uses_branch(rank, step)).backward()
        expected, came = grads_of(theirs.module), grads_of(ours.module)
        differed = differed or any((expected[n] is None) != (came[n] is None) for n in expected)
        errors.append(max(relative_error(came[n], expected[n]) for n in expected if expected[n] is not None))
        optimizer.step()
    left_over = max(float(each.abs().max()) for each in attached.residual.values())
    attached.detach()
    return Compared(errors, differed, (first_buckets, num_buckets(ours)), left_over)


def is_vector(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 1


def check(parity: Parity, by_rank: list[Compared]) -> None:
    for rank, compared in enumerate(by_rank):
        worst = max(compared.errors)
        assert worst <= RELATIVE, f"rank {rank}: {worst:.3g} at step {compared.errors.index(worst)}"
        assert len(compared.errors) == parity.steps
        assert not compared.which_are_none_differed


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_step_gives_plain_ddps_gradients(worlds: Worlds, size: int) -> None:
    parity = Parity(bucket_cap_mb=0.01)
    by_rank = worlds.run(size, compare, parity)
    check(parity, by_rank)
    assert all(compared.left_over == 0 for compared in by_rank)
    before, after = by_rank[0].buckets
    assert after > before, "DDP was to rebuild its buckets in this run"


@pytest.mark.parametrize("bucket_cap_mb", [0.1, 1, 25])
def test_whatever_the_size_of_buckets(worlds: Worlds, bucket_cap_mb: float) -> None:
    parity = Parity(bucket_cap_mb=bucket_cap_mb, width=200, steps=6)
    by_rank = worlds.run(2, compare, parity)
    check(parity, by_rank)
    assert (by_rank[0].buckets[1] > 1) == (bucket_cap_mb == 0.1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_parameters_that_some_or_all_ranks_do_not_use(worlds: Worlds, size: int) -> None:
    parity = Parity(unused=True, bucket_cap_mb=0.01, steps=50 if size == 2 else 16)
    by_rank = worlds.run(size, compare, parity)
    check(parity, by_rank)
    assert all(compared.left_over == 0 for compared in by_rank)


ALGORITHMS = [
    OkTopkPaper(density=1.0),
    OkTopk(density=1.0, ranking="scaled"),
    OkTopkPaper(density=1.0, ranking="scaled"),
    TopkA(density=1.0),
    TopkDSA(density=1.0),
    GTopk(density=1.0),
    GaussianK(density=1.0),
    Dense(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_with_every_algorithm(worlds: Worlds, algorithm: Any) -> None:
    parity = Parity(algorithm, steps=8, bucket_cap_mb=0.01, unused=True)
    check(parity, worlds.run(2, compare, parity))


@pytest.mark.parametrize(
    "settings", [{"dense_steps": 4}, {"exclude": "*bias"}, {"exclude": ("body.*", is_vector)}], ids=name_of
)
def test_in_the_dense_phase_and_with_parameters_that_travel_dense(worlds: Worlds, settings: dict[str, Any]) -> None:
    parity = Parity(steps=8, bucket_cap_mb=0.01, settings=settings)
    check(parity, worlds.run(3, compare, parity))


@pytest.mark.long
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("bucket_cap_mb", [0.1, 1, 25])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_fifty_steps_of_a_net_of_several_buckets(worlds: Worlds, size: int, bucket_cap_mb: float, unused: bool) -> None:
    parity = Parity(bucket_cap_mb=bucket_cap_mb, width=320, unused=unused)
    by_rank = worlds.run(size, compare, parity)
    check(parity, by_rank)
    assert (by_rank[0].buckets[1] > 1) == (bucket_cap_mb < 25)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
@pytest.mark.parametrize("size", [1, 3])
def test_fifty_steps_with_every_algorithm(worlds: Worlds, size: int, algorithm: Any) -> None:
    parity = Parity(algorithm, bucket_cap_mb=0.1, unused=True)
    check(parity, worlds.run(size, compare, parity))
