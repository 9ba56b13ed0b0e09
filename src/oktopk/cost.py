"""What each algorithm should send: the tests hold the metered traffic to it, and a planner can ask before it trains.

A word is 4 bytes. `predict` is for one rank and one step after the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from oktopk.algorithms import Dense, GaussianK, GTopk, OkTopk, TopkA, TopkDSA
from oktopk.algorithms.bounded import room
from oktopk.algorithms.paper import BUCKET_PAIRS
from oktopk.errors import SettingError
from oktopk.select import BAND, SKETCH, num_selected
from oktopk.wire import HEADER_WORDS, Codec

INT64_WORDS = 2


@dataclass(frozen=True)
class Cost:
    """What one rank sends in one step.

    least, most     words: the band that no step leaves, whatever the input
    typical         words: what the literature's formula says, for a gradient that does not change its character
    messages        messages sent, at most
    """

    least: int
    typical: float
    most: int
    messages: int

    def seconds(self, alpha_s: float, beta_s: float) -> float:
        """Return the time of a typical step on a link with `alpha_s` seconds a message and `beta_s` a word."""
        return alpha_s * self.messages + beta_s * self.typical

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.least + other.least,
            self.typical + other.typical,
            self.most + other.most,
            self.messages + other.messages,
        )


def exactly(words: int, messages: int) -> Cost:
    """Return the cost of what is the same on every step."""
    return Cost(words, float(words), words, messages)


def agreement(peers: int) -> Cost:
    """Return the cost of telling every peer, in one number, that this rank's input is fine."""
    return exactly(INT64_WORDS * peers, peers)


@singledispatch
def predict(algorithm: Any, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    """Return what `rank` of `size` sends in one step of `algorithm` on `numel` elements (in so many segments).

    >>> predict(OkTopk(density=0.01), 1_000_000, 4).most
    37524
    """
    raise SettingError(f"no cost model for {type(algorithm).__name__}")


@predict.register
def _(algorithm: Dense, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    blocks = [(i + 1) * numel // size - i * numel // size for i in range(size)]
    sent = sum(blocks) * 2 - blocks[(rank + 1) % size] - blocks[(rank + 2) % size]
    return exactly(sent if size > 1 else 0, 2 * (size - 1)) + agreement(size - 1)


@predict.register
def _(algorithm: TopkA, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = num_selected(numel, algorithm.density), Codec(numel, algorithm.wire)
    return exactly(codec.words(k) * (size - 1), size - 1) + agreement(size - 1)


@predict.register
def _(algorithm: GaussianK, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = num_selected(numel, algorithm.density), Codec(numel, algorithm.wire)
    peers = size - 1
    pairs = Cost(
        codec.words(0) * peers, float(codec.words(k) * peers), codec.words(max(int(BAND[1] * k), 1)) * peers, peers
    )
    return pairs + agreement(peers) + agreement(peers)  # the second: sizes


@predict.register
def _(algorithm: GTopk, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = num_selected(numel, algorithm.density), Codec(numel, algorithm.wire)
    distances = [1 << i for i in range((size - 1).bit_length())]
    up = sum(rank % (2 * distance) == distance for distance in distances)
    down = sum(rank % (2 * distance) == 0 and rank + distance < size for distance in distances)
    return exactly(codec.words(k) * (up + down), up + down) + agreement(size - 1)


@predict.register
def _(algorithm: TopkDSA, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = num_selected(numel, algorithm.density), Codec(numel, algorithm.wire)
    peers, length = size - 1, (rank + 1) * numel // size - rank * numel // size
    pair = codec.index_words + codec.value_words(2) / 2
    split = Cost(HEADER_WORDS * peers, pair * k * peers / size, codec.words(k) + (HEADER_WORDS + 1) * peers, peers)
    dense = codec.value_words(length) * peers
    gather = Cost(0, min(pair * k * peers / size, dense), dense, peers)
    return (split if peers else exactly(0, 0)) + gather + sum_of([agreement(peers)] * 3)


@predict.register
def _(algorithm: OkTopk, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = num_selected(numel, algorithm.density), Codec(numel, algorithm.wire)
    peers = size - 1
    if algorithm.mode == "bounded":
        return exactly(2 * codec.words(room(k, algorithm.slack, size)) * peers, 2 * peers)
    return _paper(k, int(algorithm.cap * k), codec, size, segments)


def _paper(k: int, cap: int, codec: Codec, size: int, segments: int) -> Cost:
    """Split, balance and gather of at most `cap` pairs each; thresholds, cuts and scales agreed upon on some steps."""
    peers = size - 1
    if not peers:
        return exactly(0, 0)
    pair = codec.index_words + codec.value_words(2) / 2
    buckets = peers * (1 + cap // BUCKET_PAIRS)
    split = codec.words(cap) + (HEADER_WORDS + 1) * buckets
    gather = (codec.words(-(-cap // size)) + 1) * peers + codec.words(cap) + (HEADER_WORDS + 1) * peers
    summed = 4 * 256 + (size + 1) + segments  # int64 and float64: the radix select, the cuts, the scales
    agreed = INT64_WORDS * (2 * summed + 5 * peers) + (SKETCH + 1) * peers
    # Messages: sums for radix select (four), cuts and scales; verdict, counts, sizes twice, sketch, balance and
    # gather.
    return Cost(0, 3 * pair * k * peers / size, split + gather + agreed, 12 * peers + 7 * peers + buckets)


def sum_of(costs: list[Cost]) -> Cost:
    """Return the cost of doing all of these."""
    total = exactly(0, 0)
    for cost in costs:
        total += cost
    return total
