"""TopkDSA: SparCML's dynamic sparse allreduce.

Exact local top-k; uniform regions; pairs go to their region's owner, who sums them; all gather the regions, each as
pairs or, where the pairs would cost more, as the dense block. No global selection, so that the result grows with P.
4k(P-1)/P words a rank where the lists coincide, up to (2k + n)(P-1)/P where they do not.
"""

import torch
from torch import Tensor

from oktopk.algorithms.base import Reduced, Sparsifier, State
from oktopk.codec import Codec, join_errors, leftover
from oktopk.codec.values import num_words, read, write_
from oktopk.comm.base import Comm
from oktopk.errors import MalformedError
from oktopk.partition import even_cuts
from oktopk.selection import num_selected, top_k
from oktopk.sparse import Sparse, merge


class TopkDSA(Sparsifier):
    """Exact local top-k, reduce by uniform regions, gather of sparse or dense regions."""

    def reduce(self, acc: Tensor, state: State, comm: Comm) -> Reduced:
        """Return the sum of all ranks' top k, up to P k nonzeros."""
        k, cuts = num_selected(state.numel, self.density), even_cuts(state.numel, comm.size)
        codecs = [Codec(length, self.wire) for length in cuts.diff().tolist()]
        mine = codecs[comm.rank]
        with comm.phase("select"):
            taken = top_k(acc.abs(), k)
        with comm.phase("pack"):
            parts = Sparse.pick(acc, taken).split(cuts)
            encoded = [codec.encode(part) for codec, part in zip(codecs, parts, strict=True)]
        with comm.phase("exchange"):
            arrived = comm.all_to_all_v([block for block, _ in encoded], most=mine.words(min(k, mine.numel)))
        with comm.phase("reduce"):
            region = merge([mine.decode(each, acc.dtype, source=source)[0] for source, each in enumerate(arrived)])
            block, lost = _encode_region(mine, region)
        with comm.phase("gather"):
            most = max(codec.value_words(codec.numel) for codec in codecs)
            gathered = comm.all_to_all_v([block] * comm.size, most=most)
        with comm.phase("apply"):
            regions = [
                _decode_region(codec, block, acc.dtype, owner).shift(low, state.numel)
                for owner, (codec, block, low) in enumerate(zip(codecs, gathered, cuts[:-1].tolist(), strict=True))
            ]
            total = Sparse.join(regions)
        state.step += 1
        error = join_errors(each for _, each in encoded)
        returned = tuple(part.shift(int(cuts[comm.rank]), state.numel) for part in lost)
        return Reduced(total, taken, returned, selected=len(taken), rounding_error=error)


def _encode_region(codec: Codec, region: Sparse) -> tuple[Tensor, tuple[Sparse, ...]]:
    """Return the cheaper of two forms, pairs behind their header or one value for each element; and what is lost."""
    if codec.words(region.nnz) < codec.value_words(codec.numel):
        block, error = codec.encode(region)
        return block, leftover(region, error)
    dense = region.to_dense()
    block = torch.zeros(codec.value_words(codec.numel), dtype=torch.int32, device=dense.device)
    error = write_(codec.wire, block[: num_words(codec.wire, codec.numel)], dense)
    return block, leftover(Sparse(torch.arange(codec.numel, device=dense.device), dense, codec.numel), error)


def _decode_region(codec: Codec, block: Tensor, dtype: torch.dtype, owner: int) -> Sparse:
    whole = codec.value_words(codec.numel)
    if len(block) < whole:
        return codec.decode(block, dtype, source=owner, sums=True)[0]
    if len(block) > whole:
        raise MalformedError(f"a region of {codec.numel} elements has {whole} words at most, not {len(block)}", owner)
    dense = read(codec.wire, block[: num_words(codec.wire, codec.numel)], codec.numel, dtype)
    return Sparse.pick(dense, dense.nonzero().view(-1))
