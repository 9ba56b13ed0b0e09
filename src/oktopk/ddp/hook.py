"""The communication hook: DDP keeps it for good, and it hands each bucket to the current attachment."""
# No `from __future__ import annotations` here: DDP checks the hook's annotation itself, which must be the class.

import weakref
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import _reducer_allreduce_and_upcast_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.ddp.mixed_precision import drop_hook_, gradient_dtype, widen_
from oktopk.errors import SettingError
from oktopk.steps import ParamGroup, make_groups

SHARD_IT = 'fully_shard(module, mesh=mesh["shard"]) and attach(model, mesh=mesh["replicate"])'
HOOK = "_oktopk_hook"
"""Name of the attribute that keeps the hook on a model."""


class Hook:
    """The state of the registered hook: its target, if any, is the `Attached` that takes the buckets."""

    def __init__(self, model: DistributedDataParallel | None) -> None:
        self.process_group: Any = None if model is None else model.process_group
        self.model = None if model is None else weakref.ref(model)
        self.target: Any = None

    def __reduce__(self) -> "tuple[type[Hook], tuple[None]]":
        return Hook, (None,)  # a copy of a model is attached to nothing, and DDP registers no hook for it


def hook_of(model: nn.Module | None) -> Any:
    """Return the hook of this very model; the copy of a model brings along its original's, which does not count."""
    hook = getattr(model, HOOK, None)
    return hook if hook is not None and hook.model is not None and hook.model() is model else None


def _hook(state: Hook, bucket: GradBucket) -> Future[Tensor]:
    model = None if state.model is None else state.model()
    if model is not None and model.mixed_precision is not None:
        widen_(model, bucket)
    if state.target is None:
        return default_hooks.allreduce_hook(state.process_group, bucket)
    reduced: Future[Tensor] = state.target.on_bucket(bucket)
    return reduced


class DDPWrapper:
    """A DDP model as `attach` sees it. `place` is where this rank's gradients lie in a sharded model, here nowhere."""

    place: ClassVar[dict[str, int]] = {}

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        check_model(model)
        assert isinstance(model, DistributedDataParallel)
        self._model, self._group = model, group
        self.name = type(model.module).__name__
        self.parameters = _parameters_of(model)
        self.keeps_gradients = model.mixed_precision is None  # which are as wide as the weights
        self.may_be_unused = bool(model.find_unused_parameters or model.static_graph)
        devices = {parameter.device for parameter in self.parameters.values() if parameter.is_cuda}
        if len(devices) > 1:
            raise SettingError(f"attach wants a model whose parameters are on one GPU; these are on {len(devices)}")
        if group is not None:
            _check_ranks(group, model)
        if devices:
            check_alone_in_backward(str(dist.get_backend_config(group)), model.module)

    def make_groups(self) -> list[ParamGroup]:
        """Return groups of about a bucket's size."""
        parameters, cap_bytes = list(self.parameters.items()), int(self._model.bucket_bytes_cap)
        return make_groups(parameters, cap_bytes, gradient_dtype(self._model))

    def open_groups(self, timeout: float) -> tuple[dist.ProcessGroup, None, list[dist.ProcessGroup]]:
        """Return the group of the exchange, the comm of other shards, and the groups to destroy in the end."""
        if self._group is not None:
            return self._group, None, []
        group = _new_group(self._model, timeout)
        return group, None, [group]

    def register(self, target: Any) -> None:
        """Make `target.on_bucket` take this model's buckets."""
        hook = hook_of(self._model)
        if hook is None:
            hook = Hook(self._model)
            if self._model.mixed_precision is not None:
                drop_hook_(self._model)
            self._model.register_comm_hook(hook, _hook)
            setattr(self._model, HOOK, hook)
        hook.target = target


