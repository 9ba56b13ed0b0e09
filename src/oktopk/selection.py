"""Selection: which elements of an accumulated gradient are worth sending.

There are three ways to choose about k of them: exactly (`top_k`), by a threshold (`exact_threshold` or
`sampled_threshold`, then `at_least`), by a fitted normal distribution (`gaussian_threshold`). A `Ranking` says how
large an element is. A threshold is a score; elements that equal it are chosen, zeros never are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oktopk.comm.base import Comm
from oktopk.errors import InputError
from oktopk.kernels import kernels_for
from oktopk.kernels.reference import running, scales_of
from oktopk.state import TRANSIENT

SAMPLE_HITS = 1024
"""Number of sampled elements above a sampled threshold, because its count then errs by 1/sqrt(1024) = 3 %."""

SKETCH = 32
"""Number of scores a rank sends for an estimated global threshold, because its count then errs by k/16 at most."""

BAND = (0.8, 1.25)
"""Factors of k between which a threshold's count must stay for the threshold to be used again."""

TURN_EVERY = 16
"""Steps between two in which owners keep some elements because it is their turn."""

ROUNDING = 1 - 2.0**-21
"""Factor that lowers a threshold, because |acc| / scale may lose as much when it is multiplied back."""


def num_selected(numel: int, density: float) -> int:
    """Return k: at least one element, if there is one."""
    return min(numel, max(1, int(numel * density)))


def in_band(count: int, k: int) -> bool:
    """Whether `count` is near enough to `k` to use its threshold again."""
    return BAND[0] * k <= count <= BAND[1] * k


@dataclass
class Ranking:
    """The score of an element: |acc|, or |acc| over the scale of its segment.

    `bounds` cut the vector into segments (rows of matrices): first 0, last numel. `squares` holds a running mean of the
    squared gradient for each segment, and `scale` follows from it.

    A scale depends on gradients alone, never on the residual. So the residual of an element that waits grows and its
    scale does not, and it is sent after a bounded number of steps (docs/learning.md).
    """

    bounds: Tensor
    squares: Tensor
    scale: Tensor
    fresh: Tensor | None = field(default=None, metadata=TRANSIENT)

    @staticmethod
    def by_magnitude(numel: int) -> Ranking:
        """Return the ranking of the paper: one segment, of scale 1."""
        return Ranking.by_segment(numel, [numel])

    @staticmethod
    def by_segment(numel: int, lengths: Sequence[int]) -> Ranking:
        """Return a ranking over segments of these lengths, all of scale 1 until `rescale_`."""
        if any(not isinstance(length, int) or length < 0 for length in lengths) or sum(lengths) != numel:
            raise InputError(f"segments must add up to the tensor's {numel} elements, in whole lengths, not {lengths}")
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        squares = torch.zeros(len(lengths), dtype=torch.float64)
        return Ranking(bounds, squares, torch.ones_like(squares))

    def mean_squares(self, acc: Tensor, held: Tensor) -> Tensor:
        """Return the mean of the squared gradient, acc - held, over each segment, 0 for an empty one."""
        return kernels_for(acc).mean_squares(acc, held, self.bounds.numpy())

    def rescale_(self, mean_squares: Tensor) -> None:
        """Make the scales anew with one more measurement of the gradient; `commit_` keeps the measurement."""
        self.fresh = running(self.squares, mean_squares)
        self.scale = scales_of(self.fresh, self.bounds.diff())

    def commit_(self) -> None:
        """Keep the measurement. A step that is refused is made again, and measures again."""
        if self.fresh is not None:
            self.squares, self.fresh = self.fresh, None

    def score(self, value: Tensor, index: Tensor) -> Tensor:
        """Return the score of each `value` at its `index`, which is sorted: finite for finite values."""
        if self.is_magnitude:
            return value.abs()
        counts = torch.searchsorted(index, self.bounds.to(index.device)).diff()
        scale = self.scale.to(value).repeat_interleave(counts)
        return (value.abs() / scale).clamp_(max=torch.finfo(value.dtype).max)

    @property
    def is_magnitude(self) -> bool:
        """Whether a score is just a magnitude."""
        return len(self.scale) == 1

    def thresholds(self, threshold: float) -> NDArray[np.float64]:
        """Return the magnitude that has the score `threshold` in each segment."""
        return np.asarray(self.scale * threshold * (1 if self.is_magnitude else ROUNDING))


def at_least(acc: Tensor, threshold: float, ranking: Ranking) -> Tensor:
    """Return the sorted indices of the elements that reach the threshold."""
    return kernels_for(acc).at_least(acc, ranking.bounds.numpy(), ranking.thresholds(threshold))


def largest(score: Tensor, limit: int, turn: int) -> Tensor:
    """Return the sorted places of the `limit` largest scores; ties for the last place rotate with `turn`."""
    if len(score) <= limit:
        return torch.arange(len(score), device=score.device)
    least = kth_largest(score, limit)
    chosen = score > least
    equal = (score == least).nonzero().view(-1)
    chosen[in_turn(equal, limit - int(chosen.sum()), turn)] = True
    return chosen.nonzero().view(-1)


