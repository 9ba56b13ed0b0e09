"""Error feedback: what was not delivered is kept and added to the next gradient, so that nothing is ever lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.kernels import kernels_for
from oktopk.sparse import Sparse


class Residual:
    """One rank's undelivered gradient, in two buffers: what is held, and the step being made of it.

    A step is `accumulate_`, `retain_`, `commit_`. Until `commit_` the held residual is untouched, bit for bit, so that
    a step that fails anywhere is undone by not committing it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.held = torch.zeros(numel, dtype=dtype, device=device)
        self.nonfinite_at = -1
        self._acc = torch.empty_like(self.held)

    def accumulate_(self, grad: Tensor) -> Tensor:
        """Return acc = grad + held, and set `nonfinite_at` to the index of its first NaN or Inf (-1: none)."""
        self.nonfinite_at = kernels_for(grad.device).accumulate(grad, self.held, self._acc)
        return self._acc

    def retain_(self, taken: Tensor | slice, returned: Sequence[Sparse | Tensor] = ()) -> None:
        """Make acc what remains of it: `taken` is zeroed, then what was `returned` is added."""
        self._acc[taken] = 0
        for part in returned:
            if isinstance(part, Sparse):
                self._acc[part.index] += part.value
            else:
                self._acc += part

    def commit_(self) -> None:
        """Make what `retain_` left the residual that is held."""
        self.held, self._acc = self._acc, self.held
