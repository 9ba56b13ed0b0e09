"""The fast kernels give the reference's bits, at every length around a piece's and for every awkward number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk import MalformedError
from oktopk.kernels import WORTH_COMPILING, Kernels, kernels_for, numba_cpu, numpy_cpu, reference
from oktopk.kernels.numpy_cpu import PIECE
from tests.laws import same_bits

LENGTHS = [0, 1, 2, 1000, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3]
WIDE = [torch.float32, torch.float64]
NARROW = {torch.float32: [torch.float32, torch.bfloat16, torch.float16], torch.float64: [torch.float64]}
AWKWARD = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.0, -1.0, 1.5, 3e38, -3e38]


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(params=[numpy_cpu, numba_cpu], ids=["numpy", "numba"])
def fast(request: pytest.FixtureRequest) -> Kernels:
    """The kernels that must give the reference's bits."""
    kernels: Kernels = request.param
    return kernels


def test_the_cpu_has_its_own_and_other_devices_the_reference() -> None:
    assert kernels_for(torch.zeros(WORTH_COMPILING)) is numba_cpu
    assert kernels_for(torch.zeros(9)) is numpy_cpu
    assert kernels_for(torch.zeros(9, device="meta")) is reference


# ---- at_least


def segments_of(numel: int) -> list[list[int]]:
    """Return bounds: one segment, many with empty ones among them, one that straddles every piece."""
    return [[0, numel], [0, 0, numel // 3, numel // 3, numel - numel // 7, numel, numel], [0, min(5, numel), numel]]


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_at_least_is_the_references(fast: Kernels, numel: int, dtype: torch.dtype) -> None:
    acc = random(numel, dtype)
    for bounds in segments_of(numel):
        for base in (0.0, 0.5, 2.0, 100.0):  # all, some, few, none
            thresholds = [base * (1 + i / 10) for i in range(len(bounds) - 1)]
            found = fast.at_least(acc, bounds, thresholds)
            assert torch.equal(found, reference.at_least(acc, bounds, thresholds))
            assert found.dtype == torch.int64
            assert bool((found.diff() > 0).all())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("kernels", [numpy_cpu, numba_cpu, reference], ids=["numpy", "numba", "reference"])
@given(values=st.lists(st.sampled_from(AWKWARD), max_size=30), threshold=st.sampled_from([0.0, 1e-45, 1e-40, 1.0, 1.5]))
def test_at_least_is_what_its_words_say(
    kernels: object, dtype: torch.dtype, values: list[float], threshold: float
) -> None:
    """Ties are in, zeros of either sign never, denormals are numbers like all others."""
    acc = torch.tensor(values, dtype=dtype)
    limit = float(torch.tensor(threshold, dtype=dtype))
    expected = [i for i, x in enumerate(acc.tolist()) if abs(x) >= limit and x != 0]
    assert kernels.at_least(acc, [0, len(values)], [threshold]).tolist() == expected


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_at_least_at_ties_across_pieces(fast: Kernels, dtype: torch.dtype) -> None:
    acc = torch.full((PIECE + 7,), -1.5, dtype=dtype)
    bounds = [0, PIECE - 2, PIECE + 7]
    assert torch.equal(fast.at_least(acc, bounds, [1.5, 1.5]), torch.arange(PIECE + 7))
    assert len(fast.at_least(acc, bounds, [1.5000001, 1.5000001])) == 0
    assert torch.equal(fast.at_least(acc, bounds, [2.0, 1.5]), torch.arange(PIECE - 2, PIECE + 7))


@pytest.mark.parametrize("threshold", [1e39, 1e300, math.inf])
def test_a_threshold_that_float32_cannot_hold_is_reached_by_nothing(threshold: float) -> None:
    """A scale times a score may be that large; it must be no warning and no overflow."""
    acc = torch.tensor([3e38, 1.0])
    for kernels in (numpy_cpu, numba_cpu, reference):
        assert len(kernels.at_least(acc, [0, 2], [threshold])) == 0


def test_at_least_leaves_its_input_alone(fast: Kernels) -> None:
    acc = random(PIECE + 1, torch.float32)
    before = acc.clone()
    fast.at_least(acc, [0, PIECE + 1], [0.5])
    assert same_bits(acc, before)


# ---- accumulate


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_accumulate_is_the_references(fast: Kernels, numel: int, dtype: torch.dtype) -> None:
    held = random(numel, dtype, seed=1)
    for narrow in NARROW[dtype]:
        grad = random(numel, narrow, seed=2)
        ours, theirs = torch.empty_like(held), torch.empty_like(held)
        assert fast.accumulate(grad, held, ours) == reference.accumulate(grad, held, theirs) == -1
        assert same_bits(ours, theirs)
        assert same_bits(ours, held + grad.to(dtype))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(("scale", "decay"), [(0.25, 1.0), (1.0, 0.9), (-3.0, 0.5), (0.0, 0.0)])
def test_accumulate_scales_and_decays(fast: Kernels, scale: float, decay: float, dtype: torch.dtype) -> None:
    held, grad = random(PIECE + 5, dtype, seed=1), random(PIECE + 5, dtype, seed=2)
    ours, theirs = torch.empty_like(held), torch.empty_like(held)
    assert (
        fast.accumulate(grad, held, ours, scale, decay) == reference.accumulate(grad, held, theirs, scale, decay) == -1
    )
    assert same_bits(ours, theirs)
    assert torch.allclose(ours.double(), decay * held.double() + scale * grad.double(), atol=1e-5)


@pytest.mark.parametrize("row", [1, 7, 130, 1000])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_rows_have_floors_of_their_own(fast: Kernels, dtype: torch.dtype, row: int) -> None:
    """However short they are, and wherever the vector begins in memory."""
    for first in range(3):
        held, grad = random(20_003, dtype, seed=1)[first:], random(20_003, dtype, seed=2)[first:]
        numel = len(held)
        bounds = [0, *range(row, numel, row), numel]
        floors = [1 + i % 5 / 2 for i in range(len(bounds) - 1)]
        ours, theirs = torch.empty(20_003, dtype=dtype)[first:], torch.empty_like(held)
        found, wanted = (
            k.accumulate_above(grad, held, o, bounds, floors) for k, o in ((fast, ours), (reference, theirs))
        )
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])
        assert same_bits(found[2], wanted[2])
        assert same_bits(ours, theirs)
        assert torch.equal(fast.at_least(ours, bounds, floors), wanted[1])
        measured, wanted_squares = (kernels.mean_squares(ours, held, bounds) for kernels in (fast, reference))
        torch.testing.assert_close(measured, wanted_squares)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("at", [[0], [PIECE - 1], [PIECE], [PIECE + 9], [2 * PIECE + 2], [PIECE + 1, 3], [5, PIECE]])
