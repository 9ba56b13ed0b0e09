"""A gather in two levels: P ranks as a grid, first along its rows, then along its columns.

A rank sends as many bytes as in a gather from all to all, in about 2 sqrt(P) messages in place of P - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from oktopk.comm.base import Comm

LEAST_RANKS = 64
"""Minimum of ranks for two levels: 49 messages of a host fewer then cost more than one more latency of a LAN."""


def grid_of(size: int) -> tuple[int, int]:
    """Return the columns and rows of the grid of `size` ranks that is nearest to a square.

    >>> grid_of(64), grid_of(512), grid_of(7)
    ((8, 8), (16, 32), (1, 7))
    """
    width = next(each for each in range(math.isqrt(size), 0, -1) if size % each == 0)
    return width, size // width


def has_two_levels(size: int) -> bool:
    """Whether a gather of small blocks from `size` ranks goes in two levels: not for few, nor for a prime number."""
    return size >= LEAST_RANKS and grid_of(size)[0] > 1


def gather_in_two_levels(comm: Comm, block: Tensor) -> Tensor:
    """Return all ranks' blocks of int32 words, of one size, in rank order: shape (P, len(block))."""
    width = grid_of(comm.size)[0]
    row, column = divmod(comm.rank, width)
    mine = _gather(comm, block, range(row * width, (row + 1) * width), column)
    return _gather(comm, mine, range(column, comm.size, width), row).view(comm.size, len(block))


def _gather(comm: Comm, block: Tensor, members: Sequence[int], place: int) -> Tensor:
    """Return the blocks of some ranks, of which this one is at `place`, in their order."""
    size, out = len(members), block.new_empty(len(members), len(block))
    out[place] = block
    coming = [
        comm.sendrecv(block, members[(place + d) % size], members[place - d], len(block), block.device)
        for d in range(1, size)
    ]
    for d, message in enumerate(coming, start=1):
        out[place - d] = message.wait()
    return out.view(-1)
