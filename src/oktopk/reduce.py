"""The sum of sparse vectors, in the order of the ranks they came from, so that its bits never depend on timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oktopk.sparse import Sparse

SCAN_PER_PAIR = 256
"""Elements of a mask that are as quick to scan as one pair is to sort."""


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of the parts, in their order; an index stays even where its values cancel."""
    index = union([part.index for part in parts], parts[0].numel)
    value = parts[0].value.new_zeros(len(index))
    for part in parts:
        value[torch.searchsorted(index, part.index)] += part.value
    return Sparse(index, value, parts[0].numel)


def union(indices: Sequence[Tensor], numel: int) -> Tensor:
    """Return the sorted indices that are in any of the lists."""
    together = torch.cat(list(indices))
    if numel > SCAN_PER_PAIR * len(together):
        distinct: Tensor = torch.unique(together)
        return distinct
    mask = torch.zeros(numel, dtype=torch.bool, device=together.device)
    mask[together] = True
    index: Tensor = mask.nonzero().view(-1)
    return index
