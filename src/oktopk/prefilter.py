"""`Prefilter`: what the pass that adds the gradient meets above a floor on its way.

Selection then need not pass over the vector again. The floor is a guess, made before the sum is known: somewhat less
than the last step's threshold. Where the guess was wrong (too little was seen, or too much) selection looks at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.kernels import kernels_for


@dataclass
class Prefilter:
    """The elements of acc that reach the floor of their segment, as far as acc has been made.

    Segment s is acc[bounds[s]:bounds[s + 1]]. `numel` counts what was passed over, so that nothing is taken for the
    whole that is not; what lies beyond the last bound is not looked at.
    """

    bounds: Sequence[int] | NDArray[np.int64]
    floors: Sequence[float] | NDArray[np.float64]
    numel: int = 0
    _starts: list[int] = field(default_factory=list)
    _index: list[Tensor] = field(default_factory=list)
    _value: list[Tensor] = field(default_factory=list)

    def accumulate_(self, grad: Tensor, held: Tensor, acc: Tensor, start: int) -> int:
        """Write held + grad into `acc`, whose first element is number `start`; return as the kernel does."""
        edges, floors = self._segments(start, start + len(acc))
        end = int(edges[-1]) if len(floors) else 0
        first_bad = -1
        if len(floors):
            looked = slice(0, end)
            kernels = kernels_for(acc[looked])
            first_bad, index, value = kernels.accumulate_above(grad[looked], held[looked], acc[looked], edges, floors)
            self._starts.append(start)
            self._index.append(index + start if start else index)
            self._value.append(value)
            self.numel += end
        if end < len(acc):
            rest = slice(end, None)
            bad = kernels_for(acc[rest]).accumulate(grad[rest], held[rest], acc[rest])
            if bad >= 0 > first_bad:
                first_bad = bad + end
        return first_bad

    def all_of(self, numel: int) -> tuple[Tensor, Tensor] | None:
        """Return sorted indices and values of what was seen of a vector of `numel`; None if not all was looked at."""
        if self.numel != numel or not self._index or self._starts != sorted(self._starts):
            return None
        return (
            (self._index[0], self._value[0])
            if len(self._index) == 1
            else (torch.cat(self._index), torch.cat(self._value))
        )

    def _segments(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the edges of the segments in start..stop, counted from there, and the floor of each."""
        bounds = np.asarray(self.bounds, np.int64)
        stop = min(stop, int(bounds[-1]))
        if start >= stop:
            return np.zeros(1, np.int64), np.zeros(0)
        first, last = np.searchsorted(bounds, start, "right") - 1, np.searchsorted(bounds, stop, "left")
        edges = np.clip(bounds[first : last + 1], start, stop) - start
        return edges, np.asarray(self.floors)[first:last]
