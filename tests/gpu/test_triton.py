"""The triton kernels give the bits of the plain ones, at every length around a tile's and for every awkward number."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from oktopk.cuda import reference as blocks
from oktopk.cuda.reference import PIECE, RUN, TILE, Found, Rows, bins, room_for, sample_of
from oktopk.partition import even_cuts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not INTERPRETED, reason="needs a CUDA GPU, and there is none here"
)

LENGTHS = [0, 1, 2, TILE - 1, TILE, TILE + 1, 40 * TILE + 77, *([] if INTERPRETED else [1_000_007, 27_569_568])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 0x5A5A5A


@pytest.fixture
def fast() -> ModuleType:
    """The kernels under test: this alone imports triton."""
    from oktopk.cuda import triton

    return triton


def made(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(numel, generator=generator, device=DEVICE).pow_(3).to(dtype)


def poisoned(numel: int, room: int) -> Found:
    found = Found.make(numel, room, torch.device(DEVICE))
    for tensor in (found.place, found.count, found.bad, found.groups):
        tensor.fill_(POISON)
    found.value.fill_(float(POISON))
    return found


def assert_same(one: Found, other: Found) -> None:
    assert torch.equal(one.count, other.count)
    assert torch.equal(one.bad.sum(), other.bad.sum())
    assert torch.equal(one.groups, other.groups)
    there = torch.arange(one.place.shape[1], device=DEVICE) < one.count[:, None]
    assert torch.equal(one.place[there], other.place[there])
    assert torch.equal(one.value[there].view(torch.int32), other.value[there].view(torch.int32))


def turn_of(step: int) -> Tensor:
    return torch.tensor([step], dtype=torch.int32, device=DEVICE)


def threshold_of(value: float) -> Tensor:
    return torch.tensor([value], device=DEVICE)


def rows_of(numel: int, kind: str) -> Rows | None:
    """Return rows like a matrix's, or a few of all lengths, empty ones among them; or none."""
    if kind == "none" or not numel:
        return None
    lengths = [min(1280, numel - start) for start in range(0, numel, 1280)]
    if kind == "ragged":
        lengths, left = [], numel
        for length in (0, 1, 9, 9, 9, 0, 500, 3 * TILE, PIECE + 1, numel):
            lengths.append(min(length, left))
            left -= lengths[-1]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    scale = torch.rand(len(lengths), generator=torch.Generator().manual_seed(4)) + 0.2
    return Rows.make(bounds, scale.square(), scale, torch.device(DEVICE))


