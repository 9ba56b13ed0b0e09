"""Cuts of the index space into regions, one for each owner.

Cuts are an int64 tensor of P + 1 indices, nondecreasing, first 0, last numel; region i = [cuts[i], cuts[i + 1]) and
its owner is rank i. Empty regions are legal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oktopk.errors import MalformedError

if TYPE_CHECKING:
    from oktopk.comm.base import Comm


def even_cuts(numel: int, parts: int) -> Tensor:
    """Return cuts into regions that differ by at most one element.

    >>> even_cuts(10, 4)
    tensor([ 0,  2,  5,  7, 10])
    """
    return torch.tensor([i * numel // parts for i in range(parts + 1)])


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
