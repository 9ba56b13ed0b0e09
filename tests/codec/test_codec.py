import contextlib
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk import MalformedError, Sparse
from oktopk.codec import Codec
from oktopk.codec.values import WIRES, round_to
from oktopk.words import HEADER_WORDS

wires, floats = st.sampled_from(list(WIRES)), st.sampled_from([torch.float32, torch.float64])
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def parts(draw: st.DrawFn) -> Sparse:
    numel = draw(st.sampled_from([1, 40, 2**24 + 10, 2**31 - 1, 2**31, 2**33 + 5]))
    odd = [place for place in (0, 2**24 - 1, 2**24 + 1, 2**24 + 3, numel - 1) if place < numel]  # no float32 has them
    index = sorted(draw(st.sets(st.sampled_from(odd) | st.integers(0, numel - 1), max_size=9)))
    value = draw(st.lists(FLOATS, min_size=len(index), max_size=len(index)))
    return Sparse(torch.tensor(index, dtype=torch.int64), torch.tensor(value, dtype=torch.float32), numel)


@given(wire=wires, dtype=floats, part=parts(), spare=st.integers(0, 3) | st.just(600), note=st.integers(0, 2**62 - 1))
@settings(max_examples=60)
def test_what_is_encoded_comes_back(wire: str, dtype: torch.dtype, part: Sparse, spare: int, note: int) -> None:
    """With its rounding error it is the whole, and a block that lies behind another can be read."""
    codec, capacity = Codec(part.numel, wire), part.nnz + spare
    block, error = codec.encode(part, capacity, note)
    assert (block.dtype, len(block)) == (torch.int32, codec.words(capacity))
    row = torch.cat([block, block])  # int64 indices are read in place: the second has to start at an even word
    back, said = codec.decode(row[len(block) :], dtype, capacity)
    rounded, same_error = codec.round(part)
    assert torch.equal(back.index, part.index)
    assert torch.equal(back.value, rounded.value.to(dtype))
    assert (back.value.dtype, back.numel, said) == (dtype, part.numel, note)
    assert (error is None) == (same_error is None) == (wire == "fp32")
    whole = rounded.value.double()
    if error is not None and same_error is not None:
        assert torch.equal(error, same_error)
        whole += error.double()
    assert torch.equal(whole, part.value.double())


def test_float64_loses_to_float32_and_says_so() -> None:
    part = Sparse(torch.tensor([0]), torch.tensor([0.1], dtype=torch.float64), 1)
    _, lost = Codec(1, "fp32").encode(part)
    assert lost is not None
    assert float(lost) == 0.1 - float(torch.tensor(0.1))


