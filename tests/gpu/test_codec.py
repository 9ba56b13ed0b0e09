"""The triton codec gives the bits of the plain one, and the plain one those of the host; no words write outside."""

from dataclasses import replace

import pytest
import torch

from oktopk import MalformedError, Sparse
from oktopk.codec import Codec, Layout
from oktopk.codec.values import WIRES
from oktopk.cuda import reference as plain
from oktopk.cuda.packing import Packing
from oktopk.partition import even_cuts
from oktopk.words import HEADER_WORDS
from tests.gpu.test_triton import DEVICE, DTYPES, INTERPRETED, POISON, alike, made, pytestmark, turn_of
from tests.laws import same_bits

__all__ = ["pytestmark"]

PACKED = [wire for wire in WIRES if wire != "fp32"]
SIZES = [(1, 1, 1), (100, 7, 3), (3000, 40, 2), (70_001, 1500, 1), (40_000, 2600, 4), (1 << 20, 5, 2)]
SIZES += [] if INTERPRETED else [(1_000_003, 38_000, 1), (27_569_568, 1_033_859, 1), (27_569_568, 258_465, 4)]
ROUNDED = [each for each in DTYPES if not INTERPRETED or each != torch.bfloat16]  # which triton's interpreter cuts off
MARGIN = 512
AWKWARD = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.5, -1.5, 127.0, 0.5, 3e38, -3.4e38, 63.5]


def pairs_for(numel, capacity, size, counts, seed=0, awkward=AWKWARD):
    """Return rows of pairs with so many of them: sorted indices, values of all magnitudes, and poison behind them."""
    pairs = torch.full((size, HEADER_WORDS + 2 * capacity), POISON, dtype=torch.int32)
    random, lengths = torch.Generator().manual_seed(seed), even_cuts(numel, size).diff().tolist()
    for number, (pair, count, length) in enumerate(zip(pairs, counts, lengths, strict=True)):
        index = torch.randperm(length, generator=random)[:count].sort().values.int()
        value = torch.randn(len(index), generator=random).pow_(5)
        value *= 10.0 ** ((number * 7) % 30 - 15) if awkward else 1.0
        value[: len(awkward)] = torch.tensor(awkward)[: len(value)]
        pair[HEADER_WORDS : HEADER_WORDS + len(index)] = index
        pair[HEADER_WORDS + capacity :][: len(index)] = value.view(torch.int32)
        pair[:HEADER_WORDS] = torch.tensor([len(index), 0, 12345 + number, number], dtype=torch.int32)
    return pairs.to(DEVICE)


def encoded(kernels, pairs, packing, layouts):
    """Return the blocks with poison before and behind each of them, and what is left of the pairs."""
    mine = pairs.clone()
    whole = torch.full((len(pairs), packing.words + MARGIN), POISON, dtype=torch.int32, device=DEVICE)
    kernels.encode(mine, whole, layouts, packing)
    assert bool((whole[:, packing.words :] == POISON).all())
    return mine, whole


def decoded(kernels, blocks, packing, layouts):
    """Return the pairs of these blocks; nothing is written before or behind each of them."""
    row = HEADER_WORDS + 2 * packing.capacity
    memory = torch.full((MARGIN + len(blocks) * row + MARGIN,), POISON, dtype=torch.int32, device=DEVICE)
    kernels.decode(blocks, memory[MARGIN:-MARGIN].view(-1, row), layouts, packing)
    assert bool((memory[:MARGIN] == POISON).all() & (memory[-MARGIN:] == POISON).all())
    return memory[MARGIN:-MARGIN].view(-1, row)


def packing_of(wire, numel, capacity, size):
    return Packing(Codec(numel, wire), capacity, size, DEVICE)


