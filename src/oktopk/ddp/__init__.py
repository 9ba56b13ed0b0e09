"""Ok-Topk inside DistributedDataParallel."""

from oktopk.ddp.attach import Attached, attach, small_or_vector

__all__ = ["Attached", "attach", "small_or_vector"]
