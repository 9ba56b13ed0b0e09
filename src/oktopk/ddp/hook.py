"""The communication hook: DDP keeps it for good, and it hands each bucket to the current attachment."""
# No `from __future__ import annotations` here: DDP checks the hook's annotation itself, which must be the class.

import weakref
from typing import Any

from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import _reducer_allreduce_and_upcast_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.ddp.mixed_precision import drop_hook_, widen_
from oktopk.errors import SettingError

_HOOK = "_oktopk_hook"


class Hook:
    """The state of the registered hook: its target, if any, is the `Attached` that takes the buckets."""

    def __init__(self, model: DistributedDataParallel | None) -> None:
        self.process_group: Any = None if model is None else model.process_group
        self.model = None if model is None else weakref.ref(model)
        self.target: Any = None

    def __reduce__(self) -> "tuple[type[Hook], tuple[None]]":
        return Hook, (None,)  # a copy of a model is attached to nothing, and DDP registers no hook for it


def hook_of(model: DistributedDataParallel | None) -> "Hook | None":
    """Return the hook of this very model; the copy of a model brings along its original's, which does not count."""
    hook: Hook | None = getattr(model, _HOOK, None)
    return hook if hook is not None and hook.model is not None and hook.model() is model else None


def _hook(state: Hook, bucket: GradBucket) -> Future[Tensor]:
    model = None if state.model is None else state.model()
    if model is not None and model.mixed_precision is not None:
        widen_(model, bucket)
    if state.target is None:
        return default_hooks.allreduce_hook(state.process_group, bucket)
    reduced: Future[Tensor] = state.target.on_bucket(bucket)
    return reduced


def check_model(model: object) -> None:
    """Refuse what cannot be attached to, and say why."""
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        if _is_sharded(model):
            raise SettingError(
                f"attach wants a DistributedDataParallel model, and {kind} is sharded by FSDP, so that no rank has the "
                "whole gradient that oktopk exchanges. If the model fits on one device, wrap it in DDP instead of FSDP"
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


def _is_sharded(model: object) -> bool:
    """Whether FSDP, of either kind, has any part of this model."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # 600 modules that nobody else needs

    sharded = (FullyShardedDataParallel, FSDPModule)
    return isinstance(model, nn.Module) and any(isinstance(module, sharded) for module in model.modules())


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


def register(model: DistributedDataParallel, target: Any) -> None:
    """Make `target.on_bucket` take this model's buckets."""
    hook = hook_of(model)
    if hook is None:
        hook = Hook(model)
        if model.mixed_precision is not None:
            drop_hook_(model)
        model.register_comm_hook(hook, _hook)
        setattr(model, _HOOK, hook)
    hook.target = target