def test_accumulate_finds_the_first_that_is_not_finite(fast: Kernels, at: list[int], poison: float) -> None:
    grad = random(2 * PIECE + 3, torch.float32)
    grad[at] = poison
    held, out = torch.zeros_like(grad), torch.empty_like(grad)
    assert fast.accumulate(grad, held, out) == reference.accumulate(grad, held, out) == min(at)


def test_accumulate_finds_a_sum_that_overflows(fast: Kernels) -> None:
    grad = torch.tensor([1.0, 3e38, -3e38])
    assert fast.accumulate(grad, torch.tensor([0.0, 3e38, 3e38]), torch.empty(3)) == 1


@pytest.mark.parametrize("value", [1e20, 3e38, -3e38])
def test_accumulate_does_not_take_large_for_infinite(fast: Kernels, value: float) -> None:
    """The square of a large number overflows; the number does not."""
    grad = torch.full((PIECE + 1,), value)
    assert fast.accumulate(grad, torch.zeros_like(grad), torch.empty_like(grad)) == -1


def test_accumulate_keeps_denormals_and_minus_zero() -> None:
    grad, held = torch.tensor([1e-45, -0.0, 0.0]), torch.tensor([1e-45, -0.0, -0.0])
    for kernels in (numpy_cpu, numba_cpu, reference):
        out = torch.empty(3)
        assert kernels.accumulate(grad, held, out) == -1
        assert same_bits(out, torch.tensor([2.8e-45, -0.0, 0.0]))


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("floor", [0.0, 0.5, 2.0, 2.5, 100.0])
def test_accumulate_above_is_the_references(fast: Kernels, numel: int, dtype: torch.dtype, floor: float) -> None:
    held = random(numel, dtype, seed=1)
    for narrow in NARROW[dtype]:
        grad = random(numel, narrow, seed=2)
        ours, theirs = torch.empty_like(held), torch.empty_like(held)
        bad, index, value = fast.accumulate_above(grad, held, ours, [0, numel], [floor])
        wanted = reference.accumulate_above(grad, held, theirs, [0, numel], [floor])
        assert bad == wanted[0] == -1
        assert same_bits(ours, theirs)
        assert torch.equal(index, wanted[1])
        assert same_bits(value, wanted[2])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("at", [0, 7, 8, 1001, 1002])
