"""The triton kernels give the bits of the plain ones, at every length around a tile's and for every awkward number."""

import os

import pytest
import torch

from oktopk.cuda import reference as plain
from oktopk.cuda.reference import HEADER_WORDS, PIECE, RUN, TILE, Found, Rows, bins, room_for, sample_of
from oktopk.partition import even_cuts
from tests.laws import same_bits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NO_GPU = not torch.cuda.is_available() and not INTERPRETED
pytestmark = pytest.mark.skipif(NO_GPU, reason="needs a CUDA GPU, and there is none here")

LENGTHS = [0, 1, 2, TILE - 1, TILE, TILE + 1, 40 * TILE + 77, *([] if INTERPRETED else [1_000_007, 27_569_568])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 0x5A5A5A
AWKWARD_WORDS = [0, 1, -1, 5, 99, 100, 101, 4000, 2**31 - 1, -(2**31)]


def alike(work, *args):
    """Return the results of `work` with the kernels under test; with the plain ones they have the same bits."""
    from oktopk.cuda import triton

    ours, theirs = work(triton, *args), work(plain, *args)
    for one, other in zip(ours, theirs, strict=True):
        assert same_bits(one, other)
    return ours


def made(numel, dtype, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(numel, generator=generator, device=DEVICE).pow_(3).to(dtype)


def poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, POISON, device=DEVICE).to(dtype)


def number(value, dtype=None):
    return torch.tensor([value], device=DEVICE, dtype=dtype)


def turn_of(step):
    return number(step, torch.int32)


def rows_of(numel, kind):
    """Return rows like a matrix's, or a few of all lengths, empty ones among them; or none."""
    if kind == "none" or not numel:
        return None
    lengths = [min(1280, numel - start) for start in range(0, numel, 1280)]
    if kind == "ragged":
        lengths, left = [], numel
        for length in (0, 1, 9, 9, 9, 0, 500, 3 * TILE, PIECE + 1, numel):
            lengths.append(min(length, left))
            left -= lengths[-1]
    scale = torch.rand(len(lengths), generator=torch.Generator().manual_seed(4)) + 0.2
    return Rows(torch.tensor([0, *lengths]).cumsum(0), scale.square(), scale, DEVICE)


def threshold_by(kernels, name, *args):
    threshold, counts = poisoned(1), bins(DEVICE)
    getattr(kernels, name)(*args, counts, threshold)
    assert not bool(counts.any())
    return [threshold]


def found_by(work, *args, threshold, turn, room, rows=None):
    """Return what `compact` or `accumulate_compact` finds, in memory full of other numbers."""
    found = Found(len(args[0]), room, DEVICE)
    for tensor in (found.place, found.value, found.count, found.counters):
        tensor.fill_(POISON)
    work(*args, number(threshold), turn_of(turn), found, rows)
    return found


def seen_in(found):
    """Return all that matters of what was found: not what lies in slots that are free."""
    there = torch.arange(found.place.shape[1], device=DEVICE) < found.count[:, None]
    return [found.count, found.bad.sum(), found.groups, found.place[there], found.value[there]]


def packed_by(kernels, found, cuts, turn, capacity, rows=None):
    blocks = poisoned(len(cuts) - 1, HEADER_WORDS + 2 * capacity, dtype=torch.int32)
    rooms = torch.full((len(cuts) - 1,), capacity, dtype=torch.int32, device=DEVICE)
    kernels.pack_blocks(found, cuts.to(DEVICE), turn_of(turn), blocks, capacity, rooms, rows)
    return blocks


@pytest.mark.parametrize("kind", ["none", "matrix", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [numel for numel in LENGTHS if numel])
def test_aim_and_measure(numel, dtype, kind):
    """The same threshold; as many of the sample reach it as were wanted, and few more; the counts are left zero."""
    grad, held, rows = made(numel, dtype, 1), made(numel, torch.float32, 2), rows_of(numel, kind)
    for stride in (1, 7):
        sample = sample_of(numel, stride)
        for wanted in {1, max(sample // 100, 1), max(sample, 1), sample + 1}:
            sampled = grad, held, rows, turn_of(24), stride
            (threshold,) = alike(threshold_by, "sample_threshold", *sampled, number(wanted))
            if rows is None and wanted <= sample:
                size = (held + grad.float()).abs()
                if stride > 1:
                    size = size[: sample * stride].view(-1, stride, RUN)[:, 24 % stride]
                assert int((size >= threshold).sum()) >= wanted
                assert int((size > threshold * (1 + 2**-11)).sum()) < wanted
    if rows is not None:
        from oktopk.cuda import triton

        other = rows_of(numel, kind)
        triton.measure_rows(grad, rows)
        plain.measure_rows(grad, other)
        torch.testing.assert_close((rows.squares, rows.scale), (other.squares, other.scale))


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-40, 3e38])
def test_aim_where_all_are_alike(value):
    score = torch.full((3 * TILE + 7,), value, device=DEVICE)
    score[::5] = 0.0
    for wanted in (1, len(score) // 2, len(score)):
        (threshold,) = alike(threshold_by, "select_threshold", score, number(wanted))
        assert value * (1 - 2**-11) <= float(threshold) <= value or wanted == len(score) or value < 1e-38


@pytest.mark.parametrize("kind", ["none", "matrix", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_find_and_send(numel, dtype, kind):
    grad, held, rows = made(numel, dtype, 1), made(numel, torch.float32, 2), rows_of(numel, kind)
    skewed = torch.tensor([0, numel // 7, numel // 7, numel // 3, numel])  # one region is empty
    cuts = [(even_cuts(numel, 3), 200), (even_cuts(numel, 4), 9), (skewed, 50)]
    shapes = [(even_cuts(numel, 1), numel), *((each, max(numel // part, 1)) for each, part in cuts)]

    def find_and_send(kernels):
        results = []
        for threshold, density in ((0.0, 1.0), (0.0, 0.02), (8.0, 0.02), (8.0, 1.0), (1e30, 0.01)):  # all, some, none
            acc, room = poisoned(numel), room_for(density)
            given = kernels.accumulate_compact, grad, held, acc
            found = found_by(*given, threshold=threshold, turn=7, room=room, rows=rows)
            results += [packed_by(kernels, found, each, 7, most, rows) for each, most in shapes]
            results += [acc, *seen_in(found)]
        return results

    alike(find_and_send)


@pytest.mark.parametrize("kind", ["none", "ragged"])
@pytest.mark.parametrize("turn", [0, 5, 1000])
def test_ties_have_room_in_turn_behind_what_is_larger(turn, kind):
    """Few values, so that many are equal, and a few that are larger than all: too many for tiles and for blocks."""
    numel, room = 9 * TILE + 77, room_for(0.01)
    held = torch.randint(-2, 3, (numel,), generator=torch.Generator().manual_seed(turn)).float().to(DEVICE)
    held[[3, 500, 5000, numel - 1]] = 1e6
    rows, shapes = rows_of(numel, kind), ((1, 100), (3, 50), (3, 1), (2, 2000))

    def find_and_send(kernels):
        found = found_by(kernels.compact, held, threshold=1.0, turn=turn, room=room, rows=rows)
        blocks = [packed_by(kernels, found, even_cuts(numel, size), turn, most, rows) for size, most in shapes]
        return [*blocks, *seen_in(found)]

    results = alike(find_and_send)
    assert int(results[len(shapes)].max()) == room
    for blocks, (_, capacity) in zip(results, shapes, strict=False):
        sent = blocks[:, HEADER_WORDS + capacity :].contiguous().view(torch.float32)
        assert int((sent == 1e6).sum()) == (4 if capacity > 1 else 3)


def test_find_of_awkward_numbers():
    """Ties are found, zeros never, denormals are numbers, what is not finite is counted."""
    awkward = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.5, -1.5, 1.4999999, 3e38, float("inf"), float("nan"), -float("inf")]
    held = torch.tensor(awkward * 300, device=DEVICE)
    for threshold in (0.0, 1e-45, 1e-40, 1.5, 3e38):
        settings = {"threshold": threshold, "turn": 0, "room": TILE}
        seen = alike(lambda kernels, settings: seen_in(found_by(kernels.compact, held, **settings)), settings)
        assert int(seen[1]) == 3 * 300


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_and_deliver(dtype, bad):
    numel, size = 9 * TILE + 5, 3
    capacity, cuts = numel // 20, even_cuts(numel, size).to(DEVICE)
    held, start, sums = (made(numel, torch.float32, seed) for seed in (9, 10, 8))
    kept = made(numel, torch.float32, 5)  # by all owners: some of what this rank sent, and some more
    mine = kept * (made(numel, torch.float32, 6).abs() > 0.1)
    found = (found_by(plain.compact, each, threshold=4.0, turn=0, room=TILE) for each in (mine, kept))
    sent, gathered = (packed_by(plain, each, cuts, 0, capacity) for each in found)
    if bad:  # counts whose sum is zero in 32 bits
        gathered[:, 1] = torch.tensor([2**31 - 1, 2**31 - 1, 2], dtype=torch.int32)

    def add_and_deliver(kernels):
        region, value = torch.where(sums > 0, sums, plain.NOTHING), poisoned(capacity)
        kernels.scatter_add(gathered[0], capacity, region)
        added = region.clone()
        kernels.gather_zero(gathered[0], capacity, region, value)
        out, acc, told = torch.full((numel,), 77.0, device=DEVICE).to(dtype), start.clone(), turn_of(POISON).repeat(6)
        kernels.deliver(gathered, sent, cuts, capacity, out, acc, held, told)
        return [acc, added, region, value, out, told]

    acc = alike(add_and_deliver)[0]
    assert not bad or torch.equal(acc, held)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_cannot_be_are_marked_and_written_nowhere(seed):
    """Counts, indices and demands of any bits: both write the same, and nothing before or behind their vectors."""
    numel, size, capacity, margin = 3 * TILE, 3, 100, 4096
    cuts, random = even_cuts(numel, size).to(DEVICE), torch.Generator().manual_seed(seed)
    words = torch.tensor(AWKWARD_WORDS)[torch.randint(10, (size, HEADER_WORDS + 2 * capacity), generator=random)]
    if seed % 2:  # such as can be, but for a word
        words[:, :HEADER_WORDS] = torch.tensor([capacity, 0, 300, 0])
        words[:, HEADER_WORDS : HEADER_WORDS + capacity] = torch.arange(capacity)
        words[1, seed] = 2000
    came = words.int().to(DEVICE)

    def receive(kernels):
        marked, shared, unmarked = came.clone(), came.clone(), came.clone()
        unmarked[:, 1] = 0
        kernels.refuse_malformed(marked, cuts, capacity, False)
        kernels.refuse_malformed(shared, cuts[1:3], capacity, True)
        whole, value, told = torch.zeros(4, numel + 2 * margin, device=DEVICE), poisoned(capacity), turn_of(0).repeat(6)
        region, out, acc, held = whole[:, margin:-margin]
        kernels.scatter_add(came[0], capacity, region)
        kernels.gather_zero(came[1], capacity, region, value)
        if seed % 2:  # else what is written twice is written in any order
            kernels.deliver(unmarked, torch.zeros_like(came), cuts, capacity, out, acc, held, told)
        assert not bool(whole[:, :margin].any() | whole[:, -margin:].any())
        return [marked, shared, told, *((out, acc, region, value) if seed % 2 else ())]

    marked = alike(receive)[0]
    assert seed != 1 or marked[:, 1].tolist() == [0, 2000, 0]


@pytest.mark.parametrize("filling", [0.0, float("nan")])
@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_settle(dtype, bad, filling):
    held, acc = made(3 * TILE + 5, torch.float32, 1), made(3 * TILE + 5, torch.float32, 2)

    def settle(kernels):
        kept, out = acc.clone(), made(len(acc), dtype, 3)
        kernels.rollback_if(turn_of(bad), kept, held, out, filling)
        return [kept, out.nan_to_num(77.0)]

    kept, out = alike(settle)
    assert torch.equal(kept, held if bad else acc)
    assert not bad or bool((out == (77.0 if filling else 0.0)).all())
