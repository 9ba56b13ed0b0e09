"""Error feedback: the undelivered part of a gradient is added to the next one, so that nothing is lost.

The pass that adds the gradient notes the elements above a floor in a `Prefilter`, so that selection need not pass over
the vector again. The floor is a guess, made before the sum is known: somewhat less than the last step's threshold. If
it was wrong (too few elements were noted, or too many), selection looks at all.
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
from oktopk.sparse import Sparse

ALL = slice(None)

FEW = 16
"""Elements for each that may be noted, because a pass over the vector costs less than listing more of them."""


class Residual:
    """One rank's undelivered gradient, in two buffers: `held`, the current residual, and `acc`, the step made of it.

    A step is `accumulate_`, `retain_`, `commit_`. Until `commit_` the held residual is untouched, bit for bit, so that
    a step that fails anywhere is undone by not committing it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.held = _zeros(numel, dtype, device)
        self.acc = _zeros(numel, dtype, device)
        self.nonfinite_at = -1

    def accumulate_(
        self, grad: Tensor, at: slice = ALL, scale: float = 1.0, decay: float = 1.0, prefilter: Prefilter | None = None
    ) -> Tensor:
        """Return acc = decay * held + scale * grad (or the part of it `at` a slice).

        Sets `nonfinite_at` to the index in acc of its first NaN or Inf (-1: none). `prefilter` notes large elements.
        """
        acc, start = self.acc[at], at.start or 0
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
        at: slice = ALL,
        rounding_error: Tensor | None = None,
    ) -> None:
        """Make acc (or the part of it `at` a slice) the remainder of the step.

        Where it was `taken`, acc becomes the `rounding_error`, or zero. The `leftover` is added.
        """
        acc = self.acc[at]
        kernels = kernels_for(acc)
        if isinstance(taken, slice) or taken.dtype == torch.bool:
            acc[taken] = 0 if rounding_error is None else rounding_error
        else:
            kernels.put_(acc, taken, acc.new_zeros(len(taken)) if rounding_error is None else rounding_error)
        for part in leftover:
            if isinstance(part, Sparse):
                kernels.add_(acc, part.index, part.value)
            else:
                acc += part

    def commit_(self) -> None:
        """Make the step's remainder the current residual."""
        self.held, self.acc = self.acc, self.held


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU as numpy makes them, in huge pages where the system has them: a pass is a third faster."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(numel, np.float64 if dtype == torch.float64 else np.float32))


@dataclass
class Prefilter:
    """The elements of acc that reach the floor of their segment, as far as acc has been made, if they are few.

    Segment s is acc[bounds[s]:bounds[s + 1]]. `numel` counts the elements passed over, so that a part is never taken
    for the whole. Elements beyond the last bound are not looked at.
    """

    bounds: Sequence[int] | NDArray[np.int64]
    floors: Sequence[float] | NDArray[np.float64]
    numel: int = 0
    _noted: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # start of the part, indices, values
    _has_too_many: bool = False

    def accumulate_(self, grad: Tensor, held: Tensor, acc: Tensor, start: int) -> int:
        """Write held + grad into `acc`, whose first element is number `start`; return as the kernel does."""
        edges, floors = self._segments(start, start + len(acc))
        end, first_bad = int(edges[-1]), -1
        if self._has_too_many:
            end = 0
        elif len(floors):
            looked, kernels = slice(0, end), kernels_for(acc[:end])
            first_bad, noted = kernels.accumulate_above(
                grad[looked], held[looked], acc[looked], edges, floors, self._most()
            )
            self._has_too_many = noted is None
            if noted is not None:
                index, value = noted
                self._noted.append((start, index + start if start else index, value))
                self.numel += end
        if end < len(acc):
            rest = slice(end, None)
            bad = kernels_for(acc[rest]).accumulate(grad[rest], held[rest], acc[rest])
            if bad >= 0 > first_bad:
                first_bad = bad + end
        return first_bad

    def all_of(self, numel: int) -> tuple[Tensor, Tensor] | None:
        """Return sorted indices and values of the elements noted of a vector of `numel`.

        None if a part is missing, or if they were too many.
        """
        starts = [start for start, _, _ in self._noted]
        if self.numel != numel or not starts or starts != sorted(starts):
            return None
        _, index, value = zip(*self._noted, strict=True)
        return (index[0], value[0]) if len(starts) == 1 else (torch.cat(index), torch.cat(value))

    def _most(self) -> int:
        return int(self.bounds[-1]) // FEW - sum(len(index) for _, index, _ in self._noted)

    def _segments(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the edges of the segments in start..stop, counted from there, and the floor of each."""
        bounds = np.asarray(self.bounds, np.int64)
        stop = min(stop, int(bounds[-1]))
        if start >= stop:
            return np.zeros(1, np.int64), np.zeros(0)
        first, last = np.searchsorted(bounds, start, "right") - 1, np.searchsorted(bounds, stop, "left")
        edges = np.clip(bounds[first : last + 1], start, stop) - start
        return edges, np.asarray(self.floors)[first:last]
