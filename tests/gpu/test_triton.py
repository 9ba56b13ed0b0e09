"""The triton kernels give the bits of the plain ones, at every length around a tile's and for every awkward number."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from oktopk.kernels import blocks
from oktopk.kernels.blocks import TILE, Found, room_for
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
    from oktopk.kernels import triton

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


def threshold_of(value: float) -> Tensor:
    return torch.tensor([value], device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_find_and_send(fast: ModuleType, numel: int, dtype: torch.dtype) -> None:
    grad, held = made(numel, dtype, 1), made(numel, torch.float32, 2)
    for threshold, density in ((0.0, 1.0), (8.0, 0.02), (8.0, 1.0), (1e30, 0.01)):  # all, some, none
        room = room_for(density)
        one, other = poisoned(numel, room), poisoned(numel, room)
        acc, wanted = (torch.full((numel,), float(POISON), device=DEVICE) for _ in range(2))
        fast.find(grad, held, acc, threshold_of(threshold), one)
        blocks.find(grad, held, wanted, threshold_of(threshold), other)
        assert torch.equal(acc.view(torch.int32), wanted.view(torch.int32))
        assert_same(one, other)
        for size, capacity in ((1, numel), (3, max(numel // 200, 1)), (4, max(numel // 9, 1))):
            cuts = even_cuts(numel, size).to(DEVICE)
            words = blocks.HEADER_WORDS + 2 * capacity
            ours, theirs = (torch.full((size, words), POISON, dtype=torch.int32, device=DEVICE) for _ in range(2))
            fast.send(one, cuts, 7, ours, capacity)
            blocks.send(other, cuts, 7, theirs, capacity)
            assert torch.equal(ours, theirs)


def test_find_of_awkward_numbers(fast: ModuleType) -> None:
    """Ties are found, zeros never, denormals are numbers, what is not finite is counted."""
    awkward = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.5, -1.5, 1.4999999, 3e38, float("inf"), float("nan"), -float("inf")]
    held = torch.tensor(awkward * 300, device=DEVICE)
    for threshold in (0.0, 1e-45, 1e-40, 1.5, 3e38):
        one, other = poisoned(len(held), TILE), poisoned(len(held), TILE)
        fast.find_in(held, threshold_of(threshold), one)
        blocks.find_in(held, threshold_of(threshold), other)
        assert_same(one, other)
        assert int(one.bad.sum()) == 3 * 300


def test_find_in_a_part(fast: ModuleType) -> None:
    held = made(5 * TILE, torch.float32, 3)
    held[2 * TILE + 5 :] = 0
    one, other = poisoned(len(held), TILE), poisoned(len(held), TILE)
    fast.find_in(held, threshold_of(1.0), one, torch.tensor([2 * TILE + 5], device=DEVICE))
    blocks.find_in(held, threshold_of(1.0), other)
    assert_same(one, other)


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
        blocks.find_in(held, threshold_of(4.0), found)
        packed.append(torch.zeros(size, words, dtype=torch.int32, device=DEVICE))
        blocks.send(found, cuts, 0, packed[-1], capacity)
    sent, gathered = packed
    gathered[1, 1] = int(bad)
    region = made(numel, torch.float32, 8)
    ours, theirs = region.clone(), region.clone()
    for sign in (1, 0):
        fast.add(gathered[0], capacity, ours, sign)
        blocks.add(gathered[0], capacity, theirs, sign)
        assert torch.equal(ours, theirs)
    held, start = made(numel, torch.float32, 9), made(numel, torch.float32, 10)
    results = []
    for kernels in (fast, blocks):
        out, acc = torch.full((numel,), 77.0, device=DEVICE).to(dtype), start.clone()
        kernels.deliver(gathered, sent, cuts, capacity, out, acc, held)
        results.append((out, acc))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    if bad:
        assert torch.equal(results[0][1], held)