@pytest.mark.parametrize("kind", ["none", "matrix", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [numel for numel in LENGTHS if numel])
def test_aim_and_measure(fast: ModuleType, numel: int, dtype: torch.dtype, kind: str) -> None:
    """The same threshold; as many of the sample reach it as were wanted, and few more; the counts are left zero."""
    grad, held, rows = made(numel, dtype, 1), made(numel, torch.float32, 2), rows_of(numel, kind)
    counts, turn = bins(torch.device(DEVICE)), turn_of(24)
    for stride in (1, 7):
        sample = sample_of(numel, stride)
        for wanted in {1, max(sample // 100, 1), max(sample, 1), sample + 1}:
            ours, theirs = threshold_of(float(POISON)), threshold_of(float(POISON))
            number = torch.tensor([wanted], device=DEVICE)
            fast.sample_threshold(grad, held, rows, turn, stride, number, counts, ours)
            assert not bool(counts.any())
            blocks.sample_threshold(grad, held, rows, turn, stride, number, counts, theirs)
            assert torch.equal(ours, theirs)
            if rows is None and wanted <= sample:
                size = (held + grad.float()).abs()
                if stride > 1:
                    size = size[: sample * stride].view(-1, stride, RUN)[:, 24 % stride]
                assert int((size >= ours).sum()) >= wanted
                assert int((size > ours * (1 + 2**-11)).sum()) < wanted
    if rows is not None:
        other = rows_of(numel, kind)
        assert other is not None
        fast.measure_rows(grad, rows)
        blocks.measure_rows(grad, other)
        torch.testing.assert_close(rows.squares, other.squares)
        torch.testing.assert_close(rows.scale, other.scale)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-40, 3e38])
def test_aim_where_all_are_alike(fast: ModuleType, value: float) -> None:
    score, counts = torch.full((3 * TILE + 7,), value, device=DEVICE), bins(torch.device(DEVICE))
    score[::5] = 0.0
    for wanted in (1, len(score) // 2, len(score)):
        ours, theirs = threshold_of(float(POISON)), threshold_of(float(POISON))
        number = torch.tensor([wanted], device=DEVICE)
        fast.select_threshold(score, number, counts, ours)
        blocks.select_threshold(score, number, counts, theirs)
        assert torch.equal(ours, theirs)
        assert value * (1 - 2**-11) <= float(ours) <= value or wanted == len(score) or value < 1e-38
        assert not bool(counts.any())


@pytest.mark.parametrize("kind", ["none", "matrix", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_find_and_send(fast: ModuleType, numel: int, dtype: torch.dtype, kind: str) -> None:
    grad, held, rows = made(numel, dtype, 1), made(numel, torch.float32, 2), rows_of(numel, kind)
    turn = turn_of(7)
    for threshold, density in ((0.0, 1.0), (0.0, 0.02), (8.0, 0.02), (8.0, 1.0), (1e30, 0.01)):  # all, some, none
        room = room_for(density)
        one, other = poisoned(numel, room), poisoned(numel, room)
        acc, wanted = (torch.full((numel,), float(POISON), device=DEVICE) for _ in range(2))
        fast.accumulate_compact(grad, held, acc, threshold_of(threshold), turn, one, rows)
        blocks.accumulate_compact(grad, held, wanted, threshold_of(threshold), turn, other, rows)
        assert torch.equal(acc.view(torch.int32), wanted.view(torch.int32))
        assert_same(one, other)
        skewed = torch.tensor([0, numel // 7, numel // 7, numel // 3, numel])  # one region is empty
        for cuts, capacity in (
            (even_cuts(numel, 1), numel),
            (even_cuts(numel, 3), max(numel // 200, 1)),
            (even_cuts(numel, 4), max(numel // 9, 1)),
            (skewed, max(numel // 50, 1)),
        ):
            cuts, size = cuts.to(DEVICE), len(cuts) - 1
            words = blocks.HEADER_WORDS + 2 * capacity
            ours, theirs = (torch.full((size, words), POISON, dtype=torch.int32, device=DEVICE) for _ in range(2))
            fast.pack_blocks(one, cuts, turn, ours, capacity, rows)
            blocks.pack_blocks(other, cuts, turn, theirs, capacity, rows)
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["none", "ragged"])
@pytest.mark.parametrize("turn", [0, 5, 1000])
def test_ties_have_room_in_turn_behind_what_is_larger(fast: ModuleType, turn: int, kind: str) -> None:
    """Few values, so that many are equal, and a few that are larger than all: too many for tiles and for blocks."""
    numel, room = 9 * TILE + 77, room_for(0.01)
    held = torch.randint(-2, 3, (numel,), generator=torch.Generator().manual_seed(turn)).float().to(DEVICE)
    held[[3, 500, 5000, numel - 1]] = 1e6
    rows, when = rows_of(numel, kind), turn_of(turn)
    one, other = poisoned(numel, room), poisoned(numel, room)
    fast.compact(held, threshold_of(1.0), when, one, rows)
    blocks.compact(held, threshold_of(1.0), when, other, rows)
    assert_same(one, other)
    assert int(one.count.max()) == room
    for size, capacity in ((1, 100), (3, 50), (3, 1), (2, 2000)):
        cuts = even_cuts(numel, size).to(DEVICE)
        words = blocks.HEADER_WORDS + 2 * capacity
        ours, theirs = (torch.full((size, words), POISON, dtype=torch.int32, device=DEVICE) for _ in range(2))
        fast.pack_blocks(one, cuts, when, ours, capacity, rows)
        blocks.pack_blocks(other, cuts, when, theirs, capacity, rows)
        assert torch.equal(ours, theirs)
        sent = ours[:, blocks.HEADER_WORDS + capacity :].view(torch.float32)
        assert int((sent == 1e6).sum()) == (4 if capacity > 1 else 3)


def test_find_of_awkward_numbers(fast: ModuleType) -> None:
    """Ties are found, zeros never, denormals are numbers, what is not finite is counted."""
    awkward = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.5, -1.5, 1.4999999, 3e38, float("inf"), float("nan"), -float("inf")]
    held = torch.tensor(awkward * 300, device=DEVICE)
    for threshold in (0.0, 1e-45, 1e-40, 1.5, 3e38):
        one, other = poisoned(len(held), TILE), poisoned(len(held), TILE)
        fast.compact(held, threshold_of(threshold), turn_of(0), one)
        blocks.compact(held, threshold_of(threshold), turn_of(0), other)
        assert_same(one, other)
        assert int(one.bad.sum()) == 3 * 300


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_and_deliver(fast: ModuleType, dtype: torch.dtype, bad: bool) -> None:
    numel, size = 9 * TILE + 5, 3
    capacity, cuts = numel // 20, even_cuts(numel, size).to(DEVICE)
    words = blocks.HEADER_WORDS + 2 * capacity
    packed = []
    for rank in range(2):  # what this rank sent; what all owners kept, which has some of it and some more
        found = Found.make(numel, TILE, torch.device(DEVICE))
        held = made(numel, torch.float32, 5) * (1 if rank else made(numel, torch.float32, 6).abs() > 0.1)
        blocks.compact(held, threshold_of(4.0), turn_of(0), found)
        packed.append(torch.zeros(size, words, dtype=torch.int32, device=DEVICE))
        blocks.pack_blocks(found, cuts, turn_of(0), packed[-1], capacity)
    sent, gathered = packed
    if bad:  # counts whose sum is zero in 32 bits
        gathered[:, 1] = torch.tensor([2**31 - 1, 2**31 - 1, 2], dtype=torch.int32)
    region = torch.where(made(numel, torch.float32, 8) > 0, made(numel, torch.float32, 8), blocks.NOTHING)
    ours, theirs = region.clone(), region.clone()
    fast.scatter_add(gathered[0], capacity, ours)
    blocks.scatter_add(gathered[0], capacity, theirs)
    assert torch.equal(ours, theirs)
    had = [torch.full((capacity,), float(POISON), device=DEVICE) for _ in range(2)]
    fast.gather_zero(gathered[0], capacity, ours, had[0])
    blocks.gather_zero(gathered[0], capacity, theirs, had[1])
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))
    assert torch.equal(had[0].view(torch.int32), had[1].view(torch.int32))
    held, start = made(numel, torch.float32, 9), made(numel, torch.float32, 10)
    results = []
    for kernels in (fast, blocks):
        out, acc = torch.full((numel,), 77.0, device=DEVICE).to(dtype), start.clone()
        told = torch.full((6,), POISON, dtype=torch.int32, device=DEVICE)
        kernels.deliver(gathered, sent, cuts, capacity, out, acc, held, told)
        results.append((out, acc, told))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    if bad:
        assert torch.equal(results[0][1], held)


AWKWARD_WORDS = [0, 1, -1, 5, 99, 100, 101, 4000, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_cannot_be_are_marked_and_written_nowhere(fast: ModuleType, seed: int) -> None:
    """Counts, indices and demands of any bits: both write the same, and nothing before or behind their vectors."""
    numel, size, capacity, margin = 3 * TILE, 3, 100, 4096
    cuts, random = even_cuts(numel, size).to(DEVICE), torch.Generator().manual_seed(seed)
    made_of = torch.tensor(AWKWARD_WORDS)
    words = made_of[torch.randint(len(made_of), (size, blocks.HEADER_WORDS + 2 * capacity), generator=random)]
    if seed % 2:  # such as can be, but for a word
        words[:, : blocks.HEADER_WORDS] = torch.tensor([capacity, 0, 300, 0])
        words[:, blocks.HEADER_WORDS : blocks.HEADER_WORDS + capacity] = torch.arange(capacity)
        words[1, seed] = 2000
    came = words.int().to(DEVICE)
    sent = torch.zeros_like(came)
    results = []
    for kernels in (fast, blocks):
        marked = came.clone()
        kernels.refuse_malformed(marked, cuts, capacity)
        shared = came.clone()
        kernels.refuse_malformed(shared, cuts[1:3], capacity)
        whole = torch.zeros(4, numel + 2 * margin, device=DEVICE)
        region, out, acc, held = whole[:, margin:-margin]
        value = torch.full((capacity,), float(POISON), device=DEVICE)
        kernels.scatter_add(came[0], capacity, region)
        kernels.gather_zero(came[1], capacity, region, value)
        unmarked = came.clone()
        unmarked[:, 1] = 0
        told = torch.zeros(6, dtype=torch.int32, device=DEVICE)
        if seed % 2:  # else what is written twice is written in any order
            kernels.deliver(unmarked, sent, cuts, capacity, out, acc, held, told)
        if seed == 1 and kernels is fast:
            assert marked[:, 1].tolist() == [0, 2000, 0]
        assert not bool(whole[:, :margin].any())
        assert not bool(whole[:, -margin:].any())
        results.append((marked, shared, told, *((out, acc, region, value) if seed % 2 else ())))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_settle(fast: ModuleType, dtype: torch.dtype, bad: int) -> None:
    held, acc, out = (
        made(3 * TILE + 5, torch.float32, 1),
        made(3 * TILE + 5, torch.float32, 2),
        made(3 * TILE + 5, dtype, 3),
    )
    for filling in (0.0, float("nan")):
        ours, theirs = (acc.clone(), out.clone()), (acc.clone(), out.clone())
        word = torch.tensor([bad], dtype=torch.int32, device=DEVICE)
        fast.rollback_if(word, ours[0], held, ours[1], filling)
        blocks.rollback_if(word, theirs[0], held, theirs[1], filling)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[0], held if bad else acc)
        torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0, equal_nan=True)
        assert bad == 0 or bool((ours[1].isnan() if filling else ours[1] == 0).all())
