"""A model sharded by FSDP inside a node: as native HSDP for the dense methods, and without a sum between nodes."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oktopk.bench.methods import METHODS, AllReduce, Method, PowerSgd
from oktopk.errors import SettingError


def check_sharded(methods: Iterable[str]) -> None:
    """Refuse methods that are hooks of DDP."""
    for name in methods:
        if isinstance(METHODS[name], PowerSgd):
            raise SettingError(f"{name} is a hook of DDP, and --shard is FSDP: leave it out of --methods")


def make_mesh(shard: int) -> DeviceMesh:
    """Return the mesh of all ranks, each `shard` of which are a node."""
    size = (dist.get_world_size() // shard, shard)
    return init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))


def shard_(net: nn.Module, method: Method | None, mesh: DeviceMesh) -> nn.Module:
    """Shard a net, each child with parameters a unit: over the whole mesh for a dense method, else inside a node.

    Whole parameters stay from forward to backward, because gathering them again would be timed with every method.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    native = isinstance(method, AllReduce)
    policy = (
        MixedPrecisionPolicy(reduce_dtype=method.dtype) if isinstance(method, AllReduce) else MixedPrecisionPolicy()
    )
    for module in (*(child for child in net.children() if any(True for _ in child.parameters())), net):
        fully_shard(module, mesh=mesh if native else mesh["shard"], mp_policy=policy, reshard_after_forward=False)
    return net
