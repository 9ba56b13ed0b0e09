"""Error feedback: the undelivered part of a gradient is added to the next one, so that nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oktopk.kernels import kernels_for
from oktopk.prefilter import Prefilter
from oktopk.sparse import Sparse

EVERYTHING = slice(None)


class Residual:
    """One rank's undelivered gradient, in two buffers: the current residual, and the step being made of it.

    A step is `accumulate_`, `retain_`, `commit_`. Until `commit_` the held residual is untouched, bit for bit, so that
    a step that fails anywhere is undone by not committing it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.held = _zeros(numel, dtype, device)
        self.nonfinite_at = -1
        self._acc = _zeros(numel, dtype, device)

    @staticmethod
    def of(held: Tensor, device: torch.device) -> Residual:
        """Return one that holds a copy of this, on a device."""
        residual = Residual(held.numel(), held.dtype, device)
        residual.held.copy_(held)
        return residual

    @property
    def acc(self) -> Tensor:
        """The step being made: what `accumulate_` wrote, then what `retain_` left of it."""
        return self._acc

    def accumulate_(
        self,
        grad: Tensor,
        at: slice = EVERYTHING,
        scale: float = 1.0,
        decay: float = 1.0,
        prefilter: Prefilter | None = None,
    ) -> Tensor:
        """Return acc = decay * held + scale * grad (or the part of it `at` a slice).

        Sets `nonfinite_at` to the index in acc of its first NaN or Inf (-1: none). `prefilter` notes large elements.
        """
        acc, start = self._acc[at], at.start or 0
        if prefilter is not None and scale == 1 and decay == 1:
            bad = prefilter.accumulate_(grad, self.held[at], acc, start)
        else:
            bad = kernels_for(acc).accumulate(grad, self.held[at], acc, scale, decay)
        self.nonfinite_at = bad + start if bad >= 0 else -1
        return acc

    def retain_(
        self,
        taken: Tensor | slice,
        leftover: Sequence[Sparse | Tensor] = (),
        at: slice = EVERYTHING,
        rounding_error: Tensor | None = None,
    ) -> None:
        """Make acc (or the part of it `at` a slice) the remainder of the step.

        Where it was `taken`, acc becomes the `rounding_error`, or zero. The `leftover` is added.
        """
        acc = self._acc[at]
        if isinstance(taken, slice) or taken.dtype == torch.bool:
            acc[taken] = 0 if rounding_error is None else rounding_error
        elif rounding_error is None:
            acc.index_fill_(0, taken, 0)  # a third of the time of acc[taken] = 0
        else:
            acc.index_copy_(0, taken, rounding_error)
        for part in leftover:
            if isinstance(part, Sparse):
                acc.index_add_(0, part.index, part.value)
            else:
                acc += part

    def commit_(self) -> None:
        """Make the step's remainder the current residual."""
        self.held, self._acc = self._acc, self.held


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU as numpy makes them, in huge pages where the system has them: a pass is a third faster."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(numel, np.float64 if dtype == torch.float64 else np.float32))
