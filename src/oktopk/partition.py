"""Cuts of the index space into regions, one for each owner.

Cuts are an int64 tensor of P + 1 indices, nondecreasing, first 0, last numel; region i = [cuts[i], cuts[i + 1]) and
its owner is rank i. Empty regions are legal.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.comm.base import Comm
from oktopk.errors import MalformedError

SWEEP_EVERY = 8
"""Steps from one sweep to the next, because with 16 eight ranks come near the 5 % that may be pending."""

SWEEP_STEP = 5
"""Number of the sweep among `SWEEP_EVERY` steps, because the device moves cuts in number 0, and turns are number 7."""


def even_cuts(numel: int, parts: int) -> Tensor:
    """Return cuts into regions that differ by at most one element.

    >>> even_cuts(10, 4)
    tensor([ 0,  2,  5,  7, 10])
    """
    return torch.tensor([i * numel // parts for i in range(parts + 1)])


def sweep_of(step: int, k: int, cuts: Tensor) -> Tensor | None:
    """Return the sorted indices that every rank sends in a sweep step, whatever their values; None in other steps.

    All ranks know them from the cuts and the number of the step, so that all deliver an element together. Without
    sweeps, ranks that choose different elements of equal size take each other's slots, and an element waits P times
    as long.

    >>> sweep_of(step=5, k=4, cuts=torch.tensor([0, 5, 10]))
    tensor([0, 5])
    """
    if not is_sweep(step, k, int(cuts[-1])):
        return None
    regions = zip(itertools.pairwise(cuts.tolist()), sweep_stride(k, cuts).tolist(), strict=True)
    turn = step // SWEEP_EVERY
    return torch.cat([torch.arange(min(low + turn % each, high), high, each) for (low, high), each in regions])


def is_sweep(step: int, k: int, numel: int) -> bool:
    """Whether a step sweeps: none does where everything travels."""
    return step % SWEEP_EVERY == SWEEP_STEP and k < numel


def sweep_width(k: int, parts: int) -> int:
    """Return how many elements of a region a sweep has at most: three quarters of the owner's share of k."""
    return max(3 * k // (4 * parts), 1)


def sweep_stride(k: int, cuts: Tensor) -> Tensor:
    """Return the distance of a sweep's elements in each region."""
    width = sweep_width(k, len(cuts) - 1)
    return ((cuts.diff() + width - 1) // width).clamp(min=1)


def balanced_cuts(index: Tensor, numel: int, parts: int) -> Tensor:
    """Return the cuts that share the sorted `index`, one rank's selection, evenly: its quantiles."""
    if not len(index):
        return even_cuts(numel, parts)
    inner = index[even_cuts(len(index), parts)[1:-1].to(index.device)].cpu()
    return torch.cat([torch.tensor([0]), inner, torch.tensor([numel])])


def consensus(cuts: Tensor, comm: Comm) -> Tensor:
    """Return the mean of all ranks' cuts. In int64: in int32 the sum overflows from P = 79 at n = 27.5 M."""
    assert cuts.dtype == torch.int64
    numel = int(cuts[-1])
    mean = comm.all_reduce(cuts.clone()) // comm.size
    edges = mean.tolist()
    if edges[0] != 0 or edges[-1] != numel or edges != sorted(edges):
        raise MalformedError(f"cuts must rise from 0 to {numel}; the mean of all ranks' is {edges}")
    return mean


def rebalanced_cuts(cuts: Tensor, index: Tensor, demand: Sequence[int]) -> Tensor:
    """Return cuts that would have shared `demand` evenly.

    `demand` is the number of pairs that the ranks wanted to send to each region. `index`, the delivered indices, is a
    sample of where they lie. All ranks know both, so that they agree on these cuts without a message.
    """
    parts, numel = len(cuts) - 1, int(cuts[-1])
    ends = torch.searchsorted(index, cuts.to(index.device)).tolist()
    # Integers, so that every rank gets the same cuts whatever its hardware makes of a floating-point sum.
    weights = [(wanted << 16) // max(j - i, 1) for wanted, i, j in zip(demand, ends, ends[1:], strict=False)]
    counts = torch.tensor([j - i for i, j in itertools.pairwise(ends)])
    mass = torch.repeat_interleave(torch.tensor(weights), counts).cumsum(0)
    if not len(mass) or not int(mass[-1]):
        return cuts
    goals = even_cuts(int(mass[-1]), parts)[1:-1]
    inner = index.cpu()[torch.searchsorted(mass, goals, right=True)]
    return torch.cat([torch.tensor([0]), inner, torch.tensor([numel])])
