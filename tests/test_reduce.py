from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import Sparse
from oktopk.sparse import merge


@given(lists=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=5), numel=st.sampled_from([31, 1 << 20]))
def test_a_merge_is_the_sum_in_order(lists: list[set[int]], numel: int) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [
        Sparse(torch.tensor(sorted(index), dtype=torch.int64), torch.randn(len(index), generator=generator), numel)
        for index in lists
    ]
    total = torch.zeros(31)
    for part in parts:
        total[part.index] += part.value
    merged = merge(parts)
    assert merged.index.tolist() == sorted(set().union(*lists))
    assert torch.equal(merged.value, total[merged.index])
    assert merged.numel == numel


def test_the_order_of_a_merge_is_the_order_of_its_parts() -> None:
    """(1e8 + 1) - 1e8 and (1e8 - 1e8) + 1 differ in float32; which one it is must not depend on timing."""
    one, big, minus = (Sparse(torch.tensor([0]), torch.tensor([x]), 1) for x in (1.0, 1e8, -1e8))
    assert float(merge([big, one, minus]).value) == 0.0
    assert float(merge([big, minus, one]).value) == 1.0


def test_an_index_stays_where_its_values_cancel() -> None:
    plus, minus = (Sparse(torch.tensor([3]), torch.tensor([x]), 9) for x in (2.0, -2.0))
    assert merge([plus, minus]).index.tolist() == [3]
