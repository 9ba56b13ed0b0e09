"""GaussianK: a threshold from a fitted normal distribution in place of an exact top-k.

th = |mean| + ppf(1 - density/2) * std; gradients have heavier tails than a normal, so the threshold is then
corrected until the count is in a band around k. 2k(P-1) words a rank, times 0.8 to 1.25.
"""

from torch import Tensor

from oktopk.algorithms.base import Reduced, Sparsifier, State
from oktopk.comm.base import Comm
from oktopk.selection import BAND, Ranking, at_least, gaussian_threshold, in_band, largest, sampled_threshold
from oktopk.sparse import Sparse, merge

CORRECTIONS = 3
"""Corrections by the count just seen, before the threshold is measured instead."""


class GaussianK(Sparsifier):
    """Gaussian threshold, all_gather of pairs, sum of the lists."""

    def reduce(self, acc: Tensor, state: State, comm: Comm) -> Reduced:
        """Return the sum of what passed each rank's threshold."""
        k, codec = self.plan(state.numel)
        with comm.phase("select"):
            taken, threshold = _select(acc, k, self.density, state.step)
        with comm.phase("pack"):
            part = Sparse.pick(acc, taken)
            block, error = codec.encode(part)
        with comm.phase("gather"):
            blocks = comm.all_to_all_v([block] * comm.size, most=codec.words(_most(k)))
        with comm.phase("reduce"):
            total = merge([codec.decode(row, acc.dtype, source=source)[0] for source, row in enumerate(blocks)])
        state.step += 1
        return Reduced(total, taken, selected=len(taken), threshold=threshold, rounding_error=error)


def _select(acc: Tensor, k: int, density: float, step: int) -> tuple[Tensor, float]:
    ranking = Ranking.by_magnitude(len(acc))
    threshold = gaussian_threshold(acc, density)
    index = at_least(acc, threshold, ranking)
    for _ in range(CORRECTIONS):
        if in_band(len(index), k) or k == len(acc):
            break
        threshold *= min(max(len(index) / max(k, 1), 0.25), 4.0) ** 0.5
        index = at_least(acc, threshold, ranking)
    else:
        if not in_band(len(index), k):
            threshold = sampled_threshold(acc, k, ranking, seed=step)
            index = at_least(acc, threshold, ranking)
    return index[largest(acc[index].abs(), _most(k), step)], threshold


def _most(k: int) -> int:
    """Return how many pairs a rank sends at most."""
    return max(int(BAND[1] * k), 1)
