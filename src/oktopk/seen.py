"""`Seen`: what the pass that adds the gradient meets above a floor on its way.

Selection then need not pass over the vector again. The floor is a guess, made before the sum is known: somewhat less
than the last step's threshold. Where the guess was wrong (too little was seen, or too much) selection looks at all.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oktopk.kernels import kernels_for


@dataclass
class Seen:
    """The elements of acc that reach the floor of their segment, as far as acc has been made.

    Segment s is acc[bounds[s]:bounds[s + 1]]. `numel` counts what was passed over, so that nothing is taken for the
    whole that is not; what lies beyond the last bound is not looked at.
    """

    bounds: Sequence[int]
    floors: Sequence[float]
    numel: int = 0
    _starts: list[int] = field(default_factory=list)
    _index: list[Tensor] = field(default_factory=list)
    _value: list[Tensor] = field(default_factory=list)

    def accumulate_(self, grad: Tensor, held: Tensor, acc: Tensor, start: int) -> int:
        """Write held + grad into `acc`, whose first element is number `start`; return as the kernel does."""
        first_bad = -1
        for low, high, floor in self._segments(start, start + len(acc)):
            part = slice(low - start, high - start)
            kernels = kernels_for(acc[part])
            if floor is None:
                bad = kernels.accumulate(grad[part], held[part], acc[part])
            else:
                bad, index, value = kernels.accumulate_seeing(grad[part], held[part], acc[part], floor)
                self._starts.append(low)
                self._index.append(index + low if low else index)
                self._value.append(value)
                self.numel += high - low
            if bad >= 0 > first_bad:
                first_bad = bad + low - start
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

    def _segments(self, start: int, stop: int) -> list[tuple[int, int, float | None]]:
        """Return the parts of start..stop that have one floor each, and that floor; None beyond the last bound."""
        inner = [bound for bound in self.bounds if start < bound < stop]
        edges = [start, *dict.fromkeys(inner), stop]
        return [(low, high, self._floor(low)) for low, high in itertools.pairwise(edges)]

    def _floor(self, at: int) -> float | None:
        segment = bisect_right(self.bounds, at) - 1
        return self.floors[segment] if segment < len(self.floors) else None
