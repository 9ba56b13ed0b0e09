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


@given(part=sparses(), data=st.data())
def test_what_is_cut_can_be_put_together(part: Sparse, data: st.DataObject) -> None:
    inner = sorted(data.draw(st.lists(st.integers(0, part.numel), max_size=6)))
    cuts = torch.tensor([0, *inner, part.numel])
    pieces = part.split(cuts)
    assert [piece.numel for piece in pieces] == cuts.diff().tolist()
    starts = cuts[:-1].tolist()
    shifted = [piece.shift(low, part.numel) for piece, low in zip(pieces, starts, strict=True)]
    assert same(Sparse.join(shifted), part)
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


@pytest.mark.parametrize("index", [[1, 2, 3], [2, 1], [1, 1], [3, 10], [-1, 0], [1.0, 2.0]], ids=str)
def test_what_is_no_sparse_vector_cannot_be_made(index: list[float]) -> None:
    with pytest.raises(MalformedError, match="indices"):
        Sparse(torch.tensor(index), torch.ones(2), 10)


@given(lists=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=5), numel=st.sampled_from([31, 1 << 20]))
def test_a_merge_is_the_sum_in_order(lists: list[set[int]], numel: int) -> None:
    """In float32 the sum of 1e8, 1 and -1e8 depends on their order; an index stays where its values cancel."""
    parts = [sparse(sorted(index), numel) for index in lists]
    for number, part in enumerate(parts):
        part.value.copy_(torch.tensor([1e8, 1.0, -1e8])[(part.index + number) % 3])
    total = torch.zeros(31)
    for part in parts:
        total[part.index] += part.value
    merged = merge(parts)
    assert merged.index.tolist() == sorted(set().union(*lists))
    assert torch.equal(merged.value, total[merged.index])
    assert merged.numel == numel
