"""DDP's own `mixed_precision=`: parameters are narrow while a step runs, and a communication hook of DDP's widens them.

A reducer takes one hook, for good, and DDP's waits for each bucket's sum, where ours end a step together. So an
attached model gets a new reducer, as DDP makes one for a copy of itself, and `widen_` does what DDP's hook did beside
the sum.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.variable import Variable
from torch.distributed.utils import _free_storage
from torch.nn.parallel import DistributedDataParallel


def gradient_dtype(model: DistributedDataParallel) -> torch.dtype | None:
    """Return the dtype in which DDP sums gradients under `mixed_precision=`; None if that is the parameters' own."""
    precision = model.mixed_precision
    return None if precision is None else precision.reduce_dtype or precision.param_dtype


def drop_hook_(model: DistributedDataParallel) -> None:
    """Give the model a reducer without DDP's hook."""
    for parameter in _managed(model.module):
        parameter.data = parameter._fp_param  # a forward without backward leaves it narrow
    parameters, sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
    names = model._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)  # type: ignore[no-untyped-call]
    reducer, precision = cast(Any, model.reducer), cast(Any, model.mixed_precision)
    reducer._set_mixed_precision_param_dtype(precision.param_dtype)
    model._comm_hooks.clear()
    if model.static_graph:  # which this reducer is to learn anew
        model.static_graph = False
        model._set_static_graph()  # type: ignore[no-untyped-call]


def widen_(model: DistributedDataParallel, bucket: GradBucket) -> None:
    """Make the bucket's gradients those that DDP is to sum, and its parameters those that the optimizer is to see."""
    parameters: list[Any] = bucket.parameters()
    bucket.set_buffer(_gradients_of(parameters, gradient_dtype(model)))
    for parameter in parameters:
        parameter.data = parameter._fp_param
        _free_storage(parameter._mp_param)  # the next forward makes it again
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.to(parameter.dtype)
    if bucket.index() == 0:
        Variable._execution_engine.queue_callback(partial(_end, model.module))


def _gradients_of(parameters: list[Any], dtype: torch.dtype | None) -> Tensor:
    """Return the gradients as they lie in a bucket."""
    # Not from the bucket: in the first step torch (2.13) fills another tensor in its place, and from the third step on
    # as well where gradients are views of buckets.
    numels = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(numels), dtype=dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(flat, numels), strict=True):
        if parameter.grad is not None:
            part.as_strided(parameter.shape, parameter.stride()).copy_(parameter.grad)
    return flat


def _end(module: nn.Module) -> None:
    """Undo what DDP's forward did: it hooks each parameter that it made narrow, and does so again next time."""
    for parameter in _managed(module):
        if hasattr(parameter, "_ddp_mp_hook_state"):
            parameter._ddp_mp_hook_state[1].remove()
            del parameter._ddp_mp_hook_state
        if not parameter.requires_grad:  # those are in no bucket
            parameter.data = parameter._fp_param


def _managed(module: nn.Module) -> list[Any]:
    """Return the parameters that DDP was not told to ignore."""
    return [each for each in module.parameters() if not getattr(each, "_ddp_ignored", False)]
