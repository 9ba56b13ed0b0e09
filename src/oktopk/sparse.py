"""`Sparse`: a vector with few nonzeros, as sorted unique indices and their values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.errors import MalformedError
from oktopk.kernels import kernels_for


@dataclass(frozen=True)
class Sparse:
    """A vector of `numel` elements, zero except at `index`, where it is `value`.

    `index` is int64 and strictly increasing, which is checked here, once: intersecting with an unsorted list is the
    oldest bug of this field.

    >>> Sparse(torch.tensor([1, 3]), torch.tensor([5.0, 7.0]), 4).to_dense()
    tensor([0., 5., 0., 7.])
    """

    index: Tensor
    value: Tensor
    numel: int

    def __post_init__(self) -> None:
        index = self.index  # errors, not assertions: they may come from another rank, and python -O has none
        if index.dtype != torch.int64:
            raise MalformedError(f"indices must be int64, not {index.dtype}")
        if self.value.shape != index.shape or index.dim() != 1:
            raise MalformedError(f"indices of shape {tuple(index.shape)} for values of {tuple(self.value.shape)}")
        if len(index):
            if not kernels_for(index).is_increasing(index):
                raise MalformedError("indices must be strictly increasing")
            first, last = int(index[0]), int(index[-1])
            if first < 0 or last >= self.numel:
                raise MalformedError(f"indices {first}..{last} leave 0..{self.numel - 1}")

    @staticmethod
    def empty(numel: int, like: Tensor) -> Sparse:
        """Return the zero vector, with values of `like`'s dtype and device."""
        return Sparse(torch.empty(0, dtype=torch.int64, device=like.device), like.new_empty(0), numel)

    @staticmethod
    def pick(dense: Tensor, index: Tensor) -> Sparse:
        """Return `dense` at `index`, zero elsewhere."""
        return Sparse(index, dense.index_select(0, index), dense.numel())

    @property
    def nnz(self) -> int:
        """Number of elements held."""
        return len(self.index)

    def to_dense(self) -> Tensor:
        """Return the whole vector."""
        dense = self.value.new_empty(self.numel)
        kernels_for(dense).spread(self.index, self.value, dense)
        return dense

    def shift(self, offset: int, numel: int) -> Sparse:
        """Return the same elements `offset` places further, in a vector of `numel`."""
        return Sparse(self.index + offset, self.value, numel)

    def split(self, cuts: Tensor) -> list[Sparse]:
        """Return the regions between `cuts` (first 0, last numel, nondecreasing), each counted from its own start."""
        edges = cuts.tolist()
        parts = zip(self.between(cuts), edges, edges[1:], strict=False)
        return [part.shift(-low, high - low) for part, low, high in parts]

    def between(self, cuts: Tensor) -> list[Sparse]:
        """Return the elements of each region between `cuts`, still as elements of the whole vector."""
        ends = torch.searchsorted(self.index, cuts.to(self.index.device)).tolist()
        return [self[i:j] for i, j in itertools.pairwise(ends)]

    @staticmethod
    def join(parts: Sequence[Sparse]) -> Sparse:
        """Return consecutive parts of one vector as one: the inverse of `between`."""
        index, value = torch.cat([part.index for part in parts]), torch.cat([part.value for part in parts])
        return Sparse(index, value, parts[0].numel)

    def __getitem__(self, which: slice | Tensor) -> Sparse:
        """Return some of the elements held, by a slice, by their places or by a mask."""
        if isinstance(which, Tensor) and which.dtype == torch.int64:  # half the time of an index in brackets
            return Sparse(self.index.index_select(0, which), self.value.index_select(0, which), self.numel)
        return Sparse(self.index[which], self.value[which], self.numel)

    def shared(self, index: Tensor) -> Tensor:
        """Return the places in `index`, which is sorted, of the elements held here."""
        return kernels_for(index).shared(self.index, index)


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of the parts; an index stays even where its values cancel.

    Values are added in the order of the parts, which is the order of ranks, so that the bits never depend on timing.
    """
    kernels = kernels_for(max((part.index for part in parts), key=len))
    index, value = kernels.merge([part.index for part in parts], [part.value for part in parts])
    return Sparse(index, value, parts[0].numel)