def turns_first_(score: Tensor, share: int, step: int) -> Tensor:
    """In every `TURN_EVERY`-th step, give the largest score to half of an owner's share of elements, in rotation.

    A sum is small, or zero, where ranks disagree. Its elements would be sent again and again and never delivered;
    in rotation they are delivered after a bounded number of steps.
    """
    if step % TURN_EVERY == TURN_EVERY - 1:
        places = torch.arange(len(score), device=score.device)
        score[in_turn(places, max(share // 2, 1), step // TURN_EVERY)] = torch.finfo(score.dtype).max
    return score


def swept_first_(score: Tensor, index: Tensor, sweep: Tensor | None) -> Tensor:
    """Make the scores of a sweep's elements the largest; `index` (sorted) tells whose score each is."""
    if sweep is not None:
        score[kernels_for(index).shared(sweep, index)] = torch.finfo(score.dtype).max
    return score


def in_turn(index: Tensor, limit: int, turn: int) -> Tensor:
    """Return at most `limit` of `index`, starting elsewhere every `turn`: a round of turns chooses all."""
    if len(index) <= limit:
        return index
    start = turn * limit % len(index)
    wrapped = max(start + limit - len(index), 0)
    return torch.cat([index[:wrapped], index[start : start + limit]])


def kth_largest(score: Tensor, k: int) -> float:
    """Return the k-th largest score, 0 if there are fewer."""
    if k > len(score) or k < 1:
        return 0.0
    return kernels_for(score).kth_largest(score, k)


def kth_largest_of_all(score: Tensor, k: int, comm: Comm) -> float:
    """Return the k-th largest of all ranks' float32 scores, 0 if there are fewer, the same on every rank.

    A radix select over the bits of the scores, which order non-negative floats: four sums of 256 counts.
    """
    if k < 1:
        return 0.0
    key, prefix, wanted = score.view(torch.int32), 0, k
    for shift in (24, 16, 8, 0):
        digits = (key[(key >> shift + 8) == prefix] >> shift) & 255 if shift < 24 else key >> shift
        counts = comm.all_reduce(torch.bincount(digits, minlength=256)).flip(0).cumsum(0).cpu()
        place = int(torch.searchsorted(counts, wanted))
        if place == 256:
            return 0.0
        wanted -= int(counts[place - 1]) if place else 0
        prefix = prefix << 8 | 255 - place
    return float(torch.tensor(prefix, dtype=torch.int32).view(torch.float32))


def kth_largest_by_sketch(score: Tensor, k: int, comm: Comm) -> float:
    """Return about the k-th largest of all ranks' float32 scores, the same on every rank, from one small message each.

    A rank sends `SKETCH` of its largest 4k/P scores, evenly spaced; each stands for the scores around it.
    """
    reach = min(len(score), math.ceil(4 * k / comm.size))
    largest = torch.topk(score, reach).values
    places = ((torch.arange(SKETCH, device=score.device) + 0.5) * reach / SKETCH).long()
    told = largest[places] if reach else score.new_zeros(SKETCH)
    every = comm.all_gather(torch.cat([told, score.new_tensor([reach / SKETCH])])).cpu()
    value, order = every[:, :-1].reshape(-1).sort(descending=True)
    counts = every[:, -1:].expand(-1, SKETCH).reshape(-1)[order].double().cumsum(0)
    place = int(torch.searchsorted(counts, float(k)))
    return float(value[place]) if place < len(value) else 0.0


def top_k(score: Tensor, k: int) -> Tensor:
    """Return the sorted indices of the k largest scores: ties go to the lowest index, zeros are never chosen."""
    if not k:
        return torch.empty(0, dtype=torch.int64, device=score.device)
    threshold = kth_largest(score, min(k, len(score)))
    return kernels_for(score).first_at_least(score, threshold, k)


def exact_threshold(acc: Tensor, k: int, ranking: Ranking) -> float:
    """Return the k-th largest score of the whole vector."""
    if k >= len(acc):
        return 0.0
    if ranking.is_magnitude:
        return kth_largest(acc.abs(), k)
    return kth_largest(ranking.score(acc, torch.arange(len(acc), device=acc.device)), k)


def sampled_threshold(acc: Tensor, k: int, ranking: Ranking, seed: int) -> float:
    """Return the k-th largest score of a random sample; the exact one where the sample would be the whole.

    It is measured on the vector at hand, so that it follows a gradient that grows a hundredfold in one step.
    """
    numel = len(acc)
    size = SAMPLE_HITS * numel // max(k, 1)
    if size >= numel or k >= numel:
        return exact_threshold(acc, k, ranking)
    places = torch.randint(numel, (size,), generator=torch.Generator().manual_seed(seed)).sort().values.to(acc.device)
    return kth_largest(ranking.score(acc[places], places), round(size * k / numel))


def gaussian_threshold(acc: Tensor, density: float) -> float:
    """Return the magnitude that a share `density` of the elements would pass if they were normally distributed."""
    if density >= 1 or len(acc) < 2:
        return 0.0
    std, mean = torch.std_mean(acc)
    return abs(float(mean)) + NormalDist().inv_cdf(1 - density / 2) * float(std)
