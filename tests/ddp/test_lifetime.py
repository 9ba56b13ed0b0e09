"""The worker thread and the exchange's group live as long as the attachment, and not longer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import MemorySink, OkTopk
from tests.ddp.harness import Net, Worlds, attach, error_of, exchange_threads, step_

pytestmark = pytest.mark.processes


class ClosedSink(MemorySink):
    closed = False

    def close(self) -> None:
        self.closed = True


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def drop_both(steps: int) -> dict[str, Any]:
    """Train, then forget model and handle."""
    groups, sink = num_groups(), ClosedSink()
    model = DDP(Net(), bucket_cap_mb=0.01)
    attached = attach(model, OkTopk(density=0.1), sinks=[sink])
    for step in range(steps):
        step_(model, step)
    during = len(exchange_threads()), num_groups() - groups
    watched = weakref.ref(attached)
    del model, attached
    gc.collect()
    return {
        "during": during,
        "after": (len(exchange_threads()), num_groups() - groups),
        "gone": watched() is None,
        "closed": sink.closed,
        "records": len(sink.records),
    }


@pytest.mark.parametrize("steps", [0, 3])
def test_garbage_collection_of_model_and_handle_joins_the_worker(worlds: Worlds, steps: int) -> None:
    for seen in worlds.run(2, drop_both, steps):
        assert seen["during"] == (2, 1), "the exchange's thread and the sinks', and a group"
        assert seen["gone"]
        assert seen["after"] == (0, 0)
        assert seen["closed"]
        assert seen["records"] == steps


def drop_the_handle() -> tuple[list[bool], int]:
    """A script that does not keep what attach() returns is attached all the same."""
    model = DDP(Net(), bucket_cap_mb=0.01)
    attach(model, OkTopk(density=0.1), sinks=[MemorySink()])
    zeros = []
    for step in range(3):
        gc.collect()
        step_(model, step)
        zeros.append(bool((model.module.body[0].weight.grad == 0).any()))
    count = len(exchange_threads())
    del model
    gc.collect()
    return zeros, count - len(exchange_threads())


def test_a_handle_that_nobody_keeps_still_works(worlds: Worlds) -> None:
    for zeros, joined in worlds.run(2, drop_the_handle):
        assert all(zeros), "these gradients were to be sparse"
        assert joined == 2, "the exchange's thread and the sinks'"


def drop_the_model() -> tuple[bool, bool, int]:
    """A handle that outlives its model: not active, and its records are still there."""
    model = DDP(Net())
    attached = attach(model, OkTopk(density=0.1))
    step_(model, 0)
    before = attached.active
    del model
    gc.collect()
    after = attached.active
    attached.detach()
    return before, after, attached.summary().steps


def test_a_handle_without_its_model_is_not_active(worlds: Worlds) -> None:
    assert worlds.run(2, drop_the_model) == [(True, False, 1)] * 2


def attach_often_and_outlive_the_world() -> tuple[int, int, Any, int]:
    """Scripts call destroy_process_group() and let the rest go as it goes."""
    groups, model = num_groups(), DDP(Net())
    for step in range(5):
        attached = attach(model, OkTopk(density=0.1))
        step_(model, step)
        attached.detach()
    left = len(exchange_threads()), num_groups() - groups
    attached = attach(model, OkTopk(density=0.1))
    step_(model, 5)
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return *left, error_of(attached.detach), len(exchange_threads())


def test_attaching_often_and_detaching_after_the_world_has_ended_leave_nothing_behind(worlds: Worlds) -> None:
    assert worlds.run(2, attach_often_and_outlive_the_world) == [(0, 0, None, 0)] * 2
