"""`WaitSample`: the steps that the mass of some elements has waited in the residual."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 256
"""Elements of a sample, because two gathers of 256 elements take microseconds."""


class WaitSample:
    """A fixed sample of a vector's elements, evenly spread, with the steps that each has waited.

    An element waits in a step that neither sends it nor leaves it zero.
    """

    def __init__(self, numel: int) -> None:
        size = min(numel, SAMPLE)
        self._index = torch.arange(size) * numel // max(size, 1)
        self.steps = torch.zeros(size, dtype=torch.int64)

    def look(self, acc: Tensor) -> Tensor | None:
        """Return the sampled elements before they are sent; None on a GPU, for which the host must not wait."""
        return acc[self._index] if acc.device.type == "cpu" and len(self._index) else None

    def update_(self, before: Tensor | None, acc: Tensor) -> int | None:
        """Count a step that left `acc` of the elements `before`; return the longest wait."""
        if before is None:
            return None
        after = acc[self._index]
        self.steps = torch.where((after == before) & (after != 0), self.steps + 1, 0)
        return int(self.steps.max())