def test_accumulate_above_finds_the_first_that_is_not_finite(fast: Kernels, at: int, poison: float) -> None:
    grad = random(1003, torch.float32)
    grad[at] = poison
    assert fast.accumulate_above(grad, torch.zeros(1003), torch.empty(1003), [0, 1003], [3.0])[0] == at


# ---- divide_


@pytest.mark.parametrize("numel", [0, 1, reference.CHUNK - 1, reference.CHUNK, 2 * reference.CHUNK + 3])
@pytest.mark.parametrize("divisor", [1, 2, 3])
def test_divide_divides_every_chunk(numel: int, divisor: int) -> None:
    tensor = random(numel, torch.float32)
    wanted = tensor / divisor
    assert math.isfinite(reference.divide_(tensor, divisor))
    assert same_bits(tensor, wanted)


@pytest.mark.parametrize("at", [0, reference.CHUNK - 1, reference.CHUNK, 2 * reference.CHUNK + 2])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_divide_sees_what_is_not_finite_and_still_divides_the_rest(at: int, poison: float) -> None:
    tensor = random(2 * reference.CHUNK + 3, torch.float32)
    tensor[at] = poison
    wanted = tensor / 2
    assert reference.divide_(tensor, 2) == math.inf
    assert torch.equal(tensor.nan_to_num(0.5), wanted.nan_to_num(0.5))


def test_divide_does_not_take_large_for_infinite() -> None:
    assert reference.divide_(torch.full((10,), -3e38), 1) == pytest.approx(3e38)


# ---- merge, shared


@st.composite
def sparse_parts(draw: st.DrawFn) -> list[tuple[Tensor, Tensor]]:
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        index = sorted(draw(st.sets(st.integers(0, 40), max_size=20)))
        value = draw(st.lists(st.sampled_from(AWKWARD), min_size=len(index), max_size=len(index)))
        parts.append((torch.tensor(index, dtype=torch.int64), torch.tensor(value)))
    return parts


@given(parts=sparse_parts())
def test_merge_is_the_references(parts: list[tuple[Tensor, Tensor]]) -> None:
    index, value = [part[0] for part in parts], [part[1] for part in parts]
    wanted = reference.merge(index, value)
    for kernels in (numpy_cpu, numba_cpu):
        merged = kernels.merge(index, value)
        assert torch.equal(merged[0], wanted[0])
        assert same_bits(merged[1], wanted[1])


