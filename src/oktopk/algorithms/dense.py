"""Dense: everything, every step. The method to beat, and the oracle of the others.

2n(P-1)/P words a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from oktopk.algorithms.base import EVERYTHING, Algorithm, Reduced, State

if TYPE_CHECKING:
    from oktopk.comm.base import Comm


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm):
    """The backend's own all_reduce."""

    def reduce(self, acc: Tensor, state: State, comm: Comm) -> Reduced:
        """Return the sum of everything."""
        with comm.phase("exchange"):
            total = comm.all_reduce(acc)
        state.step += 1
        return Reduced(total, taken=EVERYTHING, selected=state.numel)
