"""The fast kernels give the reference's bits, at every length around a piece's and for every awkward number."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk import MalformedError
from oktopk.codec.indices import field_words
from oktopk.kernels import NUMPY, REFERENCE, WORTH_COMPILING, kernels_for, reference
from oktopk.kernels.numba_cpu import NumbaKernels
from oktopk.kernels.numpy_cpu import PIECE
from tests.cases import DTYPES
from tests.laws import same_bits

NUMBA = NumbaKernels()
KERNELS = (NUMPY, NUMBA, REFERENCE)
FAST, PACKING = KERNELS[:2], (NUMBA, REFERENCE)  # numpy has no packing of its own
AWKWARD = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.0, -1.0, 1.5, 3e38, -3e38]

lengths = st.sampled_from([0, 1, 2, 1000, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3]) | st.integers(0, 3000)
wide = st.sampled_from([torch.float32, torch.float64])
PAIRS = [(torch.float64, torch.float64), *((torch.float32, each) for each in DTYPES if each != torch.float64)]
poisons = st.sampled_from([math.nan, -math.nan, math.inf, -math.inf])
awkward = st.sampled_from(AWKWARD)


def random(numel, dtype, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def int64(numbers):
    return torch.tensor(sorted(numbers), dtype=torch.int64)


@st.composite
def segments(draw, numel):
    """Draw bounds, some of empty segments, or of rows of one length; a floor for each that all, some or none reach."""
    rows = st.sampled_from([1, 7, 130, 1000]).map(lambda row: range(row, min(numel, 9000), row))
    bounds = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=6) | rows)), numel]
    base = draw(st.sampled_from([0.0, 0.5, 2.0, 2.5, 100.0]))
    return bounds, [base * (1 + i % 5 / 10) for i in range(len(bounds) - 1)]


def test_the_cpu_has_its_own_and_other_devices_the_reference():
    assert isinstance(kernels_for(torch.zeros(WORTH_COMPILING)), NumbaKernels)
    assert kernels_for(torch.zeros(9)) is NUMPY
    assert kernels_for(torch.zeros(9, device="meta")) is REFERENCE


@settings(max_examples=60)
@given(numel=lengths, dtypes=st.sampled_from(PAIRS), first=st.integers(0, 2), ties=st.booleans(), data=st.data())
def test_the_passes_over_all_give_the_references_bits(numel, dtypes, first, ties, data):
    """Wherever the vector begins in memory, and however short its segments are; a gradient may be narrower."""
    bounds, floors = data.draw(segments(numel))
    held, grad = (random(numel + first, dtype, seed)[first:] for seed, dtype in enumerate(dtypes))
    if ties:  # with each other, and with the floors of every fifth segment
        held, grad = held.mul(2).round().div(2), grad.mul(2).round().div(2)
    dtype, total = held.dtype, held + grad.to(held.dtype)
    index = REFERENCE.at_least(total, bounds, floors)
    limits = torch.tensor(floors, dtype=dtype).repeat_interleave(torch.tensor(bounds).diff())
    assert torch.equal(index, ((total.abs() >= limits) & (total != 0)).nonzero().view(-1))
    for kernels in KERNELS:
        out = torch.empty(numel + first, dtype=dtype)[first:]
        assert kernels.accumulate(grad, held, out) == -1
        assert same_bits(out, total)
        out.fill_(77)
        for most in (len(index), numel):
            out.fill_(77)
            bad, noted = kernels.accumulate_above(grad, held, out, bounds, floors, most)
            assert bad == -1
            assert same_bits(out, total)
        if len(index):
            assert kernels.accumulate_above(grad, held, out, bounds, floors, len(index) - 1) == (-1, None)
        where, value = noted
        assert torch.equal(where, index)
        assert same_bits(value, total[index])
        assert torch.equal(kernels.at_least(out, bounds, floors), index)
        assert same_bits(out, total)  # its input is left alone
        torch.testing.assert_close(kernels.mean_squares(out, held, bounds), REFERENCE.mean_squares(total, held, bounds))


@given(wide, st.lists(awkward, max_size=30), st.sampled_from([0.0, 1e-45, 1e-40, 1.0, 1.5, 1e39, 1e300, math.inf]))
def test_at_least_is_what_its_words_say(dtype, values, threshold):
    """Ties are in, zeros of either sign never, denormals are numbers; a threshold too large for float32 is no error."""
    acc = torch.tensor(values, dtype=dtype)
    limit = float(torch.tensor(threshold, dtype=dtype))
    expected = [i for i, x in enumerate(acc.tolist()) if abs(x) >= limit and x != 0]
    for kernels in KERNELS:
        assert kernels.at_least(acc, [0, len(values)], [threshold]).tolist() == expected


def test_at_least_of_every_second_element():
    acc = random(20_000, torch.float32)[::2]
    for kernels in KERNELS:
        assert torch.equal(kernels.at_least(acc, [0, len(acc)], [1.0]), (acc.abs() >= 1).nonzero().view(-1))


@given(dtype=wide, scale=st.sampled_from([1.0, 0.25, -3.0, 0.0]), decay=st.sampled_from([1.0, 0.9, 0.5, 0.0]))
def test_accumulate_scales_and_decays(dtype, scale, decay):
    held, grad = random(PIECE + 5, dtype, seed=1), random(PIECE + 5, dtype, seed=2)
    wanted = torch.empty_like(held)
    REFERENCE.accumulate(grad, held, wanted, scale, decay)
    assert torch.allclose(wanted.double(), decay * held.double() + scale * grad.double(), atol=1e-5)
    for kernels in FAST:
        out = torch.empty_like(held)
        assert kernels.accumulate(grad, held, out, scale, decay) == -1
        assert same_bits(out, wanted)


@given(poison=poisons, at=st.lists(st.sampled_from([0, 3, 7, 8, 1001, PIECE - 1, PIECE, 2 * PIECE + 2]), min_size=1))
def test_the_first_that_is_not_finite_is_found(poison, at):
    grad = random(2 * PIECE + 3, torch.float32)
    grad[at] = poison
    held, out = torch.zeros_like(grad), torch.empty_like(grad)
    for kernels in KERNELS:
        assert kernels.accumulate(grad, held, out) == min(at)
        for most in (0, len(grad)):
            assert kernels.accumulate_above(grad, held, out, [0, len(grad)], [3.0], most)[0] == min(at)


def test_accumulate_tells_large_from_infinite_and_keeps_denormals_and_minus_zero():
    """The square of a large number overflows; the number does not."""
    for kernels in KERNELS:
        out = torch.empty(3)
        assert kernels.accumulate(torch.tensor([1.0, 3e38, -3e38]), torch.tensor([0.0, 3e38, 3e38]), out) == 1
        assert kernels.accumulate(torch.tensor([1e-45, -0.0, 0.0]), torch.tensor([1e-45, -0.0, -0.0]), out) == -1
        assert same_bits(out, torch.tensor([2.8e-45, -0.0, 0.0]))
        for value in (1e20, 3e38, -3e38):
            grad = torch.full((PIECE + 1,), value)
            assert kernels.accumulate(grad, torch.zeros_like(grad), torch.empty_like(grad)) == -1


@pytest.mark.parametrize("numel", [0, 1, reference.CHUNK - 1, reference.CHUNK, 2 * reference.CHUNK + 3])
def test_divide_divides_every_chunk_and_sees_what_is_not_finite(numel):
    places = {0, numel // 2, numel - 1} if numel else ()
    for divisor, at, poison in [(3, None, 0.0), *itertools.product((2,), places, (math.nan, math.inf, -math.inf))]:
        tensor = random(numel, torch.float32)
        if at is not None:
            tensor[at] = poison
        wanted = tensor / divisor
        assert math.isfinite(reference.divide_(tensor, divisor)) == (at is None)
        assert same_bits(tensor, wanted)
    assert reference.divide_(torch.full((10,), -3e38), 1) == pytest.approx(3e38)


@given(st.lists(st.dictionaries(st.integers(0, 40), awkward, max_size=20), min_size=1, max_size=6))
def test_merge_is_the_references_and_leaves_its_input_alone(parts):
    index = [int64(part) for part in parts]
    value = [torch.tensor([part[i] for i in sorted(part)]) for part in parts]
    before = [each.clone() for each in value]
    wanted = REFERENCE.merge(index, value)
    for kernels in KERNELS:
        merged = kernels.merge(index, value)
        assert torch.equal(merged[0], wanted[0])
        assert same_bits(merged[1], wanted[1])
        assert all(same_bits(each, was) for each, was in zip(value, before, strict=True))


@given(lengths, st.sampled_from([*DTYPES, torch.int64]), st.sampled_from([1, 7, 5000]), st.sampled_from([0, 9, 2**40]))
def test_spread_writes_every_element(numel, dtype, every, start):
    index = torch.arange(0, numel, every)
    wanted = torch.zeros(numel, dtype=dtype)
    wanted[index] = value = torch.arange(1, len(index) + 1).to(dtype)
    for kernels in KERNELS:
        out = torch.full((numel,), 77).to(dtype)
        kernels.spread(index + start, value, out, start)
        assert torch.equal(out, wanted)


@given(wide, st.lists(st.integers(0, 40)))
def test_put_and_add_are_the_references(dtype, places):
    """In the order of the indices, whether they are sorted or occur twice."""
    index, before = torch.tensor(places, dtype=torch.int64), random(41, dtype)
    value = random(len(index), dtype, seed=1)
    for name, at in (("put_", torch.unique(index)), ("add_", index)):
        wanted = before.clone()
        getattr(REFERENCE, name)(wanted, at, value[: len(at)])
        for kernels in FAST:
            out = before.clone()
            getattr(kernels, name)(out, at, value[: len(at)])
            assert same_bits(out, wanted)


@given(held=st.sets(st.integers(0, 50)), index=st.sets(st.integers(0, 50)))
def test_shared_is_what_its_words_say(held, index):
    for kernels in KERNELS:
        found = kernels.shared(int64(held), int64(index)).tolist()
        assert found == [place for place, i in enumerate(sorted(index)) if i in held]


@given(wide, st.lists(awkward.map(abs) | st.floats(0, 1, width=32), min_size=1, max_size=40))
def test_kth_largest_is_that_of_the_sorted(dtype, values):
    score = torch.tensor(values, dtype=dtype).abs()
    ordered = sorted(score.tolist(), reverse=True)
    for kernels in KERNELS:
        assert [kernels.kth_largest(score, k) for k in range(1, len(values) + 1)] == ordered


@given(wide, st.lists(st.sampled_from([0.0, 1e-45, 0.5, 1.0, 1.5, math.inf]), min_size=1, max_size=200))
def test_first_at_least_is_the_references(dtype, values):
    """For each k, also where equal scores stand on both sides of the last place."""
    score = torch.tensor(values, dtype=dtype)
    for k in {1, len(values) // 2 + 1, len(values)}:
        threshold = REFERENCE.kth_largest(score, k)
        order = sorted(range(len(values)), key=lambda i: (-float(score[i]), i))[:k]
        for kernels in KERNELS:
            found = kernels.first_at_least(score, threshold, k).tolist()
            assert found == sorted(i for i in order if score[i] > 0)


@given(st.lists(awkward | poisons | st.floats(width=32), max_size=20), st.integers(0, 600), st.integers(-149, 127))
def test_quantise_and_scaled_are_the_references(values, numel, exponent):
    """Groups of any size and scale, with every awkward number, powers of two, and ties of rounding among them."""
    value = (random(numel, torch.float32) * 2).round() / 2 * 2.0**exponent
    value = torch.cat([torch.tensor(values, dtype=torch.float32), value, torch.tensor([2.0**exponent * 127])])
    steps, scale = REFERENCE.quantise(value)
    quantised = NUMBA.quantise(value)
    assert torch.equal(quantised[0], steps)
    assert same_bits(quantised[1], scale)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert same_bits(NUMBA.scaled(steps, scale, dtype), REFERENCE.scaled(steps, scale, dtype))


@given(index=st.lists(st.integers(0, 9)) | st.integers(0, 12).map(lambda n: list(range(n))))
def test_is_increasing_is_what_its_words_say(index):
    for kernels in KERNELS:
        assert kernels.is_increasing(torch.tensor(index, dtype=torch.int64)) == (index == sorted(set(index)))


GAPS = [1, 2, 31, 32, 33, 254, 255, 4095, 4096, 65535, 65536, 200_000]


@given(st.integers(1, 17) | st.just(31), st.lists(st.sampled_from(GAPS), max_size=40), st.integers(0, 2**31))
def test_pack_and_unpack_are_the_references(low_bits, gaps, start):
    index = start + torch.tensor(gaps, dtype=torch.int64).cumsum(0)
    sizes = field_words(sum(gaps) + 1, len(index) + 1, low_bits)
    wanted, packed = ([torch.zeros(words, dtype=torch.int32) for words in sizes] for _ in range(2))
    REFERENCE.pack_(index, start, low_bits, *wanted)
    NUMBA.pack_(index, start, low_bits, *packed)
    assert all(map(torch.equal, packed, wanted))
    for kernels in PACKING:
        assert torch.equal(kernels.unpack(*packed, start, low_bits, len(index)), index)


def refused(kernels, name, says, *args):
    for module in kernels:
        with pytest.raises(MalformedError, match=says):
            getattr(module, name)(*args)


def test_arguments_that_cannot_be_are_refused():
    """A count of -1 made room for none, and a NaN with its sign bit set was counted behind the last bin."""
    for dtype, nan in itertools.product((torch.float32, torch.float64), (math.nan, -math.nan)):
        score = random(20_000, dtype).abs()
        score[77] = nan
        for k in (1, 200, len(score)):
            refused(KERNELS, "kth_largest", "a score is NaN", score, k)
    for k in (0, -1, 4):
        refused(KERNELS, "kth_largest", "k must be 1 to 3", torch.ones(3), k)
    words = torch.zeros(2, 20_000, dtype=torch.int32)
    for low_bits, count in itertools.product((1, 8, 31), (-1, 2**31 - 1, -(2**31))):
        refused(PACKING, "unpack", f"do not hold {low_bits} bits of each of {count}", *words, 0, low_bits, count)
    for low_bits in (0, 32, -1):
        refused(PACKING, "unpack", f"do not hold {low_bits} bits", *words, 0, low_bits, 1)
    for index in ([-1, 3], [5, 3], [10**6, 0], [3, 3]):
        refused(PACKING, "pack_", "strictly increasing", torch.tensor(index), 0, 8, *words)
    refused(PACKING, "pack_", "strictly increasing", torch.tensor([4, 5]), 5, 8, *words)
    refused(PACKING, "pack_", "do not hold the high parts", torch.tensor([4, 32 * 20_000 * 8]), 0, 3, *words)
    refused(PACKING, "pack_", "do not hold 8 bits", torch.tensor([4, 5]), 0, 8, words[0, :0], words[1])
    for index in ([-1, 3], [5, 3], [0, 20_000]):
        arguments = torch.tensor(index), torch.ones(2), torch.empty(20_000)
        refused([NUMBA], "spread", r"within 0\.\.19999", *arguments)
    for index, value in (([-1, 3], torch.ones(2)), ([0, 20_000], torch.ones(2)), ([0, 1], torch.ones(1))):
        for name in ("put_", "add_"):
            refused([NUMBA], name, "indices, of which", torch.zeros(20_000), torch.tensor(index), value)
    refused(
        [NUMBA],
        "first_at_least",
        "3 scores are above 1",
        torch.full((20_000,), 0.5).index_fill_(0, torch.arange(3), 2),
        1.0,
        2,
    )
    refused(
        [NUMBA],
        "scaled",
        "2 scales are not those of 256 values",
        torch.ones(256, dtype=torch.int8),
        torch.ones(2),
        torch.float32,
    )
    ones = torch.ones(10)
    for bounds, segments_wanted in (([0, 11], 1), ([-1, 10], 1), ([0, 7, 5, 10], 3), ([0, 5, 10], 1)):
        refused([NUMBA], "at_least", "bounds", ones, bounds, [1.0] * segments_wanted)
        refused([NUMBA], "accumulate_above", "bounds", ones, ones, ones.clone(), bounds, [1.0] * segments_wanted, 10)


def test_an_unaligned_result_is_not_streamed_to():
    """A store past the cache to an address that is no multiple of the element's size would be a fault."""
    whole = torch.zeros(4 * 20_001, dtype=torch.uint8)
    out = torch.frombuffer(whole.numpy().data, dtype=torch.float32, offset=1, count=20_000)
    NUMBA.spread(torch.tensor([3, 19_999]), torch.tensor([1.0, 2.0]), out)
    assert out.nonzero().view(-1).tolist() == [3, 19_999]
    _, noted = NUMBA.accumulate_above(torch.ones(20_000), torch.zeros(20_000), out, [0, 20_000], [1.0], 20_000)
    assert len(noted[0]) == 20_000
