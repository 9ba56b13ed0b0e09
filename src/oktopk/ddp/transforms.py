"""Gradient transforms of an attachment: the loss scale of a GradScaler, and clipping by the local norm.

They become factors of a `StepContext`, so that a step without them costs nothing. On the device path the factors are
tensors there, and the host never waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler


def loss_scale_of(scaler: Any, on_device: bool) -> float | Tensor:
    """Return the scale by which a scaler multiplied the loss: a number, or on the device path a tensor."""
    if on_device and isinstance(scaler, GradScaler):
        scale = scaler._get_scale_async()
        if scale is not None:
            return scale
    return float(scaler.get_scale())


def clip_factor(grads: Iterable[Tensor], clip: float, loss_scale: float | Tensor, on_device: bool) -> float | Tensor:
    """Return the factor that scales gradients to a norm of at most `clip`, once `loss_scale` is divided out."""
    # Not by dot(): that adds up in another order where DDP has put a gradient elsewhere, as after a restart.
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    if on_device:
        norm = torch.linalg.vector_norm(torch.stack(norms)) / loss_scale
        return torch.where(norm.isfinite() & (norm > clip), clip / norm, 1.0)
    total = math.sqrt(math.fsum(each * each for each in map(float, norms))) / loss_scale
    return clip / total if math.isfinite(total) and total > clip else 1.0
