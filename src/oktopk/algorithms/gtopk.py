"""GTopk: a binary tree of pairwise merges, each cut back to k, then a broadcast.

k pairs in each of 2 ceil(log2 P) rounds on the busiest path, for any P. As published, a value that is cut in an early
merge is lost if its index survives through another rank: it is neither in the sum nor, its index being there, in
anyone's residual. Here the rank that cut it keeps it in its own, so that gTop-k conserves like the others.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.algorithms.base import Reduced, Sparsifier, State, taken_of
from oktopk.codec import Codec, leftover
from oktopk.comm.base import Comm
from oktopk.selection import top_k
from oktopk.sparse import Sparse, merge


class GTopk(Sparsifier):
    """Exact local top-k, tree of merge + top-k, broadcast of k pairs."""

    def reduce(self, acc: Tensor, state: State, comm: Comm) -> Reduced:
        """Return the k pairs that survived every merge."""
        tree = _Tree(*self.plan(state.numel), comm)
        with comm.phase("select"):
            sent = top_k(acc.abs(), tree.k)
        block, cut = tree.reduce_to_root(Sparse.pick(acc, sent))
        total = tree.broadcast(block, acc.dtype)
        with comm.phase("apply"):
            # Where an index did not survive, all ranks keep what they sent, and what was cut of it is already theirs.
            returned = tuple(part[total.shared(part.index)] for part in cut)
            taken, _ = taken_of(sent, None, total)
        state.step += 1
        return Reduced(total, taken, returned, selected=len(sent))


@dataclass(frozen=True)
class _Tree:
    k: int
    codec: Codec
    comm: Comm

    def reduce_to_root(self, mine: Sparse) -> tuple[Tensor, list[Sparse]]:
        """Return the block that this rank ends with (rank 0: the result), and the pairs that it cut or rounded away."""
        rank = self.comm.rank
        cut: list[Sparse] = []
        for distance in self._distances():
            if rank % (2 * distance) == distance:
                break
            if rank + distance < self.comm.size:
                block = self._receive(rank + distance, mine.index.device)
                theirs = self._decode(block, rank + distance, mine.value.dtype)
                with self.comm.phase("reduce"):
                    mine = self._cut(_sum(mine, theirs), cut)
        block, error = self.codec.encode(mine, capacity=self.k)
        cut.extend(leftover(mine, error))
        if rank:
            self._send(block, self._parent)
        return block, cut

    def broadcast(self, block: Tensor, dtype: torch.dtype) -> Sparse:
        """Return rank 0's pairs; its block is passed down the tree by which they came."""
        rank = self.comm.rank
        if rank:
            block = self._receive(self._parent, block.device)
        total = self._decode(block, self._parent, dtype)
        for distance in reversed(self._distances()):
            if rank % (2 * distance) == 0 and rank + distance < self.comm.size:
                self._send(block, rank + distance)
        return total

    @property
    def _parent(self) -> int:
        """The rank without its lowest bit."""
        return self.comm.rank & (self.comm.rank - 1)

    def _distances(self) -> list[int]:
        return [1 << i for i in range((self.comm.size - 1).bit_length())]

    def _cut(self, part: Sparse, cut: list[Sparse]) -> Sparse:
        """Return the k largest; the rest stays here."""
        if part.nnz <= self.k:
            return part
        kept = part.index.new_zeros(part.nnz).bool()
        kept[top_k(part.value.abs(), self.k)] = True
        cut.append(part[~kept])
        return part[kept]

    def _decode(self, block: Tensor, source: int, dtype: torch.dtype) -> Sparse:
        return self.codec.decode(block, dtype, self.k, source=source, sums=True)[0]

    def _send(self, block: Tensor, to: int) -> None:
        with self.comm.phase("exchange"):
            self.comm.sendrecv(block, to, to, 0, block.device).wait()

    def _receive(self, source: int, device: torch.device) -> Tensor:
        with self.comm.phase("exchange"):
            return self.comm.sendrecv(None, source, source, self.codec.words(self.k), device).wait()


def _sum(mine: Sparse, theirs: Sparse) -> Sparse:
    """Return the sum; of two infinities, sums that overflowed on their way, it is infinite: a NaN has no rank."""
    total = merge([mine, theirs])
    return Sparse(total.index, torch.where(total.value.isnan(), math.inf, total.value), total.numel)
