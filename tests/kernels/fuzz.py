"""Every compiled kernel, and the decoder above them, on data of any bits.

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=folder python -m tests.kernels.fuzz SEED ROUNDS

With these settings, which numba reads once, an access outside an array is an IndexError. Only `MalformedError` is
allowed. The arrays that a kernel writes lie between canaries, for the stores that numba does not check.
"""

import sys
from contextlib import contextmanager

import numpy as np
import torch
from numba.core import config

from oktopk import MalformedError, Sparse
from oktopk.codec import Codec
from oktopk.codec.indices import field_words
from oktopk.codec.values import WIRES
from oktopk.kernels import REFERENCE, WORTH_COMPILING
from oktopk.kernels.numba_cpu import NumbaKernels
from oktopk.kernels.reference import GROUP, bits_of
from oktopk.words import HEADER_WORDS

LENGTHS = (0, 1, 7, 127, 128, 129, 1000, 4096, 4097, WORTH_COMPILING - 1, WORTH_COMPILING + 3, 70_000)
NUMBA = NumbaKernels()
MARGIN = 64
CANARY = 0x5A


class Fuzz:
    """Random data from a seed, and what must hold of all of it."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.refused = self.done = 0

    def any_bits(self, numel, dtype):
        """Return numbers of all kinds: NaN of either sign, infinite, denormal."""
        return torch.tensor(np.frombuffer(self.rng.bytes(numel * np.dtype(dtype).itemsize), dtype))

    def numbers(self, numel, dtype):
        """Return any bits; or what is common, with a few awkward ones or none."""
        kind = self.rng.integers(3)
        if kind == 0:
            return self.any_bits(numel, dtype)
        made = self.rng.standard_normal(numel).astype(dtype)
        if kind == 1 and numel:
            some = self.rng.integers(numel, size=self.rng.integers(1, 4))
            made[some] = self.rng.choice([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38], size=len(some))
        return torch.from_numpy(made)

    def indices(self, count, numel):
        """Return indices below `numel`; or as many that are out of order, out of range, or anything."""
        kind = self.rng.integers(6)
        if kind == 0:
            return self.any_bits(count, np.int64)
        index = np.sort(self.rng.choice(max(numel, 1), min(count, numel), replace=False)).astype(np.int64)
        if len(index) and kind < 4:
            at = self.rng.integers(len(index), size=2)
            index[at] = [(-1, numel), (index[at[1]], index[at[0]]), (numel + 10**6, -(10**6))][kind - 1]
        return torch.from_numpy(index)

    def bounds(self, numel):
        """Return bounds of segments, a floor of any bits for each; now and then such as cannot be."""
        inner = self.rng.integers(0, numel + 1, size=self.rng.integers(0, 9))
        bounds = np.array([0, *np.sort(inner), numel])
        if self.rng.random() < 0.2:
            bounds[self.rng.integers(len(bounds))] = self.rng.choice([-1, numel + 1, numel + 10**6, -(10**9)])
        return bounds, self.numbers(len(bounds) - 1, np.float64).numpy()

    @contextmanager
    def between_canaries(self, numel, dtype):
        """Give room for `numel` numbers, beginning anywhere; all around it has to stay as it was."""
        whole = np.full((numel + 2 * MARGIN) * np.dtype(dtype).itemsize, CANARY, np.uint8).view(dtype)
        first = int(self.rng.integers(1, MARGIN))
        yield torch.from_numpy(whole)[first : first + numel]
        assert bool((whole[:first].view(np.uint8) == CANARY).all()), "something was written before the array"
        assert bool((whole[first + numel :].view(np.uint8) == CANARY).all()), "something was written behind the array"

    def attempt(self, work, *args):
        """Return what it returns; None if it says that its data cannot be."""
        self.done += 1
        try:
            return work(*args)
        except MalformedError:
            self.refused += 1
            return None

    def over_all(self, numel, dtype):
        grad, held, bounds = self.numbers(numel, dtype), self.numbers(numel, dtype), self.bounds(numel)
        for work, *more in ((NUMBA.accumulate,), (NUMBA.accumulate_above, *bounds, int(self.rng.integers(numel + 1)))):
            with self.between_canaries(numel, dtype) as out:
                self.attempt(work, grad, held, out, *more)
        self.attempt(NUMBA.accumulate, grad[: numel // 2], held, torch.empty_like(held))
        self.attempt(NUMBA.at_least, held, *bounds)
        NUMBA.mean_squares(held, held, bounds[0])
        for k in (0, 1, max(numel // 50, 1), numel, numel + 1, -3):
            found = self.attempt(NUMBA.kth_largest, held.abs(), k)
            assert found is None or found == REFERENCE.kth_largest(held.abs(), k)
            if k >= 0:
                first = self.attempt(NUMBA.first_at_least, held, float(self.numbers(1, np.float32)[0]), k)
                assert first is None or len(first) <= k
            self.attempt(NUMBA.kth_largest, held, k)

    def over_pairs(self, numel, dtype):
        many = [self.indices(int(self.rng.integers(numel + 1)), numel) for _ in range(self.rng.integers(1, 5))]
        value = [self.numbers(len(index), dtype) for index in many]
        merged = self.attempt(NUMBA.merge, many, value)
        assert len(merged[0]) == len(merged[1]) <= sum(map(len, many))
        assert len(NUMBA.shared(many[0], many[-1])) <= len(many[-1])
        self.attempt(NUMBA.merge, many, [value[0][:-1], *value[1:]])
        for index, what in ((many[0], value[0]), (many[0], value[0][:-1])):
            with self.between_canaries(numel, dtype) as out:
                self.attempt(NUMBA.spread, index, what, out, int(self.rng.choice([0, 0, 7, -(2**63), 2**63 - 1])))
            for work in (NUMBA.put_, NUMBA.add_):
                with self.between_canaries(numel, dtype) as out:
                    self.attempt(work, out, index, what)

    def over_packed(self, numel):
        low_bits, start = int(self.rng.integers(1, 32)), int(self.rng.choice([0, 0, 1, 7]))
        index = self.indices(int(self.rng.integers(numel + 1)), numel)
        sizes = field_words(numel, len(index), low_bits)
        for less in (0, 1):  # a word too few is refused, not written
            words = [max(size - less, 0) for size in sizes]
            with self.between_canaries(words[0], np.int32) as lows, self.between_canaries(words[1], np.int32) as highs:
                lows.zero_(), highs.zero_()
                done = self.refused
                self.attempt(NUMBA.pack_, index, start, low_bits, lows, highs)
                if done == self.refused:
                    assert torch.equal(NUMBA.unpack(lows, highs, start, low_bits, len(index)), index)
        lows, highs = self.any_bits(numel, np.int32), self.any_bits(numel // 3 + 1, np.int32)
        ones, fits = int(bits_of(highs).sum()), 32 * numel // low_bits
        for count in (-1, 0, ones, ones - 1, ones + 1, fits, fits + 1, 2**31 - 1, -(2**31)):
            for bits in (low_bits, 0, -1, 32, 64):
                found = self.attempt(NUMBA.unpack, lows, highs, start, bits, count)
                assert found is None or torch.equal(found, REFERENCE.unpack(lows, highs, start, bits, count))

    def over_values(self, numel):
        value = self.numbers(numel, np.float32)
        for mine, theirs in zip(NUMBA.quantise(value), REFERENCE.quantise(value), strict=True):
            assert torch.equal(mine, theirs)
        steps, scale = self.any_bits(numel, np.int8), self.any_bits(-(-numel // GROUP), np.float32)
        for scales in (scale, scale[1:]):
            found = self.attempt(NUMBA.scaled, steps, scales, torch.float32)
            assert found is None or torch.equal(found.isnan(), REFERENCE.scaled(steps, scales, torch.float32).isnan())

    def over_blocks(self):
        numel = int(self.rng.choice([1, 300, 70_000, 10_000_000, 2**31 - 1, 2**31, 2**40]))
        codec = Codec(numel, str(self.rng.choice(list(WIRES))))
        capacity = int(self.rng.integers(0, min(numel, 20_000) + 1))
        block = torch.zeros(codec.words(capacity), dtype=torch.int32)
        if self.rng.random() < 0.5:
            block = self.any_bits(len(block), np.int32)
            self.spoil(block, [capacity, capacity - 1, 0, 1])
        else:
            index = torch.from_numpy(np.unique(self.rng.integers(numel, size=capacity)))
            codec.encode_into_(block, Sparse(index, torch.ones(len(index)), numel), capacity)
            self.spoil(block, [int(block[0]) - 1, int(block[1]) + 1])
        short = block[: len(block) - int(self.rng.integers(0, 3))]
        for each, room in ((block, capacity), (short, capacity), (block, None), (block, capacity + 1)):
            part, note = self.attempt(codec.decode, each, torch.float32, room) or (None, 0)
            assert part is None or (part.nnz <= capacity and bool(part.value.isfinite().all()))
            assert 0 <= note < 2**62

    def spoil(self, block, likely):
        """Make some words of the header, or one behind it, something else."""
        for word in self.rng.integers(HEADER_WORDS, size=self.rng.integers(0, 4)):
            block[word] = int(self.rng.choice([*likely, -1, 2**31 - 1, -(2**31)]))
        if self.rng.random() < 0.3:
            block[self.rng.integers(len(block))] = int(self.rng.integers(-(2**31), 2**31))


def main(seed, rounds):
    """Call everything once a round, with other data; print how often."""
    assert config.BOUNDSCHECK == 1, "set NUMBA_BOUNDSCHECK=1, and NUMBA_CACHE_DIR to a folder of its own"
    fuzz = Fuzz(seed)
    with np.errstate(all="ignore"):
        for _ in range(rounds):
            dtype = (np.float32, np.float64)[fuzz.rng.integers(2)]
            numel = int(fuzz.rng.choice([*LENGTHS, fuzz.rng.integers(0, 70_000)]))
            fuzz.over_all(numel, dtype)
            fuzz.over_pairs(numel, dtype)
            fuzz.over_packed(numel)
            fuzz.over_values(numel)
            fuzz.over_blocks()
    assert 0 < fuzz.refused < fuzz.done
    print(f"{fuzz.done} calls, {fuzz.refused} refused")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
