"""What cannot work is refused at once, on all ranks, in words that say what to do."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import Dense, MemorySink, OkTopk, OkTopkPaper, SettingError, TopkA
from oktopk.ddp.hook import check_alone_in_backward
from tests.ddp.harness import Net, Raised, Worlds, attach, error_of, exchange_threads, same_bits, step_

pytestmark = pytest.mark.processes


def attaching(algorithm: Any = None, **settings: Any) -> None:
    attach(DDP(Net()), algorithm, **settings)


def twice() -> None:
    model = DDP(Net())
    first = attach(model)
    try:
        attach(model)
    finally:
        assert first.active
        first.detach()


def after_another_hook(trains: bool) -> None:
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    if trains:
        step_(model, 0)
    attach(model)


def with_a_group_of_one(other: bool) -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    attaching(group=alone[dist.get_rank() ^ other])


def sharded(kind: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp1":
        attach(FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu")))  # type: ignore[arg-type]
    layer = fully_shard(nn.Linear(8, 8), mesh=mesh)
    attach(layer if kind == "fsdp2" else nn.Sequential(layer))  # type: ignore[arg-type]


def with_dynamos_python_reducer() -> None:
    """DDP chooses its reducer when it is made: what is set later does not matter to it."""
    model = DDP(nn.Linear(8, 8))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        attached = attach(model)
        model(torch.ones(1, 8)).sum().backward()
        assert attached.step == 1
        attached.detach()
        attach(DDP(nn.Linear(8, 8)))


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "bare": (lambda: attach(Net()), ("DistributedDataParallel", "Net", "wrap it in DDP")),  # type: ignore[arg-type]
    "twice": (twice, ("attached", "detach()")),
    "another hook": (partial(after_another_hook, False), ("another communication hook",)),
    "another hook, trained": (partial(after_another_hook, True), ("another communication hook",)),
    "other ranks": (partial(with_a_group_of_one, False), ("group=", "ranks [0, 1]", "dist.new_group([0, 1])")),
    "not this rank": (partial(with_a_group_of_one, True), ("group=", "does not have this rank")),
    "sparse gradients": (lambda: attach(DDP(nn.Embedding(10, 4, sparse=True))), ("sparse=True",)),
    **{
        kind: (partial(sharded, kind), ("sharded by FSDP", "DDP instead of FSDP"))
        for kind in ("fsdp1", "fsdp2", "part")
    },
    "python reducer": (with_dynamos_python_reducer, ("python_reducer",)),
    "name": (partial(attaching, exclude="body.0.wieght"), ("'body.0.wieght'", "Did you mean 'body.0.weight'?")),
    "pattern": (partial(attaching, exclude="encoder.*"), ("'encoder.*'",)),
    "one of several": (partial(attaching, exclude=("*bias", "nose.*")), ("'nose.*'", "Did you mean 'norm.")),
    "on_nonfinite": (partial(attaching, on_nonfinite="ignore"), ("on_nonfinite", "'ignore'", "raise, skip")),
    "clip": (partial(attaching, clip=0.0), ("clip", "0")),
    "dense_steps": (partial(attaching, dense_steps=-1), ("dense_steps", "-1")),
    "algorithm": (partial(attaching, "oktopp"), ("'oktopp'", "Did you mean 'oktopk'?")),
    "schedule density": (partial(attaching, density_schedule=[(3, 1.5)]), ("density", "1.5")),
    "schedule steps": (partial(attaching, density_schedule=[(0, 0.5)]), ("steps", "0")),
    "schedule without density": (partial(attaching, Dense(), density_schedule=[(3, 0.5)]), ("density",)),
}


def refuse_all() -> tuple[dict[str, Raised | None], list[str]]:
    return {name: error_of(attempt) for name, (attempt, _) in REFUSED.items()}, exchange_threads()


def test_what_cannot_work_is_refused_and_leaves_no_thread(worlds: Worlds) -> None:
    for refused, threads in worlds.run(2, refuse_all):
        assert threads == []
        for name, raised in refused.items():
            assert raised is not None, name
            assert raised.kind == "SettingError", name
            assert all(words in raised.message for words in REFUSED[name][1]), raised


def odd(usual: Any, otherwise: Any) -> Any:
    return otherwise if dist.get_rank() == 1 else usual


def net_with_names_of_its_own() -> nn.Module:
    """A net whose parameters have the same shapes on all ranks, so that DDP takes it, and another name on one."""
    return nn.Sequential(OrderedDict([("first", nn.Linear(4, 4)), (odd("second", "last"), nn.Linear(4, 4))]))


def disagree() -> tuple[dict[str, Raised | None], list[str]]:
    settings: dict[str, dict[str, Any]] = {
        "density": {"algorithm": OkTopk(density=odd(0.1, 0.2))},
        "algorithm": {"algorithm": odd(OkTopk(density=0.1), TopkA(density=0.1))},
        "mode": {"algorithm": odd(OkTopk(), OkTopkPaper())},
        "dense_steps": {"dense_steps": odd(3, 4)},
        "exclude": {"exclude": odd("*bias", "*weight")},
        "exclude by a predicate": {"exclude": lambda name, _: odd(False, name == "exit.weight")},
        "clip": {"clip": odd(None, 1.0)},
        "density_schedule": {"density_schedule": odd([(2, 0.5)], [(3, 0.5)])},
        "on_nonfinite": {"on_nonfinite": odd("raise", "skip")},
        "scaler": {"scaler": odd(None, torch.amp.GradScaler("cpu"))},
    }
    attempts = {name: error_of(partial(attaching, **each)) for name, each in settings.items()}
    attempts["names"] = error_of(lambda: attach(DDP(net_with_names_of_its_own())))
    return attempts, exchange_threads()


def test_ranks_that_disagree_are_all_told(worlds: Worlds) -> None:
    for refused, threads in worlds.run(3, disagree):
        assert threads == []
        for name, raised in refused.items():
            assert raised is not None, name
            assert raised.kind == "MismatchError", name
            assert ("parameters" if name == "names" else "settings") in raised.message
            assert "[1]" in raised.message


def disagree_later(change: str) -> list[Raised | None]:
    model, rank = DDP(Net()), dist.get_rank()
    attached = attach(model, OkTopk(density=0.1))
    step_(model, 0)
    if change == "density":
        attached.density = 0.2 + 0.1 * rank
    else:
        attached.exclude("*bias" if rank else "*weight")
    raised = [error_of(partial(step_, model, step)) for step in (1, 2)]
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


def rules_from_a_generator() -> tuple[int, int]:
    """An iterable that can be read only once: the number of elements that a sparse step was asked for."""
    model, sink = DDP(Net()), MemorySink()
    attached = attach(model, OkTopk(density=0.01), exclude=(rule for rule in ("*bias", "*weight")), sinks=[sink])
    step_(model, 0)
    attached.density = 0.02
    step_(model, 1)
    attached.detach()
    return tuple(record.wanted for record in sink.records)  # type: ignore[return-value]


def test_exclusions_may_come_from_any_iterable(worlds: Worlds) -> None:
    everything = sum(parameter.numel() for parameter in Net().parameters())
    assert worlds.run(1, rules_from_a_generator) == [(everything, everything)]


def change_what_cannot_be() -> tuple[list[Raised | None], bool]:
    model = DDP(Net())
    attached = attach(model, OkTopk(density=0.05))
    step_(model, 0)
    before = attached.residual
    changes = (("density", 2.0), ("algorithm", "okotpk"))
    refused = [error_of(partial(setattr, attached, name, value)) for name, value in changes]
    refused.append(error_of(lambda: attached.exclude("nothing.*")))
    step_(model, 1)
    fine = attached.active and not same_bits(attached.residual, before) and attached.density == 0.05
    attached.algorithm = "dense"
    refused.append(error_of(partial(setattr, attached, "density", 0.5)))
    attached.detach()
    return refused, fine


def test_a_change_that_cannot_be_is_refused_and_changes_nothing(worlds: Worlds) -> None:
    for refused, fine in worlds.run(2, change_what_cannot_be):
        assert [raised and raised.kind for raised in refused] == ["SettingError"] * 4
        assert fine


def attach_to_a_copy() -> tuple[bool, bool, bool]:
    model = DDP(nn.Linear(200, 200))
    first = attach(model)
    other = copy.deepcopy(model)
    second = attach(other)
    other(torch.ones(1, 200)).sum().backward()
    seen = (first.active, second.active, second.last is not None and first.last is None)
    first.detach()
    second.detach()
    return seen


def test_a_copy_of_an_attached_model_is_attached_to_nothing_and_can_be(worlds: Worlds) -> None:
    assert worlds.run(1, attach_to_a_copy) == [(True, True, True)]


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_batch_norm_that_communicates_in_backward_is_refused_beside_nccl(backends: str) -> None:
    """As it would be on GPUs: no CPU runs a SyncBatchNorm, and the check asks for names alone."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8))
    with pytest.raises(SettingError, match=r"'1' is a SyncBatchNorm.*backend=\"gloo\""):
        check_alone_in_backward(backends, net)
    check_alone_in_backward("cpu:gloo,cuda:gloo", net)
    check_alone_in_backward(backends, nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))


def tensor_parallel() -> tuple[Raised | None, Raised | None]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    before = error_of(lambda: check_alone_in_backward("cuda:nccl", net))
    model = DDP(net, device_mesh=mesh["data"])
    return before, error_of(lambda: check_alone_in_backward("cuda:nccl", model.module))


def test_a_tensor_parallel_module_is_refused_beside_nccl(worlds: Worlds) -> None:
    for raised in worlds.run(1, tensor_parallel)[0]:
        assert raised is not None
        assert raised.kind == "SettingError"
        assert "'0' is tensor parallel" in raised.message


def test_attach_needs_a_process_group_only_through_ddp() -> None:
    with pytest.raises(SettingError, match="wrap it in DDP"):
        oktopk.attach(nn.Linear(2, 2), "oktopk")  # type: ignore[arg-type]
