"""`Emulated`: the bounded exchange of all ranks at once, on one device, in a few passes over the vectors.

For sweeps on a GPU, where the library's exchange on threads takes ten times a step's computing. The rules are
`oktopk.algorithms.oktopk`'s: a sampled threshold on each rank, sums of what was sent, the largest k of them and some
in turn; only there are no regions, so that the largest are those of the whole vector, no sweeps, and no rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.kernels.reference import running, scales_of
from oktopk.selection import SAMPLE_HITS, in_turn, num_selected, turns_first_
from research.learning.mechanisms import Layout
from research.learning.settings import Setting


class Emulated:
    """The gradients of all ranks in, [ranks, elements], the gradient that trains out."""

    def __init__(self, setting: Setting, layout: Layout, workers: int, device: torch.device) -> None:
        self.setting, self.layout, self.step = setting, layout, 0
        self.held = torch.zeros(workers, layout.large, device=device)
        self.lengths = torch.tensor(layout.groups("row"), device=device)
        self.squares = torch.zeros(workers, len(self.lengths), device=device)
        self.scale: list[Tensor] = []
        self.selected_over_k = 1.0

    def sparse(self, grads: Tensor) -> Tensor:
        """Return what trains in the next sparse step."""
        large, workers = self.layout.large, len(grads)
        if self.setting.ranking == "scaled" and self.step % self.setting.rescale_every == 0:
            self._rescale_(grads[:, :large])
        self.held += grads[:, :large]
        k = num_selected(large, self.setting.density)
        total, sent = torch.zeros(large, device=grads.device), []
        for rank in range(workers):
            index = self._selected(rank, k)
            total.index_add_(0, index, self.held[rank].index_select(0, index))
            sent.append(index)
        arrived = torch.cat(sent).unique()
        score = turns_first_(self._score(total.index_select(0, arrived), arrived, 0), k, self.step)
        kept = arrived if len(arrived) <= k else arrived[score.topk(k, sorted=False).indices]
        is_kept = torch.zeros(large, dtype=torch.bool, device=grads.device)
        is_kept[kept] = True
        for rank, index in enumerate(sent):
            self.held[rank, index[is_kept[index]]] = 0
        self.selected_over_k, self.step = sum(map(len, sent)) / len(sent) / k, self.step + 1
        mean = grads.mean(0)
        mean[:large] = 0
        mean[kept] = total[kept] / workers
        return mean

    def _rescale_(self, grads: Tensor) -> None:
        for rank, grad in enumerate(grads):
            new = torch.segment_reduce(grad.square(), "mean", lengths=self.lengths)
            self.squares[rank] = running(self.squares[rank], new)
        self.scale = [scales_of(each, self.lengths).repeat_interleave(self.lengths) for each in self.squares]

    def _score(self, value: Tensor, index: Tensor | slice, rank: int) -> Tensor:
        return value.abs() / self.scale[rank][index] if self.scale else value.abs()

    def _selected(self, rank: int, k: int) -> Tensor:
        """Return what reaches the rank's threshold, at most `slack` times k."""
        score = self._score(self.held[rank], slice(None), rank)
        stride = max(k // (4 * SAMPLE_HITS), 1)
        sample = score[self.step % stride :: stride]
        threshold = sample.topk(max(round(k / stride), 1), sorted=False).values.min()
        index = (score >= threshold).nonzero().view(-1)
        return in_turn(index, int(self.setting.slack * k), self.step)
