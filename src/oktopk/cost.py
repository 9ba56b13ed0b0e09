"""The traffic and time that each algorithm should need: tests hold the metered traffic to it, planners ask it.

A word is 4 bytes. `predict` is for one rank and one step after the first. With a `Machine`, which `oktopk bench probe`
measures, a step is predicted in seconds:

    computing  +  sum over calls of a collective of (alpha + beta * words)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import singledispatch
from typing import Any

from oktopk.algorithms import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA
from oktopk.algorithms.oktopk import capacity_of
from oktopk.algorithms.oktopk_paper import BUCKET_PAIRS
from oktopk.errors import SettingError
from oktopk.selection import BAND, SKETCH, num_selected
from oktopk.words import HEADER_WORDS

INT64_WORDS = 2
SPARE_WORDS = {"fp32": 1, "bf16": 1, "int8": 2}
"""Words that one more block may take, because its last word is not full and int8 adds a scale."""

GROUP_S, ELEMENT_S = 3e-3, 1e-9
"""Seconds of a sparse step's computing, for a group and for an element, where nobody measured them: a core of a CPU."""


@dataclass(frozen=True)
class Call:
    """One call of a collective of `Comm`, and the words that a rank sends in it."""

    collective: str
    words: float


@dataclass(frozen=True)
class Cost:
    """The traffic of one rank in one step.

    least, most     words: bounds for every input
    typical         words: the literature's formula, for a stationary gradient
    messages        upper bound of the messages sent
    calls           collectives of a typical step, in order, on the busiest path where ranks differ
    """

    least: int
    typical: float
    most: int
    messages: int
    calls: tuple[Call, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speed of the ranks' machines and of the network between them, by collective.

    alpha_s     seconds a call
    beta_s      seconds a word that each rank sends, all at once (of all_reduce with the summing)
    """

    alpha_s: Mapping[str, float]
    beta_s: Mapping[str, float]

    def seconds(self, cost: Cost, computing_s: float = 0.0) -> float:
        """Return the seconds of a typical step whose ranks compute for `computing_s` between their messages.

        >>> machine = Machine(alpha_s={"all_gather": 0.001}, beta_s={"all_gather": 4e-8})
        >>> round(machine.seconds(predict(TopkA(density=0.01), 1_000_000, 2), computing_s=0.010), 4)
        0.0128
        """
        return computing_s + sum(self.alpha_s[c.collective] + self.beta_s[c.collective] * c.words for c in cost.calls)


def exactly(words: int, messages: int, *calls: Call) -> Cost:
    """Return the cost of a step that always sends `words` words."""
    return Cost(words, float(words), words, messages, calls)


def agreement(peers: int, collective: str = "all_gather") -> Cost:
    """Return the cost of telling every peer one number: that this rank's input is fine, or how much is coming."""
    return exactly(INT64_WORDS * peers, peers, Call(collective, INT64_WORDS * peers))


@singledispatch
def predict(algorithm: Any, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    """Return the traffic of `rank` of `size` in one step of `algorithm` on `numel` elements in `segments` segments.

    >>> predict(OkTopk(density=0.01, wire="fp32"), 1_000_000, 4).most
    37524
    """
    raise SettingError(f"no cost model for {type(algorithm).__name__}")


@predict.register
def _(algorithm: Dense, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    words = ring_words(numel, size, rank)
    return exactly(words, 2 * (size - 1), Call("all_reduce", words)) + agreement(size - 1)


def ring_words(numel: int, size: int, rank: int = 0) -> int:
    """Return the words of a rank in the all_reduce of a ring: every block but one, in each half of it."""
    if size == 1:
        return 0
    blocks = [(i + 1) * numel // size - i * numel // size for i in range(size)]
    return sum(blocks) * 2 - blocks[(rank + 1) % size] - blocks[(rank + 2) % size]


@predict.register
def _(algorithm: TopkA, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = algorithm.plan(numel)
    words = codec.words(k) * (size - 1)
    return exactly(words, size - 1, Call("all_gather", words)) + agreement(size - 1)


@predict.register
def _(algorithm: GaussianK, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = algorithm.plan(numel)
    peers = size - 1
    typical, most = codec.words(k) * peers, codec.words(max(int(BAND[1] * k), 1)) * peers
    pairs = Cost(codec.words(0) * peers, float(typical), most, peers, (Call("all_to_all_single", typical),))
    return agreement(peers) + agreement(peers, "all_to_all_single") + pairs  # the second: sizes


@predict.register
def _(algorithm: GTopk, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = algorithm.plan(numel)
    distances = [1 << i for i in range((size - 1).bit_length())]
    up = sum(rank % (2 * distance) == distance for distance in distances)
    down = sum(rank % (2 * distance) == 0 and rank + distance < size for distance in distances)
    path = [Call("sendrecv", codec.words(k))] * (2 * len(distances))  # all the way up and down, whoever is on it
    return exactly(codec.words(k) * (up + down), up + down, *path) + agreement(size - 1)


@predict.register
def _(algorithm: TopkDSA, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec = algorithm.plan(numel)
    peers, length = size - 1, (rank + 1) * numel // size - rank * numel // size
    pair = codec.index_words + codec.value_words(2) / 2
    typical, dense = pair * k * peers / size, codec.value_words(length) * peers
    most = codec.words(k) + (HEADER_WORDS + SPARE_WORDS[codec.wire]) * peers
    split = Cost(HEADER_WORDS * peers, typical, most, peers, (Call("all_to_all_single", typical),))
    gather = Cost(0, min(typical, dense), dense, peers, (Call("all_to_all_single", min(typical, dense)),))
    sizes = agreement(peers, "all_to_all_single")
    return (split if peers else exactly(0, 0)) + gather + agreement(peers) + sizes + sizes


@predict.register
def _(algorithm: OkTopk, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, peers, codec = num_selected(numel, algorithm.density), size - 1, algorithm.codec(numel)
    capacity = capacity_of(k, algorithm.slack, size)
    # Packed indices take less room in shorter regions, and the longest region is between numel / size and numel.
    least, most = (replace(codec, span=span).words(capacity) * peers for span in (-(-numel // size), numel))
    calls = Call("all_to_all", least), Call("all_gather", least)
    return Cost(2 * least, 2.0 * least, 2 * most, 2 * peers, calls)


@predict.register
def _(algorithm: OkTopkPaper, numel: int, size: int, rank: int = 0, segments: int = 1) -> Cost:  # noqa: ARG001
    k, codec, peers = num_selected(numel, algorithm.density), algorithm.codec(numel), size - 1
    if not peers:
        return exactly(0, 0)
    cap, pair = int(algorithm.cap * k), codec.index_words + codec.value_words(2) / 2
    buckets = peers * (1 + cap // BUCKET_PAIRS)
    block = HEADER_WORDS + SPARE_WORDS[codec.wire]
    split = codec.words(cap) + block * buckets
    gather = (codec.words(-(-cap // size)) + 1) * peers + codec.words(cap) + block * peers
    summed = 8 * 256 + (size + 1) + segments  # int64 and float64: the radix select, twice, the cuts, the scales
    agreed = INT64_WORDS * (2 * summed + 7 * peers) + (SKETCH + 1) * peers
    # Messages: sums for radix select (four, where too many are equal eight), cuts and scales; verdict, counts, sizes
    # three times, sketch, balance and gather.
    third, told = pair * k * peers / size, INT64_WORDS * peers
    calls = [Call("all_gather", told), Call("all_to_all_single", told), *[Call("sendrecv", third / peers)] * peers]
    calls += [Call("all_gather", told), Call("all_to_all_single", third), Call("all_gather", third)]
    return Cost(0, 3 * third, split + gather + agreed, 28 * peers + buckets, tuple(calls))