@pytest.mark.parametrize(("numel", "wire", "capacity", "words"), [
    (100, "fp32", 0, 0),
    (100, "fp32", 7, 14),
    (100, "bf16", 7, 1 + 1 + 4),  # two low bits each, and 7 + 24 bits
    (10_000_000, "bf16", 10_000, 9 * 10_000 // 32 + 1 + (10_000 + 19_531) // 32 + 1 + 5_000),  # 9 low bits
    (100_000_000, "bf16", 10_000, 13 * 10_000 // 32 + 1 + (10_000 + 12_207) // 32 + 1 + 5_000),  # 13
    (10_000_000, "bf16", 3, 3 + 2),  # too few to be worth packing
    (2**31 - 1, "fp32", 5, 10),
    (2**31, "fp32", 5, 10 + 6),
    (2**31, "bf16", 5, 10 + 4),
    (100, "int8", 7, 2 + 1 + 2),  # one scale
    (10_000_000, "int8", 10_000, 9 * 10_000 // 32 + 1 + (10_000 + 19_531) // 32 + 1 + 40 + 2_500),
    (2**31, "int8", 5, 10 + 4),
])  # fmt: skip
def test_the_size_of_a_block(numel: int, wire: str, capacity: int, words: int) -> None:
    assert Codec(numel, wire).words(capacity) == HEADER_WORDS + words


def test_encoding_in_place_writes_only_what_it_must() -> None:
    codec = Codec(50)
    block = torch.full((codec.words(4),), -9, dtype=torch.int32)
    codec.encode_into_(block, Sparse(torch.tensor([3, 8]), torch.tensor([1.0, 2.0]), 50), 4, note=5)
    assert block[HEADER_WORDS : HEADER_WORDS + 4].tolist() == [3, 8, -9, -9]
    assert codec.decode(block, torch.float32, 4)[0].value.tolist() == [1.0, 2.0]


def test_what_would_overflow_becomes_the_largest_number() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        assert round_to(torch.tensor([3.4e38, -3.4e38, 1.0]), dtype).tolist() == [largest, -largest, 1.0]
    huge = torch.tensor([1e300], dtype=torch.float64)
    assert round_to(huge, torch.float32).tolist() == [torch.finfo(torch.float32).max]


PACKED, PLAIN = ("int8", 10_000), ("fp32", 10_000)


def block_of(wire: str, numel: int, count: int = 600, capacity: int = 700) -> tuple[Codec, torch.Tensor]:
    codec = Codec(numel, wire)
    part = Sparse(torch.arange(count) * (numel // count), torch.linspace(1, 2, count), numel)
    return codec, codec.encode(part, capacity, note=7)[0]


@pytest.mark.parametrize(("kind", "word", "written", "said"), [
    (PLAIN, 0, -1, "says -1 pairs, where there can be 0 to 700"),
    (PLAIN, 0, 701, "says 701 pairs"),
    (PLAIN, 1, 1, "says 1 low bits an index, and here 0"),
    (PLAIN, 2, -5, "note"),
    (PLAIN, 3, -(2**31), "note"),
    (PLAIN, HEADER_WORDS, -1, "leave 0..9999"),
    (PLAIN, HEADER_WORDS + 599, 10_000, "leave 0..9999"),
    (PLAIN, HEADER_WORDS + 3, 0, "strictly increasing"),
    (PLAIN, HEADER_WORDS + 700, 0x7F800000, "NaN or infinite"),
    (PLAIN, HEADER_WORDS + 701, 0x7FC00000, "NaN"),
    (PLAIN, HEADER_WORDS + 702, -1, "NaN"),
    (PACKED, 0, 2**31 - 1, "pairs"),
    (PACKED, 1, -1, "says -1 low bits"),
    (PACKED, 1, 2**31 - 1, "low bits"),
    (PACKED, 0, 599, "holds more indices"),
    (PACKED, 0, 601, "holds 600 indices"),
    (PACKED, HEADER_WORDS + 66 + 1, 0, "indices"),  # the bit vector, behind 700 times 3 low bits
    (PACKED, HEADER_WORDS + 66 + 1, -1, "holds more indices"),
    (PACKED, -178, 0x7FC00000, "scale"),
    (PACKED, -178, -0x40800000, "scale"),  # -1.0
    (PACKED, -178, 0x7F800000, "NaN or infinite"),
])  # fmt: skip
def test_a_block_that_cannot_be_is_refused(kind: tuple[str, int], word: int, written: int, said: str) -> None:
    """A count of -1 made room for none and wrote thousands; NaN was ranked, which wrote behind a histogram."""
    codec, block = block_of(*kind)
    codec.decode(block, torch.float32, 700)
    block[word] = written
    with pytest.raises(MalformedError, match=f"malformed message from rank 3: .*{re.escape(said)}"):
        codec.decode(block, torch.float32, 700, source=3)


@pytest.mark.parametrize("kind", [PACKED, PLAIN])
def test_a_block_of_another_length_or_region_is_refused(kind: tuple[str, int]) -> None:
    codec, block = block_of(*kind)
    for other in (block[:3], block[:-1], torch.cat([block, block[:1]]), block.long()):
        with pytest.raises(MalformedError, match="a block"):
            codec.decode(other, torch.float32, 700)
    with pytest.raises(MalformedError, match="a block of 600 pairs has"):
        codec.decode(block, torch.float32)  # just enough room for as many as it says
    with pytest.raises(MalformedError, match=r"indices 0\.\.9584 leave 5\.\.9999"):
        codec.decode(block, torch.float32, 700, between=(5, 10_000))


@pytest.mark.parametrize("wire", WIRES)
def test_a_sum_that_overflowed_still_arrives(wire: str) -> None:
    part = Sparse(torch.arange(4), torch.tensor([1.0, math.inf, -math.inf, 2.0]), 10)
    block, _ = Codec(10, wire).encode(part)
    assert Codec(10, wire).decode(block, torch.float32, sums=True)[0].value[1:3].isinf().all()


@given(
    codec=st.builds(Codec, st.sampled_from([1, 40, 70_000, 2**31 - 1, 2**31, 2**40]), wires),
    capacity=st.integers(0, 300),
    header=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 400), min_size=4, max_size=4),
    seed=st.integers(0, 2**32),
    spare=st.integers(-3, 3),
)
def test_any_words_are_decoded_or_refused(codec: Codec, capacity: int, header: Any, seed: int, spare: int) -> None:
    random = torch.Generator().manual_seed(seed)
    block = torch.randint(-(2**31), 2**31, (max(codec.words(capacity) + spare, 0),), generator=random).int()
    block[:HEADER_WORDS] = torch.tensor(header[: len(block)], dtype=torch.int32)
    for room in (capacity, None):
        with contextlib.suppress(MalformedError):
            part, note = codec.decode(block, torch.float32, room)
            assert part.nnz <= min(header[0], codec.numel)
            assert 0 <= note < 2**62