def check_model(model: object) -> None:
    """Refuse what cannot be attached to, and say why."""
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        if _is_sharded(model, "FullyShardedDataParallel"):
            raise SettingError(
                f"{kind} is sharded by FSDP1, which has no hook for oktopk: use DDP, or torch's newer {SHARD_IT}"
            )
        raise SettingError(f"attach wants a DistributedDataParallel model, not {kind}: wrap it in DDP first")
    if getattr(model, "_use_python_reducer", False):
        raise SettingError(
            'torch._dynamo.config.optimize_ddp was "python_reducer" when this DDP model was made: it then calls no '
            'communication hook. Set it to "ddp_optimizer", torch\'s default, or to False before you wrap the model'
        )
    hook = hook_of(model)
    if hook is not None and hook.target is not None:
        raise SettingError("oktopk is attached to this model already: detach() first")
    known = (_hook, _reducer_allreduce_and_upcast_hook)  # the latter is a part of DDP's mixed_precision
    if hook is None and any(other not in known for other, _ in getattr(model, "_comm_hooks", ())):
        raise SettingError("this model has another communication hook, and DDP takes only one: attach before it")
    if any(getattr(module, "sparse", False) is True for module in model.module.modules()):
        raise SettingError("a module makes sparse gradients (nn.Embedding(sparse=True)): DDP's hooks cannot take them")
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise SettingError("skip_all_reduce_unused_params keeps gradients from the hook: use find_unused_parameters")


def is_fsdp2(model: object) -> bool:
    """Whether `fully_shard` has any part of this model."""
    return not isinstance(model, DistributedDataParallel) and _is_sharded(model, "FSDPModule")


def _is_sharded(model: object, kind: str) -> bool:
    from torch.distributed import fsdp  # 600 modules that nobody else needs

    return isinstance(model, nn.Module) and any(isinstance(each, getattr(fsdp, kind)) for each in model.modules())


def check_alone_in_backward(backends: str, module: nn.Module) -> None:
    """Refuse a module on a GPU that communicates inside backward(), if the exchange does so through NCCL.

    Through NCCL all ranks have to make the calls of two groups in one order, and two threads make them in any.
    """
    if "cuda:nccl" not in backends.split(","):  # torch writes "cpu:gloo,cuda:nccl"
        return
    for name, each in module.named_modules():
        if isinstance(each, nn.SyncBatchNorm):
            what, instead = f"{name!r} is a SyncBatchNorm", "use BatchNorm"
        elif any(_is_tensor_parallel(parameter) for parameter in each.parameters(recurse=False)):
            what, instead = f"{name!r} is tensor parallel (DTensor)", "train it without oktopk"
        else:
            continue
        raise SettingError(
            f"{what} and communicates inside backward(), beside the exchange: through NCCL the two may deadlock. "
            f'Either {instead}, or let the exchange use gloo: group=dist.new_group(ranks, backend="gloo")'
        )


def _is_tensor_parallel(parameter: Tensor) -> bool:
    """Whether it is a DTensor, or was one before DDP(device_mesh=...) put its local part in its place."""
    return hasattr(parameter, "_st_info") or type(parameter).__name__ == "DTensor"


def _parameters_of(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters in DDP's buckets, by name: those that required gradients when DDP was made."""
    buckets = model.reducer._get_zeros_like_grad_buckets()
    reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return {name: parameter for name, parameter in model.module.named_parameters() if id(parameter) in reduced}


def _check_ranks(group: dist.ProcessGroup, model: DistributedDataParallel) -> None:
    """Refuse a group of other ranks than the model's: the mean over those would be another mean, and nobody told."""
    wanted = sorted(dist.get_process_group_ranks(model.process_group))
    # On ranks that are not in it, new_group returns a mere number.
    came = sorted(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else None
    if came != wanted:
        has = "does not have this rank" if came is None else f"has ranks {came}"
        raise SettingError(
            f"group= wants a process group of ranks {wanted}, on which the model trains; this one {has}. Make it with "
            f"dist.new_group({wanted}) on every rank of the world"
        )


def _new_group(model: DistributedDataParallel, timeout: float) -> dist.ProcessGroup:
    """Return a group of the same ranks for the exchange alone, so that it cannot mix with DDP's own collectives."""
    ranks = dist.get_process_group_ranks(model.process_group)
    if len(ranks) < dist.get_world_size():
        # new_group wants all ranks of the world, who do not come here. Its use_local_synchronization names the group
        # by how many groups a rank has, which need not be the same on all.
        raise SettingError(
            f"the model trains on ranks {ranks} of {dist.get_world_size()}: make a second group for the exchange, "
            f"with dist.new_group({ranks}) on every rank of the world, and give it as group="
        )
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group
