"""The sum of sparse vectors, in the order of the ranks they came from, so that its bits never depend on timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oktopk.sparse import Sparse


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of the parts, in their order; an index stays even where its values cancel."""
    index, place = torch.unique(torch.cat([part.index for part in parts]), return_inverse=True)
    value = parts[0].value.new_zeros(len(index))
    for part, where in zip(parts, torch.split(place, [part.nnz for part in parts]), strict=True):
        value[where] += part.value
    return Sparse(index, value, parts[0].numel)
