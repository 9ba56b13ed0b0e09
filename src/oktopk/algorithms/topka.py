"""TopkA: every rank gathers every rank's top k.

2k(P-1) words a rank, which grows with P: beyond a few ranks the gather is what Ok-Topk was made to avoid.
"""

from torch import Tensor

from oktopk.algorithms.base import Reduced, Sparsifier, State
from oktopk.comm.base import Comm
from oktopk.selection import top_k
from oktopk.sparse import Sparse, merge


class TopkA(Sparsifier):
    """Exact local top-k, all_gather of blocks of k pairs, sum of the lists."""

    def reduce(self, acc: Tensor, state: State, comm: Comm) -> Reduced:
        """Return the sum of all ranks' top k, up to P k nonzeros."""
        k, codec = self.plan(state.numel)
        with comm.phase("select"):
            taken = top_k(acc.abs(), k)
        with comm.phase("pack"):
            part = Sparse.pick(acc, taken)
            block, error = codec.encode(part, capacity=k)
        with comm.phase("gather"):
            blocks = comm.all_gather(block)
        with comm.phase("reduce"):
            total = merge([codec.decode(row, acc.dtype, k, source=source)[0] for source, row in enumerate(blocks)])
        state.step += 1
        return Reduced(total, taken, selected=len(taken), rounding_error=error)
