"""DDP with the rivals' own hooks.

No annotations from the future here: DDP looks at those of a hook, and wants types.
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
"""The least that its error feedback allows: the steps before are plain."""


def wrap(net: nn.Module, *, one_bucket: bool = False) -> DistributedDataParallel:
    """Return DDP around a net of which all ranks have the same weights: nothing is sent for that once more.

    PowerSGD wants all gradients in one bucket. Its hook goes on from callbacks, in threads of gloo's: those of several
    buckets would call their collectives in another order on every rank.
    """
    megabytes = 1 + sum(p.numel() * p.element_size() for p in net.parameters()) / 2**20 if one_bucket else None
    return DistributedDataParallel(net, gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=megabytes)


def hook_powersgd(model: DistributedDataParallel, rank: int) -> None:
    """Make DDP exchange its gradients by PowerSGD, from its third step on."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=START_POWERSGD_ITER)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def hook_cast(model: DistributedDataParallel, dtype: torch.dtype) -> None:
    """Make DDP exchange its gradients in a narrower type: by torch's own hook, or where that wants NCCL by its like."""
    model.register_comm_hook(None, default_hooks.fp16_compress_hook if dtype == torch.float16 else _bf16_hook)


def _bf16_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Do as torch's `bf16_compress_hook`, which DDP registers for NCCL alone: gloo sums bfloat16 as well."""
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None
    widened: Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return widened
