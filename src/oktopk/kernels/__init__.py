"""The loops over every element of a gradient, chosen once by device.

`reference` says what each kernel means, in plain torch, on any device; the others must give the same bits.
"""

from typing import Protocol

import torch
from torch import Tensor

from oktopk.kernels import cpu, reference


class Kernels(Protocol):
    """What a kernel module offers."""

    NAME: str

    def accumulate(self, grad: Tensor, held: Tensor, out: Tensor, scale: float = 1.0, decay: float = 1.0) -> int:
        """Write decay * held + scale * grad into `out`; return the index of its first NaN or Inf, or -1."""

    def at_least(self, acc: Tensor, bounds: list[int], thresholds: list[float]) -> Tensor:
        """Return the sorted indices where |acc| >= the threshold of its segment, zeros never."""


def kernels_for(device: torch.device) -> Kernels:
    """Return the fastest kernels that work on `device`."""
    return cpu if device.type == "cpu" else reference
