from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import MalformedError, Sparse
from oktopk.sparse import merge


def sparse(index: list[int], numel: int) -> Sparse:
    return Sparse(torch.tensor(index, dtype=torch.int64), torch.arange(1.0, len(index) + 1), numel)


def same(a: Sparse, b: Sparse) -> bool:
    return torch.equal(a.index, b.index) and torch.equal(a.value, b.value) and a.numel == b.numel


@st.composite
def sparses(draw: st.DrawFn) -> Sparse:
    numel = draw(st.integers(0, 50))
    index = draw(st.sets(st.integers(0, max(numel - 1, 0)), max_size=numel)) if numel else set()
    return sparse(sorted(index), numel)


@st.composite
def cut_sparses(draw: st.DrawFn) -> tuple[Sparse, torch.Tensor]:
    part = draw(sparses())
    inner = sorted(draw(st.lists(st.integers(0, part.numel), max_size=6)))
    return part, torch.tensor([0, *inner, part.numel])


@given(case=cut_sparses())
def test_split_then_concat_is_the_same(case: tuple[Sparse, torch.Tensor]) -> None:
    part, cuts = case
    pieces = part.split(cuts)
    assert [piece.numel for piece in pieces] == cuts.diff().tolist()
    assert same(Sparse.concat(pieces), part)


@given(case=cut_sparses())
def test_between_then_join_is_the_same(case: tuple[Sparse, torch.Tensor]) -> None:
    part, cuts = case
    pieces = part.between(cuts)
    assert all(piece.numel == part.numel for piece in pieces)
    for piece, low, high in zip(pieces, cuts, cuts[1:], strict=False):
        assert bool(((piece.index >= low) & (piece.index < high)).all())
    assert same(Sparse.join(pieces), part)


@given(part=sparses())
def test_pick_undoes_to_dense(part: Sparse) -> None:
    dense = part.to_dense()
    assert dense.shape == (part.numel,)
    assert int(dense.count_nonzero()) == part.nnz
    assert same(Sparse.pick(dense, part.index), part)
    assert torch.equal(part.shared(torch.arange(part.numel)), part.index)


def test_shift_moves_and_can_move_back() -> None:
    part = sparse([0, 2], 3)
    moved = part.shift(2**40, 2**41)
    assert moved.index.tolist() == [2**40, 2**40 + 2]
    assert same(moved.shift(-(2**40), 3), part)
    with pytest.raises(MalformedError, match="leave"):
        part.shift(1, 3)


@pytest.mark.parametrize(
    ("which", "index"),
    [(slice(1, 3), [4, 6]), (torch.tensor([0, 2]), [2, 6]), (torch.tensor([True, False, False, True]), [2, 9])],
)
def test_some_of_the_elements(which: slice | torch.Tensor, index: list[int]) -> None:
    assert sparse([2, 4, 6, 9], 10)[which].index.tolist() == index


def test_empty_has_the_dtype_it_is_asked_for() -> None:
    empty = Sparse.empty(7, torch.ones(1, dtype=torch.float64))
    assert (empty.nnz, empty.numel, empty.value.dtype) == (0, 7, torch.float64)
    assert torch.equal(empty.to_dense(), torch.zeros(7, dtype=torch.float64))


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), torch.ones(2)),
        (torch.tensor([1, 2]), torch.ones(3)),
        (torch.tensor([2, 1]), torch.ones(2)),
        (torch.tensor([1, 1]), torch.ones(2)),
        (torch.tensor([3, 10]), torch.ones(2)),
        (torch.tensor([-1, 0]), torch.ones(2)),
    ],
)
def test_what_is_no_sparse_vector_cannot_be_made(index: torch.Tensor, value: torch.Tensor) -> None:
    with pytest.raises(MalformedError, match="indices"):
        Sparse(index, value, 10)


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