@pytest.mark.parametrize("wire", PACKED)
@pytest.mark.parametrize(("numel", "capacity", "size"), SIZES)
@pytest.mark.parametrize("full", [True, False])
def test_encode_and_decode(numel, capacity, size, wire, full):
    """The host's block, the same bits from both; the pairs come back, and with the rounding errors they are whole."""
    packing = packing_of(wire, numel, capacity, size)
    counts = [min(capacity, numel // size) if full else min(capacity, numel // size) * i // size for i in range(size)]
    pairs = pairs_for(numel, capacity, size, counts)

    def there_and_back(kernels):
        errors, blocks = encoded(kernels, pairs, packing, packing.rows)
        return [errors, blocks, decoded(kernels, blocks, packing, packing.rows)]

    errors, blocks, back = alike(there_and_back)
    assert torch.equal(back[:, :HEADER_WORDS], pairs[:, :HEADER_WORDS])
    for pair, error, block, came in zip(*(each.cpu() for each in (pairs, errors, blocks, back)), strict=True):
        count = int(pair[0])
        index, value, lost, arrived = (_fields(each, capacity, count) for each in (pair, pair, error, came))
        assert torch.equal(index[0], arrived[0])
        assert same_bits(arrived[1].double() + lost[1].double() + 0.0, value[1].double() + 0.0)
        codec, part = replace(Codec(numel, wire), span=-(-numel // size)), Sparse(index[0].long(), value[1], numel)
        wanted = int(pair[2]) + (int(pair[3]) << 31)
        assert torch.equal(block[: packing.words], codec.encode(part, capacity, wanted << 2)[0])


def _fields(pair, capacity, count):
    index, value = pair[HEADER_WORDS:].split(capacity)
    return index[:count], value[:count].view(torch.float32)


@pytest.mark.parametrize("wire", PACKED)
def test_a_longer_region_has_fewer_pairs_in_a_block_as_long(wire):
    numel, size, capacity = 100_000, 4, 2000
    packing = packing_of(wire, numel, capacity, size)
    packing.follow_(torch.tensor([0, 1000, 3000, 21_000, numel], device=DEVICE))
    rooms = packing.rooms.tolist()
    assert rooms[:3] == [capacity] * 3
    assert 0.75 * capacity < rooms[3] < capacity
    for row in packing.rows.tolist():
        assert plain.words_of(Layout(*row), wire) <= packing.words
    pairs = pairs_for(numel, capacity, size, rooms)

    def there_and_back(kernels):
        errors, blocks = encoded(kernels, pairs, packing, packing.rows)
        ends = [plain.words_of(Layout(*row), wire) for row in packing.rows.tolist()]
        used = [block[:end] for block, end in zip(blocks, ends, strict=True)]
        return [errors, *used, decoded(kernels, blocks, packing, packing.rows)]

    *_, back = alike(there_and_back)
    for pair, came, room in zip(pairs, back, rooms, strict=True):
        assert torch.equal(pair[HEADER_WORDS:][:room], came[HEADER_WORDS:][:room])


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, which interprets the kernels
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("wire", PACKED)
def test_words_that_cannot_be_are_marked_and_written_nowhere(wire, seed):
    """Any words at all, or such as can be but for one: both mark the same blocks, which the host's codec refuses."""
    numel, capacity, size = 9000, 700, 3
    packing, random = packing_of(wire, numel, capacity, size), torch.Generator().manual_seed(seed)
    blocks = encoded(plain, pairs_for(numel, capacity, size, [capacity, 650, 0]), packing, packing.rows)[1].cpu()
    words = torch.randint(-(2**31), 2**31, (size, packing.words), generator=random).int()
    if seed == 0:
        blocks[:, HEADER_WORDS : packing.words] = words[:, HEADER_WORDS:]
    elif seed == 1:
        blocks[:, : packing.words] = words
    else:
        place = torch.randint(packing.words, (size,), generator=random)
        place[0] = seed - 2
        blocks[torch.arange(size), place] = words[torch.arange(size), place]
    blocks, cuts = blocks.to(DEVICE), even_cuts(numel, size).to(DEVICE)

    def received(kernels):
        pairs = decoded(kernels, blocks, packing, packing.rows)
        marked = pairs.clone()
        kernels.refuse_malformed(marked, cuts, capacity, True)
        fine = marked[:, 1] == 0
        there = torch.arange(capacity, device=DEVICE) < marked[:, :1]
        parts = (marked[:, HEADER_WORDS:][:, i * capacity :][:, :capacity] for i in range(2))
        return [marked[:, :HEADER_WORDS], *(torch.where(there & fine[:, None], part, 0) for part in parts)]

    marked = alike(received)[0]
    for block, is_bad, length in zip(blocks.cpu(), marked[:, 1] != 0, cuts.diff().tolist(), strict=True):
        codec = replace(Codec(numel, wire), span=numel // size)
        try:
            _, note = codec.decode(block[: packing.words], torch.float32, capacity, between=(0, length))
            refused = note & 3 != 0 or note >> 2 > length * size
        except MalformedError:
            refused = True
        assert bool(is_bad) == refused


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_what_rounding_took_remains(dtype):
    """Of what this rank sent and what it kept as an owner, in the residual."""
    numel, size, capacity, rank = 30_000, 3, 400, 1
    packing, cuts = packing_of("int8", numel, capacity, size), even_cuts(numel, size).to(DEVICE)
    held, start = made(numel, torch.float32, 9), made(numel, torch.float32, 10)
    mine, kept = (pairs_for(numel, capacity, size, [400, 300, 200], seed, []) for seed in (1, 2))
    kept[:, HEADER_WORDS : HEADER_WORDS + 150] = mine[:, HEADER_WORDS : HEADER_WORDS + 150]  # some of what it sent
    for pair in kept:
        count = int(pair[0])
        pair[HEADER_WORDS : HEADER_WORDS + count] = pair[HEADER_WORDS : HEADER_WORDS + count].unique()[:count]

    def deliver(kernels):
        sent, _ = encoded(kernels, mine, packing, packing.rows)
        errors, blocks = encoded(kernels, kept, packing, packing.rows)
        came = decoded(kernels, blocks, packing, packing.rows)
        out, acc, told = torch.full((numel,), 77.0, device=DEVICE).to(dtype), start.clone(), turn_of(0).repeat(6)
        kernels.deliver(came, sent, cuts, capacity, out, acc, held, told, errors[rank : rank + 1], rank)
        return [out, acc, told]

    _, acc, _ = alike(deliver)
    places = (kept[:, HEADER_WORDS : HEADER_WORDS + capacity] + cuts[:-1, None])[
        kept[:, HEADER_WORDS:][:, :capacity] < numel
    ]
    is_delivered = torch.zeros(numel, dtype=torch.bool, device=DEVICE)
    is_delivered[places] = True
    assert torch.equal(acc[~is_delivered], start[~is_delivered])
    assert int((acc != start)[is_delivered].sum()) > 400
