from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import MalformedError, Sparse


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


@given(part=sparses(), wanted=st.sets(st.integers(0, 60)))
def test_holds_is_membership(part: Sparse, wanted: set[int]) -> None:
    asked = torch.tensor(sorted(wanted), dtype=torch.int64)
    held = set(part.index.tolist())
    assert part.shared(asked).tolist() == [place for place, i in enumerate(sorted(wanted)) if i in held]


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
