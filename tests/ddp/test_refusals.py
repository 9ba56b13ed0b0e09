"""Models that DDP would train, and whose gradients a hook cannot have: refused at once."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import SettingError
from oktopk.ddp.hook import check_alone_in_backward
from tests.ddp.harness import Raised, Worlds, attach, error_of


def sparse_gradients() -> Raised | None:
    return error_of(lambda: attach(DDP(nn.Embedding(10, 4, sparse=True))))


def test_a_module_with_sparse_gradients(worlds: Worlds) -> None:
    (raised,) = worlds.run(1, sparse_gradients)
    assert raised.kind == "SettingError"
    assert "sparse=True" in raised.message


def sharded() -> list[Raised | None]:
    """FSDP of both kinds, and a model of which only a layer is sharded."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = fully_shard(nn.Linear(8, 8), mesh=mesh)
    part = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=mesh))
    first = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    return [error_of(lambda model=model: attach(model)) for model in (first, whole, part)]


def test_a_model_that_fsdp_shards_is_not_told_to_wrap_it_in_ddp_first(worlds: Worlds) -> None:
    for raised in worlds.run(2, sharded)[0]:
        assert raised is not None
        assert raised.kind == "SettingError"
        assert "sharded by FSDP" in raised.message
        assert "DDP instead of FSDP" in raised.message


def with_dynamos_python_reducer() -> tuple[Raised | None, Raised | None]:
    """DDP chooses its reducer when it is made: what is set later does not matter to it."""
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        before = error_of(lambda: attach(DDP(nn.Linear(8, 8))))
    model = DDP(nn.Linear(8, 8))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        attached = attach(model)
        after = error_of(model(torch.ones(1, 8)).sum().backward)
    assert attached.step == 1
    attached.detach()
    return before, after


def test_dynamos_python_reducer_is_refused_by_name(worlds: Worlds) -> None:
    ((before, after),) = worlds.run(1, with_dynamos_python_reducer)
    assert before is not None
    assert before.kind == "SettingError"
    assert "python_reducer" in before.message
    assert after is None


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
    ((before, after),) = worlds.run(1, tensor_parallel)
    for raised in (before, after):
        assert raised is not None
        assert raised.kind == "SettingError"
        assert "'0' is tensor parallel" in raised.message
