"""What cannot work is refused at once, on all ranks, in words that say what to do."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import Dense, MemorySink, OkTopk, TopkA
from tests.ddp.harness import (
    Net,
    Raised,
    Worlds,
    attach,
    error_of,
    grads_of,
    loss_of,
    relative_error,
    same_bits,
    same_weights_,
)

pytestmark = pytest.mark.processes


def workers() -> int:
    """Return how many exchange threads there are."""
    return sum(thread.name.startswith("oktopk") for thread in threading.enumerate())


def bare() -> Any:
    return attach(Net())  # type: ignore[arg-type]


def twice() -> Any:
    model = DDP(Net())
    first = attach(model)
    try:
        attach(model)
    finally:
        assert first.active
        first.detach()


def after_another_hook() -> Any:
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    attach(model)


def after_training_with_another_hook() -> Any:
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    loss_of(model, dist.get_rank(), 0).backward()
    attach(model)


def a_group_of_other_ranks() -> Any:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    attach(DDP(Net()), group=alone[dist.get_rank()])


def a_group_without_this_rank() -> Any:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    attach(DDP(Net()), group=alone[1 - dist.get_rank()])


def attaching(**settings: Any) -> Callable[[], Any]:
    return lambda: attach(DDP(Net()), settings.pop("algorithm", None), **settings)


REFUSED: dict[str, tuple[str, ...]] = {
    "bare": ("DistributedDataParallel", "Net"),
    "twice": ("attached", "detach()"),
    "after_another_hook": ("another communication hook",),
    "after_training_with_another_hook": ("another communication hook",),
    "a_group_of_other_ranks": ("group=", "ranks [0, 1]", "dist.new_group([0, 1])"),
    "a_group_without_this_rank": ("group=", "does not have this rank"),
    "no such parameter": ("'body.0.wieght'", "Did you mean 'body.0.weight'?"),
    "no such pattern": ("'encoder.*'",),
    "one of several patterns": ("'nose.*'", "Did you mean 'norm."),
    "on_nonfinite": ("on_nonfinite", "'ignore'", "raise, skip"),
    "clip": ("clip", "0"),
    "dense_steps": ("dense_steps", "-1"),
    "algorithm": ("'oktopp'", "Did you mean 'oktopk'?"),
    "schedule density": ("density", "1.5"),
    "schedule steps": ("steps", "0"),
    "schedule without density": ("density",),
}
MAKERS: dict[str, dict[str, Any]] = {
    "no such parameter": {"exclude": "body.0.wieght"},
    "no such pattern": {"exclude": "encoder.*"},
    "one of several patterns": {"exclude": ("*bias", "nose.*")},
    "on_nonfinite": {"on_nonfinite": "ignore"},
    "clip": {"clip": 0.0},
    "dense_steps": {"dense_steps": -1},
    "algorithm": {"algorithm": "oktopp"},
    "schedule density": {"density_schedule": [(3, 1.5)]},
    "schedule steps": {"density_schedule": [(0, 0.5)]},
    "schedule without density": {"algorithm": Dense(), "density_schedule": [(3, 0.5)]},
}


def refuse_all() -> tuple[dict[str, Raised | None], int]:
    """Return how each attempt was refused, and how many exchange threads that left behind."""
    attempts = {name: globals()[name] for name in REFUSED if name in globals()}
    attempts |= {name: attaching(**settings) for name, settings in MAKERS.items()}
    return {name: error_of(attempt) for name, attempt in attempts.items()}, workers()


@pytest.fixture(scope="module")
def refusals(worlds: Worlds) -> list[tuple[dict[str, Raised | None], int]]:
    return worlds.run(2, refuse_all)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused(refusals: list[tuple[dict[str, Raised | None], int]], name: str) -> None:
    for refused, _ in refusals:
        raised = refused[name]
        assert raised is not None
        assert raised.kind == "SettingError"
        for words in REFUSED[name]:
            assert words in raised.message


def test_what_was_refused_leaves_no_thread(refusals: list[tuple[dict[str, Raised | None], int]]) -> None:
    assert [left for _, left in refusals] == [0, 0]


def odd(usual: Any, otherwise: Any) -> Any:
    return otherwise if dist.get_rank() == 1 else usual


def net_with_names_of_its_own() -> nn.Module:
    """A net whose parameters have the same shapes on all ranks, so that DDP takes it, and another name on one."""
    return nn.Sequential(OrderedDict([("first", nn.Linear(4, 4)), (odd("second", "last"), nn.Linear(4, 4))]))


def rank_dependent_rule(name: str, parameter: torch.Tensor) -> bool:
    return dist.get_rank() == 1 and name == "exit.weight"


def disagree_all() -> tuple[dict[str, Raised | None], int]:
    settings: dict[str, dict[str, Any]] = {
        "density": {"algorithm": OkTopk(density=odd(0.1, 0.2))},
        "algorithm": {"algorithm": odd(OkTopk(density=0.1), TopkA(density=0.1))},
        "dense_steps": {"dense_steps": odd(3, 4)},
        "exclude": {"exclude": odd("*bias", "*weight")},
        "exclude by a predicate": {"exclude": rank_dependent_rule},
        "clip": {"clip": odd(None, 1.0)},
        "density_schedule": {"density_schedule": odd([(2, 0.5)], [(3, 0.5)])},
        "on_nonfinite": {"on_nonfinite": odd("raise", "skip")},
        "scaler": {"scaler": odd(None, torch.amp.GradScaler("cpu"))},
    }
    attempts = {name: error_of(attaching(**each)) for name, each in settings.items()}
    attempts["names"] = error_of(lambda: attach(DDP(net_with_names_of_its_own())))
    return attempts, workers()


@pytest.fixture(scope="module")
def disagreements(worlds: Worlds) -> list[tuple[dict[str, Raised | None], int]]:
    return worlds.run(3, disagree_all)


@pytest.mark.parametrize(
    "name",
    [
        "density",
        "algorithm",
        "dense_steps",
        "exclude",
        "exclude by a predicate",
        "clip",
        "density_schedule",
        "on_nonfinite",
        "scaler",
        "names",
    ],
)
def test_ranks_that_disagree_are_all_told(disagreements: list[tuple[dict[str, Raised | None], int]], name: str) -> None:
    for refused, _ in disagreements:
        raised = refused[name]
        assert raised is not None
        assert raised.kind == "MismatchError"
        assert "parameters" in raised.message if name == "names" else "settings" in raised.message
        assert "[1]" in raised.message


def test_ranks_that_disagreed_leave_no_thread(disagreements: list[tuple[dict[str, Raised | None], int]]) -> None:
    assert [left for _, left in disagreements] == [0, 0, 0]


def disagree_later(change: str) -> list[Raised | None]:
    model, rank = DDP(Net()), dist.get_rank()
    attached = attach(model, OkTopk(density=0.1))
    loss_of(model, rank, 0).backward()
    if change == "density":
        attached.density = 0.2 + 0.1 * rank
    else:
        attached.exclude("*bias" if rank else "*weight")
    raised = [error_of(loss_of(model, rank, step).backward) for step in (1, 2)]
    assert not attached.active
    attached.detach()
    return raised


@pytest.mark.parametrize("change", ["density", "exclude"])
def test_changes_that_differ_between_ranks_are_told_in_the_next_backward(worlds: Worlds, change: str) -> None:
    for first, second in worlds.run(2, disagree_later, change):
        assert first is not None
        assert "MismatchError" in first.message
        assert "settings" in first.message
        assert second is not None
        assert "disagree" in second.message


def detach_and_attach_again() -> dict[str, Any]:
    """Plain steps after detach(), then attached ones again."""
    rank = dist.get_rank()
    theirs, ours = DDP(Net(), bucket_cap_mb=0.01), DDP(Net(), bucket_cap_mb=0.01)
    seen: dict[str, Any] = {"errors": [], "active": []}
    attached = attach(ours, OkTopk(density=0.05))
    for step in range(9):
        if step == 3:
            attached.detach()
            attached.detach()  # once is enough, twice does no harm
            before = attached.residual
        if step == 6:
            seen["kept"] = same_bits(attached.residual, before)
            again = attach(ours, OkTopk(density=1.0))
            seen["active"].append((attached.active, again.active))
        same_weights_(theirs, ours)
        for model in (theirs, ours):
            model.zero_grad()
            loss_of(model, rank, step).backward()
        expected, came = grads_of(theirs.module), grads_of(ours.module)
        seen["errors"].append(max(relative_error(came[name], expected[name]) for name in expected))
        seen["active"].append(attached.active)
    again.detach()
    return seen | {"steps": (attached.step, again.step), "workers": workers()}


def test_after_detach_gradients_are_plain_ddps_and_one_can_attach_again(worlds: Worlds) -> None:
    for seen in worlds.run(2, detach_and_attach_again):
        assert min(seen["errors"][:3]) > 1e-3, "there was to be something sparse"
        assert max(seen["errors"][3:]) <= 1e-6
        assert seen["active"] == [True] * 3 + [False] * 3 + [(False, True)] + [False] * 3
        assert seen["kept"]
        assert seen["steps"] == (3, 3)
        assert seen["workers"] == 0


def hand_over() -> bool:
    """What one attachment held back goes on with the next one."""
    model, rank = DDP(Net()), dist.get_rank()
    first = attach(model, OkTopk(density=0.05))
    for step in range(3):
        loss_of(model, rank, step).backward()
    first.detach()
    second = attach(model, OkTopk(density=0.05))
    second.load_state_dict(first.state_dict())
    same = same_bits(second.residual, first.residual) and second.step == 3
    second.detach()
    return same


def test_a_state_can_be_handed_over_after_detach(worlds: Worlds) -> None:
    assert worlds.run(2, hand_over) == [True, True]


def rules_from_a_generator() -> tuple[int, int]:
    """An iterable that can be read only once: the number of elements that a sparse step was asked for."""
    model, sink = DDP(Net()), MemorySink()
    attached = attach(model, OkTopk(density=0.01), exclude=(rule for rule in ("*bias", "*weight")), sinks=[sink])
    loss_of(model, dist.get_rank(), 0).backward()
    attached.density = 0.02
    loss_of(model, dist.get_rank(), 1).backward()
    attached.detach()
    return tuple(record.wanted for record in sink.records)  # type: ignore[return-value]


def test_exclusions_may_come_from_any_iterable(worlds: Worlds) -> None:
    everything = sum(parameter.numel() for parameter in Net().parameters())
    assert worlds.run(1, rules_from_a_generator) == [(everything, everything)]


def change_what_cannot_be() -> tuple[list[Raised | None], bool]:
    model = DDP(Net())
    attached = attach(model, OkTopk(density=0.05))
    loss_of(model, dist.get_rank(), 0).backward()
    before = attached.residual

    def set_density() -> None:
        attached.density = 2.0

    def set_algorithm() -> None:
        attached.algorithm = "okotpk"

    def density_of_dense() -> None:
        attached.density = 0.5

    refused = [error_of(attempt) for attempt in (set_density, set_algorithm, lambda: attached.exclude("nothing.*"))]
    loss_of(model, dist.get_rank(), 1).backward()
    fine = attached.active and not same_bits(attached.residual, before) and attached.density == 0.05
    attached.algorithm = "dense"
    refused.append(error_of(density_of_dense))
    attached.detach()
    return refused, fine


def test_a_change_that_cannot_be_is_refused_and_changes_nothing(worlds: Worlds) -> None:
    for refused, fine in worlds.run(2, change_what_cannot_be):
        assert [raised and raised.kind for raised in refused] == ["SettingError"] * 4
        assert fine


def test_attach_needs_a_process_group_only_through_ddp() -> None:
    with pytest.raises(oktopk.SettingError, match="wrap it in DDP"):
        oktopk.attach(nn.Linear(2, 2), "oktopk")  # type: ignore[arg-type]
