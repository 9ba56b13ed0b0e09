"""Ok-Topk (Li & Hoefler, PPoPP 2022) with messages of fixed capacity: its volume does not grow with P.

A rank sends at most 4c(P-1) words on any step of any input, with c = ceil(slack k/P); the step is in `bounded.py`.
`oktopk_paper.py` has the paper's six steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from oktopk.algorithms import bounded
from oktopk.algorithms.base import OkTopkSettings, OkTopkState, Reduced, StepInput, num_wanted
from oktopk.errors import within
from oktopk.prefilter import Prefilter

if TYPE_CHECKING:
    from oktopk.comm.base import Comm


@dataclass(frozen=True, kw_only=True)
class OkTopk(OkTopkSettings):
    """Ok-Topk with messages of fixed capacity, in two collectives a step.

    density, ranking, wire, rescale_every   see `OkTopkSettings`
    slack                                   room in a message for one destination, over the k / P it needs on average

    The defaults are those that learned as fast as dense, or nearly (`docs/learning.md`).
    """

    slack: float = 1.25

    def __post_init__(self) -> None:
        super().__post_init__()
        within("slack", self.slack, 1)

    def prefilter(self, state: OkTopkState) -> Prefilter | None:
        """Return the place for candidates, noted while acc is made."""
        return None if self.density > bounded.SPARSE_ENOUGH else bounded.make_prefilter(state)

    def reduce_step(self, acc: Tensor, state: OkTopkState, comm: Comm, inputs: StepInput) -> Reduced:
        """Return about k pairs; the input statuses ride in the headers of the messages."""
        k, codec = num_wanted(state, self.density), self.codec(state.numel)
        reduced = bounded.reduce(acc, state, comm, inputs, codec, k, self.slack)
        state.ranking.commit_()
        state.step += 1
        return reduced
