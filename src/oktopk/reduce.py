"""The sum of sparse vectors, in the order of the ranks they came from, so that its bits never depend on timing."""

from __future__ import annotations

from collections.abc import Sequence

from oktopk.kernels import kernels_for
from oktopk.sparse import Sparse


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of the parts, in their order; an index stays even where its values cancel."""
    kernels = kernels_for(max((part.index for part in parts), key=len))
    index, value = kernels.merge([part.index for part in parts], [part.value for part in parts])
    return Sparse(index, value, parts[0].numel)
