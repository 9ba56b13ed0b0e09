"""`StepContext`: the settings of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oktopk.algorithms import Algorithm


@dataclass(frozen=True)
class StepContext:
    """The settings of one step, the same for all groups.

    algorithm       None: a dense step
    grad_scale      factor on this rank's gradient: clipping, and the inverse of the loss scale; a tensor on the device
                    path, where the host must not wait for it
    loss_scale      factor on the means; residuals are kept without it
    may_be_unused   parameters may have no gradient on any rank, so that the ranks have to agree on which
    filling         the number that fills every mean if any rank's gradient is not finite; None: they are left alone
    """

    step: int
    algorithm: Algorithm | None
    grad_scale: float | Tensor = 1.0
    loss_scale: float | Tensor = 1.0
    may_be_unused: bool = False
    filling: float | None = 0.0

    @property
    def phase(self) -> str:
        """The phase that the record names."""
        return "dense" if self.algorithm is None else "sparse"

    @property
    def is_scaled(self) -> bool:
        """Whether a transform changes the gradients or the means."""
        return any(isinstance(scale, Tensor) or scale != 1 for scale in (self.grad_scale, self.loss_scale))
