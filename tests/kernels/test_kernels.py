"""The fast kernels give the reference's bits, at every length around a piece's and for every awkward number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from oktopk import MalformedError
from oktopk.kernels import WORTH_COMPILING, Kernels, kernels_for, numba_cpu, numpy_cpu, reference
from oktopk.kernels.numpy_cpu import PIECE
from tests.laws import same_bits

KERNELS: tuple[Kernels, ...] = (numpy_cpu, numba_cpu, reference)
FAST, PACKING = KERNELS[:2], (numba_cpu, reference)  # numpy has no packing of its own
AWKWARD = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.0, -1.0, 1.5, 3e38, -3e38]

lengths = st.sampled_from([0, 1, 2, 1000, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3]) | st.integers(0, 3000)
wide = st.sampled_from([torch.float32, torch.float64])
poisons = st.sampled_from([math.nan, -math.nan, math.inf, -math.inf])


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def int64(numbers: Any) -> Tensor:
    return torch.tensor(sorted(numbers), dtype=torch.int64)


@st.composite
def segments(draw: st.DrawFn, numel: int) -> tuple[list[int], list[float]]:
    """Draw bounds, some of empty segments, or of rows of one length; a floor for each that all, some or none reach."""
    row = draw(st.sampled_from([1, 7, 130, 1000]))
    inner = (
        draw(st.lists(st.integers(0, numel), max_size=6)) if draw(st.booleans()) else range(row, min(numel, 9000), row)
    )
    base = draw(st.sampled_from([0.0, 0.5, 2.0, 2.5, 100.0]))
    bounds = [0, *sorted(inner), numel]
    return bounds, [base * (1 + i % 5 / 10) for i in range(len(bounds) - 1)]


def test_the_cpu_has_its_own_and_other_devices_the_reference() -> None:
    assert kernels_for(torch.zeros(WORTH_COMPILING)) is numba_cpu
    assert kernels_for(torch.zeros(9)) is numpy_cpu
    assert kernels_for(torch.zeros(9, device="meta")) is reference


# ---- accumulate, accumulate_above, at_least


@settings(max_examples=60)
@given(numel=lengths, dtype=wide, first=st.integers(0, 2), data=st.data())
def test_the_passes_over_all_give_the_references_bits(
    numel: int, dtype: torch.dtype, first: int, data: st.DataObject
) -> None:
    """Wherever the vector begins in memory, and however short its segments are; a gradient may be narrower."""
    bounds, floors = data.draw(segments(numel))
    narrow = (
        data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])) if dtype.itemsize == 4 else dtype
    )
    held, grad = random(numel + first, dtype, seed=1)[first:], random(numel + first, narrow, seed=2)[first:]
    total = held + grad.to(dtype)
    index = reference.at_least(total, bounds, floors)
    for kernels in KERNELS:
        out = torch.empty(numel + first, dtype=dtype)[first:]
        assert kernels.accumulate(grad, held, out) == -1
        assert same_bits(out, total)
        out.fill_(77)
        bad, where, value = kernels.accumulate_above(grad, held, out, bounds, floors)
        assert bad == -1
        assert same_bits(out, total)
        assert torch.equal(where, index)
        assert same_bits(value, total[index])
        assert torch.equal(kernels.at_least(out, bounds, floors), index)
        assert same_bits(out, total)  # its input is left alone
        torch.testing.assert_close(kernels.mean_squares(out, held, bounds), reference.mean_squares(total, held, bounds))


@given(
    dtype=wide,
    values=st.lists(st.sampled_from(AWKWARD), max_size=30),
    threshold=st.sampled_from([0.0, 1e-45, 1e-40, 1.0, 1.5, 1e39, 1e300, math.inf]),
)
def test_at_least_is_what_its_words_say(dtype: torch.dtype, values: list[float], threshold: float) -> None:
    """Ties are in, zeros of either sign never, denormals are numbers; a threshold too large for float32 is no error."""
    acc = torch.tensor(values, dtype=dtype)
    limit = float(torch.tensor(threshold, dtype=dtype))
    expected = [i for i, x in enumerate(acc.tolist()) if abs(x) >= limit and x != 0]
    for kernels in KERNELS:
        assert kernels.at_least(acc, [0, len(values)], [threshold]).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_at_least_at_ties_across_pieces(dtype: torch.dtype) -> None:
    acc = torch.full((PIECE + 7,), -1.5, dtype=dtype)
    bounds = [0, PIECE - 2, PIECE + 7]
    for kernels in KERNELS:
        assert torch.equal(kernels.at_least(acc, bounds, [1.5, 1.5]), torch.arange(PIECE + 7))
        assert len(kernels.at_least(acc, bounds, [1.5000001, 1.5000001])) == 0
        assert torch.equal(kernels.at_least(acc, bounds, [2.0, 1.5]), torch.arange(PIECE - 2, PIECE + 7))


@given(dtype=wide, scale=st.sampled_from([1.0, 0.25, -3.0, 0.0]), decay=st.sampled_from([1.0, 0.9, 0.5, 0.0]))
def test_accumulate_scales_and_decays(dtype: torch.dtype, scale: float, decay: float) -> None:
    held, grad = random(PIECE + 5, dtype, seed=1), random(PIECE + 5, dtype, seed=2)
    wanted = torch.empty_like(held)
    reference.accumulate(grad, held, wanted, scale, decay)
    assert torch.allclose(wanted.double(), decay * held.double() + scale * grad.double(), atol=1e-5)
    for kernels in FAST:
        out = torch.empty_like(held)
        assert kernels.accumulate(grad, held, out, scale, decay) == -1
        assert same_bits(out, wanted)


@given(poison=poisons, at=st.lists(st.sampled_from([0, 3, 7, 8, 1001, PIECE - 1, PIECE, 2 * PIECE + 2]), min_size=1))
def test_the_first_that_is_not_finite_is_found(poison: float, at: list[int]) -> None:
    grad = random(2 * PIECE + 3, torch.float32)
    grad[at] = poison
    held, out = torch.zeros_like(grad), torch.empty_like(grad)
    for kernels in KERNELS:
        assert kernels.accumulate(grad, held, out) == min(at)
        assert kernels.accumulate_above(grad, held, out, [0, len(grad)], [3.0])[0] == min(at)


def test_accumulate_tells_large_from_infinite_and_keeps_denormals_and_minus_zero() -> None:
    """The square of a large number overflows; the number does not."""
    for kernels in KERNELS:
        out = torch.empty(3)
        assert kernels.accumulate(torch.tensor([1.0, 3e38, -3e38]), torch.tensor([0.0, 3e38, 3e38]), out) == 1
        assert kernels.accumulate(torch.tensor([1e-45, -0.0, 0.0]), torch.tensor([1e-45, -0.0, -0.0]), out) == -1
        assert same_bits(out, torch.tensor([2.8e-45, -0.0, 0.0]))
        for value in (1e20, 3e38, -3e38):
            grad = torch.full((PIECE + 1,), value)
            assert kernels.accumulate(grad, torch.zeros_like(grad), torch.empty_like(grad)) == -1


# ---- divide_


@pytest.mark.parametrize("numel", [0, 1, reference.CHUNK - 1, reference.CHUNK, 2 * reference.CHUNK + 3])
def test_divide_divides_every_chunk_and_sees_what_is_not_finite(numel: int) -> None:
    for divisor in (1, 2, 3):
        tensor = random(numel, torch.float32)
        wanted = tensor / divisor
        assert math.isfinite(reference.divide_(tensor, divisor))
        assert same_bits(tensor, wanted)
    for at in {0, numel // 2, numel - 1} if numel else ():
        for poison in (math.nan, math.inf, -math.inf):
            tensor = random(numel, torch.float32)
            tensor[at] = poison
            wanted = tensor / 2
            assert reference.divide_(tensor, 2) == math.inf
            assert torch.equal(tensor.nan_to_num(0.5), wanted.nan_to_num(0.5))
    assert reference.divide_(torch.full((10,), -3e38), 1) == pytest.approx(3e38)


# ---- merge, spread, shared, kth_largest, is_increasing


@st.composite
def sparse_parts(draw: st.DrawFn) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        index = draw(st.sets(st.integers(0, 40), max_size=20))
        value = draw(st.lists(st.sampled_from(AWKWARD), min_size=len(index), max_size=len(index)))
        parts.append((int64(index), torch.tensor(value)))
    return parts


@given(parts=sparse_parts())
def test_merge_is_the_references_and_leaves_its_input_alone(parts: list[tuple[Tensor, Tensor]]) -> None:
    index, value = [part[0] for part in parts], [part[1] for part in parts]
    before = [each.clone() for each in value]
    wanted = reference.merge(index, value)
    for kernels in KERNELS:
        merged = kernels.merge(index, value)
        assert torch.equal(merged[0], wanted[0])
        assert same_bits(merged[1], wanted[1])
        assert all(same_bits(each, was) for each, was in zip(value, before, strict=True))


@given(
    numel=lengths,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]),
    every=st.sampled_from([1, 7, 5000]),
)
def test_spread_writes_every_element(numel: int, dtype: torch.dtype, every: int) -> None:
    index = torch.arange(0, numel, every)
    wanted = torch.zeros(numel, dtype=dtype)
    wanted[index] = value = torch.arange(1, len(index) + 1).to(dtype)
    for kernels in KERNELS:
        out = torch.full((numel,), 77).to(dtype)
        kernels.spread(index, value, out)
        assert torch.equal(out, wanted)


@given(held=st.sets(st.integers(0, 50)), index=st.sets(st.integers(0, 50)))
def test_shared_is_what_its_words_say(held: set[int], index: set[int]) -> None:
    for kernels in KERNELS:
        found = kernels.shared(int64(held), int64(index)).tolist()
        assert found == [place for place, i in enumerate(sorted(index)) if i in held]


@given(
    dtype=wide,
    values=st.lists(st.sampled_from([abs(x) for x in AWKWARD]) | st.floats(0, 1, width=32), min_size=1, max_size=40),
)
def test_kth_largest_is_that_of_the_sorted(dtype: torch.dtype, values: list[float]) -> None:
    score = torch.tensor(values, dtype=dtype).abs()
    ordered = sorted(score.tolist(), reverse=True)
    for kernels in KERNELS:
        assert [kernels.kth_largest(score, k) for k in range(1, len(values) + 1)] == ordered


@given(index=st.lists(st.integers(0, 9)) | st.integers(0, 12).map(lambda n: list(range(n))))
def test_is_increasing_is_what_its_words_say(index: list[int]) -> None:
    for kernels in KERNELS:
        assert kernels.is_increasing(torch.tensor(index, dtype=torch.int64)) == (index == sorted(set(index)))


# ---- pack, unpack


@given(
    width=st.sampled_from([8, 12, 16]),
    gaps=st.lists(st.sampled_from([1, 2, 254, 255, 256, 4094, 4095, 4096, 65534, 65535, 65536, 200_000]), max_size=40),
)
def test_pack_and_unpack_are_the_references(width: int, gaps: list[int]) -> None:
    index = torch.tensor(gaps, dtype=torch.int64).cumsum(0)
    wanted, slots = reference.pack(index, width)
    packed, num_slots = numba_cpu.pack(index, width)
    assert num_slots == slots
    assert torch.equal(pad(packed, (0, len(wanted) - len(packed))), wanted)  # which fills up whole bytes, with zeros
    for kernels in PACKING:
        assert torch.equal(kernels.unpack(pad(packed, (0, 4)), slots, width), index)


# ---- data that cannot be


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_nan_among_the_scores_is_refused(dtype: torch.dtype) -> None:
    """One with its sign bit set was counted behind the last bin."""
    for sign in (1.0, -1.0):
        score = random(20_000, dtype).abs()
        score[77] = math.copysign(math.nan, sign)
        for kernels in KERNELS:
            for k in (1, 200, len(score)):
                with pytest.raises(MalformedError, match="a score is NaN"):
                    kernels.kth_largest(score, k)


def refused(kernels: Any, name: str, says: str, *args: Any) -> None:
    for module in kernels:
        with pytest.raises(MalformedError, match=says):
            getattr(module, name)(*args)


def test_arguments_that_cannot_be_are_refused() -> None:
    """-1 slots made room for none, and thousands were written."""
    for k in (0, -1, 4):
        refused(KERNELS, "kth_largest", "k must be 1 to 3", torch.ones(3), k)
    for width in (8, 12, 16):
        for slots in (-1, 2**31 - 1, -(2**31)):
            room = torch.zeros(20_000, dtype=torch.uint8)
            refused(PACKING, "unpack", f"do not hold {slots} slots of {width} bits", room, slots, width)
    for index in ([-1, 3], [5, 3], [10**6, 0], [3, 3]):
        refused(PACKING, "pack", "strictly increasing", torch.tensor(index), 8)
    for index in ([-1, 3], [5, 3], [0, 20_000]):
        arguments = torch.tensor(index), torch.ones(2), torch.empty(20_000)
        refused([numba_cpu], "spread", r"within 0\.\.19999", *arguments)
    ones = torch.ones(10)
    for bounds, segments_wanted in (([0, 11], 1), ([-1, 10], 1), ([0, 7, 5, 10], 3), ([0, 5, 10], 1)):
        refused([numba_cpu], "at_least", "bounds", ones, bounds, [1.0] * segments_wanted)
        refused([numba_cpu], "accumulate_above", "bounds", ones, ones, ones.clone(), bounds, [1.0] * segments_wanted)


def test_an_unaligned_result_is_not_streamed_to() -> None:
    """A store past the cache to an address that is no multiple of the element's size would be a fault."""
    whole = torch.zeros(4 * 20_001, dtype=torch.uint8)
    out = torch.frombuffer(whole.numpy().data, dtype=torch.float32, offset=1, count=20_000)
    numba_cpu.spread(torch.tensor([3, 19_999]), torch.tensor([1.0, 2.0]), out)
    assert out.nonzero().view(-1).tolist() == [3, 19_999]
    index = numba_cpu.accumulate_above(torch.ones(20_000), torch.zeros(20_000), out, [0, 20_000], [1.0])[1]
    assert len(index) == 20_000
