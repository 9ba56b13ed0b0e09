"""Ok-Topk (Li & Hoefler, PPoPP 2022): sparse allreduce whose volume does not grow with P.

`mode="bounded"` (the default) sends messages of fixed capacity: at most 4c(P-1) words a rank on any step of any
input, with c = ceil(slack k/P); its step is in `bounded.py`. `mode="paper"` is the paper's six steps, in `paper.py`: at
most 6k(P-1)/P words in the median of a stationary run, and never more than `cap` * k pairs selected, here or among the
owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from oktopk.algorithms import bounded, oktopk_paper
from oktopk.algorithms.base import Algorithm, InputStatus, OkTopkState, Reduced, StepInput, num_wanted
from oktopk.codec import Codec
from oktopk.codec.values import WIRES
from oktopk.errors import one_of, within
from oktopk.partition import even_cuts
from oktopk.prefilter import Prefilter
from oktopk.selection import Ranking, num_selected

if TYPE_CHECKING:
    from oktopk.comm.base import Comm

AUTO = "auto"
"""The wire that is chosen for each vector."""


@dataclass(frozen=True, kw_only=True)
class OkTopk(Algorithm):
    """Ok-Topk.

    density             the part of the elements that a step delivers, in (0, 1]
    mode                "bounded": messages of fixed capacity, two collectives a step; "paper": the paper's six steps
    ranking             "magnitude": by |acc|; "scaled": by |acc| over a running rms of the gradient in its segment (a
                        row of a matrix), so that quiet rows wait no longer than loud ones
    wire                "fp32", "bf16" or "int8": the narrow ones round values and pack indices, to half the bytes and
                        less; "auto": int8, but fp32 where everything travels, so that density 1 equals dense, and
                        where steps stay on a GPU, which does not pack (docs/gpu.md)
    slack               bounded: room in a message for one destination, over the k / P it needs on average
    rethreshold_every   paper: steps between exact thresholds (tau')
    repartition_every   paper: steps between partitions of the index space (tau)
    rescale_every       steps between measurements of the gradient, for the scales
    cap                 paper: no step selects more than cap * k pairs; the rest waits in the residual

    The defaults are those that learned as fast as dense, or nearly (`docs/learning.md`).
    """

    density: float = 0.03
    mode: str = "bounded"
    ranking: str = "magnitude"
    wire: str = AUTO
    slack: float = 1.25
    rethreshold_every: int = 32
    repartition_every: int = 64
    rescale_every: int = 16
    cap: float = 2.0

    def __post_init__(self) -> None:
        within("density", self.density, 0, 1, open_low=True)
        one_of("mode", self.mode, ("bounded", "paper"))
        one_of("ranking", self.ranking, ("magnitude", "scaled"))
        one_of("wire", self.wire, (AUTO, *WIRES))
        within("slack", self.slack, 1)
        within("rethreshold_every", self.rethreshold_every, 1)
        within("repartition_every", self.repartition_every, 1)
        within("rescale_every", self.rescale_every, 1)
        within("cap", self.cap, 1)

    def init(self, numel: int, comm: Comm, segments: Sequence[int] = ()) -> OkTopkState:
        """Return the state before the first sparse step: even regions, no thresholds, all scales 1."""
        scaled = self.ranking == "scaled" and len(segments)
        ranking = Ranking.by_segment(numel, segments) if scaled else Ranking.by_magnitude(numel)
        return OkTopkState(numel, cuts=even_cuts(numel, comm.size), ranking=ranking)

    def codec(self, numel: int) -> Codec:
        """Return how pairs of a vector of this length travel."""
        if self.wire != AUTO:
            return Codec(numel, self.wire)
        return Codec(numel, "int8" if num_selected(numel, self.density) < numel else "fp32")

    def prefilter(self, state: OkTopkState) -> Prefilter | None:
        """Return the place for candidates, noted while acc is made (bounded)."""
        if self.mode == "paper" or self.density > bounded.SPARSE_ENOUGH:
            return None
        return bounded.make_prefilter(state)

    def measure(self, state: OkTopkState, acc: Tensor, residual: Tensor) -> Tensor | None:
        """Return the mean squares of this step's gradient by segments, if that is due."""
        if len(state.ranking.scale) == 1 or state.step % self.rescale_every:
            return None
        return state.ranking.mean_squares(acc, residual)

    def reduce(self, acc: Tensor, state: OkTopkState, comm: Comm) -> Reduced:
        """Return about k pairs: the largest of the sum of what the ranks selected."""
        return self._reduce(acc, state, comm, StepInput())

    def reduce_step(self, acc: Tensor, state: OkTopkState, comm: Comm, inputs: StepInput) -> Reduced:
        """Return the same; in bounded mode the input statuses ride in the headers of its messages."""
        if self.mode == "paper":
            InputStatus.raise_if_any(InputStatus.gather(inputs.status, acc.device, comm), acc.numel())
        return self._reduce(acc, state, comm, inputs)

    def _reduce(self, acc: Tensor, state: OkTopkState, comm: Comm, inputs: StepInput) -> Reduced:
        k, codec = num_wanted(state, self.density), self.codec(state.numel)
        if self.mode == "bounded":
            reduced = bounded.reduce(acc, state, comm, inputs, codec, k, self.slack)
        else:
            due = oktopk_paper.Due(
                repartition=state.step % self.repartition_every == 0,
                rethreshold=state.step % self.rethreshold_every == 0,
            )
            reduced = oktopk_paper.reduce(acc, state, comm, inputs, codec, k, int(self.cap * k), due)
        state.ranking.commit_()
        state.step += 1
        return reduced