def test_merge_leaves_its_input_alone() -> None:
    """A part may be the only one, or lie in a block that arrived."""
    block = torch.arange(10.0)
    for kernels in (numpy_cpu, numba_cpu, reference):
        kernels.merge([torch.arange(10), torch.arange(10)], [block, block])
        assert torch.equal(block, torch.arange(10.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_spread_writes_every_element(numel: int, dtype: torch.dtype) -> None:
    for every in (1, 7, 5000):
        index = torch.arange(0, numel, every)
        value = torch.arange(1, len(index) + 1).to(dtype)
        wanted = torch.zeros(numel, dtype=dtype)
        wanted[index] = value
        for kernels in (reference, numpy_cpu, numba_cpu):
            out = torch.full((numel,), 77).to(dtype)
            kernels.spread(index, value, out)
            assert torch.equal(out, wanted)


@given(held=st.sets(st.integers(0, 50)), index=st.sets(st.integers(0, 50)))
def test_shared_is_what_its_words_say(held: set[int], index: set[int]) -> None:
    ours, asked = (torch.tensor(sorted(numbers), dtype=torch.int64) for numbers in (held, index))
    for kernels in (numpy_cpu, numba_cpu, reference):
        assert kernels.shared(ours, asked).tolist() == [place for place, i in enumerate(sorted(index)) if i in held]


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@given(values=st.lists(st.sampled_from([abs(x) for x in AWKWARD]) | st.floats(0, 1, width=32), min_size=1, max_size=40))
def test_kth_largest_is_that_of_the_sorted(dtype: torch.dtype, values: list[float]) -> None:
    score = torch.tensor(values, dtype=dtype).abs()
    ordered = sorted(score.tolist(), reverse=True)
    for kernels in (numpy_cpu, numba_cpu, reference):
        assert [kernels.kth_largest(score, k) for k in range(1, len(values) + 1)] == ordered


@pytest.mark.parametrize("index", [[], [3], [0, 1, 2], [0, 2, 2], [5, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]], ids=str)
def test_is_increasing_is_what_its_words_say(index: list[int]) -> None:
    for kernels in (numpy_cpu, numba_cpu, reference):
        assert kernels.is_increasing(torch.tensor(index, dtype=torch.int64)) == (index == sorted(set(index)))


# ---- pack, unpack


@pytest.mark.parametrize("width", [8, 12, 16])
@given(
    gaps=st.lists(st.sampled_from([1, 2, 254, 255, 256, 4094, 4095, 4096, 65534, 65535, 65536, 200_000]), max_size=40)
)
def test_pack_and_unpack_are_the_references(width: int, gaps: list[int]) -> None:
    index = torch.tensor(gaps, dtype=torch.int64).cumsum(0)
    wanted, slots = reference.pack(index, width)
    packed, num_slots = numba_cpu.pack(index, width)
    assert num_slots == slots
    assert torch.equal(
        packed, wanted[: len(packed)]
    )  # the reference fills its last slots up to whole bytes, with zeros
    assert not wanted[len(packed) :].any()
    for kernels in (numba_cpu, reference):
        assert torch.equal(kernels.unpack(torch.nn.functional.pad(packed, (0, 4)), slots, width), index)


# ---- data that cannot be


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_nan_among_the_scores_is_refused(dtype: torch.dtype, sign: float) -> None:
    """One with its sign bit set was counted behind the last bin."""
    score = random(20_000, dtype).abs()
    score[77] = math.copysign(math.nan, sign)
    for kernels in (numpy_cpu, numba_cpu, reference):
        for k in (1, 200, len(score)):
            with pytest.raises(MalformedError, match="a score is NaN"):
                kernels.kth_largest(score, k)


@pytest.mark.parametrize("k", [0, -1, 4])
def test_there_is_no_such_score(k: int) -> None:
    for kernels in (numpy_cpu, numba_cpu, reference):
        with pytest.raises(MalformedError, match="k must be 1 to 3"):
            kernels.kth_largest(torch.ones(3), k)


@pytest.mark.parametrize("width", [8, 12, 16])
@pytest.mark.parametrize("slots", [-1, 2**31 - 1, -(2**31)])
def test_slots_that_are_not_there_are_not_unpacked(width: int, slots: int) -> None:
    """-1 made room for none, and thousands were written."""
    for kernels in (numba_cpu, reference):
        with pytest.raises(MalformedError, match=f"do not hold {slots} slots of {width} bits"):
            kernels.unpack(torch.zeros(20_000, dtype=torch.uint8), slots, width)


@pytest.mark.parametrize("index", [[-1, 3], [5, 3], [10**6, 0], [3, 3]], ids=str)
def test_indices_without_gaps_are_not_packed(index: list[int]) -> None:
    for kernels in (numba_cpu, reference):
        with pytest.raises(MalformedError, match="strictly increasing"):
            kernels.pack(torch.tensor(index), 8)


@pytest.mark.parametrize("index", [[-1, 3], [5, 3], [0, 20_000]], ids=str)
def test_what_lies_outside_is_not_spread(index: list[int]) -> None:
    with pytest.raises(MalformedError, match=r"within 0\.\.19999"):
        numba_cpu.spread(torch.tensor(index), torch.ones(2), torch.empty(20_000))


@pytest.mark.parametrize("bounds", [[0, 11], [-1, 10], [0, 7, 5, 10], [0, 5, 10]], ids=str)
def test_segments_outside_the_vector_are_refused(bounds: list[int]) -> None:
    floors = [1.0] if len(bounds) != 4 else [1.0] * 3
    with pytest.raises(MalformedError, match="bounds"):
        numba_cpu.at_least(torch.ones(10), bounds, floors)
    with pytest.raises(MalformedError, match="bounds"):
        numba_cpu.accumulate_above(torch.ones(10), torch.ones(10), torch.ones(10), bounds, floors)


def test_an_unaligned_result_is_not_streamed_to() -> None:
    """A store past the cache to an address that is no multiple of the element's size would be a fault."""
    whole = torch.zeros(4 * 20_001, dtype=torch.uint8)
    out = torch.frombuffer(whole.numpy().data, dtype=torch.float32, offset=1, count=20_000)
    numba_cpu.spread(torch.tensor([3, 19_999]), torch.tensor([1.0, 2.0]), out)
    assert out.nonzero().view(-1).tolist() == [3, 19_999]
    index = numba_cpu.accumulate_above(torch.ones(20_000), torch.zeros(20_000), out, [0, 20_000], [1.0])[1]
    assert len(index) == 20_000
