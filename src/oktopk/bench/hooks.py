"""DDP with the hooks of the rival methods.

Without annotations from __future__, because DDP checks the types that a hook is annotated with.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

START_POWERSGD_ITER = 2
"""Minimum that PowerSGD's error feedback allows: the steps before are dense."""


def wrap(net: nn.Module, *, one_bucket: bool = False) -> DistributedDataParallel:
    """Return DDP around a net that has the same weights on all ranks, so that none are sent.

    PowerSGD needs one bucket. Its hook starts collectives from callbacks, which gloo runs in threads of its own:
    with several buckets each rank would start them in another order.
    """
    megabytes = 1 + sum(p.numel() * p.element_size() for p in net.parameters()) / 2**20 if one_bucket else None
    return DistributedDataParallel(net, gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=megabytes)


def hook_powersgd(model: DistributedDataParallel, rank: int) -> None:
    """Make DDP exchange its gradients by PowerSGD, from its third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=START_POWERSGD_ITER)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def hook_cast(model: DistributedDataParallel, dtype: torch.dtype) -> None:
    """Make DDP exchange its gradients in float16, by torch's hook, or in bfloat16."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook if dtype == torch.float16 else _bf16_hook)


def _bf16_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Do as torch's `bf16_compress_hook`, which DDP registers for NCCL alone although gloo sums bfloat16."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None
    widened: Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return widened
