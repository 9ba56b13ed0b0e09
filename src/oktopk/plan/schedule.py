"""`Schedule`: the messages of an exchange. The cost model and the simulator both replay it, so that they cannot differ.

A schedule is a list of rounds. In a round each rank of a group sends one message of the same size to the rank at each
of some distances. A rank begins a round when all messages of its round before have arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby, repeat

from oktopk.comm.grid import grid_of, has_two_levels
from oktopk.comm.process_group import LARGE_BYTES
from oktopk.cost import Call
from oktopk.errors import SettingError
from oktopk.plan.topology import Topology
from oktopk.words import WORD_BYTES

ALL, UP, DOWN = "all", "up", "down"
"""The ranks that send in a round: all of them, or those at one height of a tree, towards its root or away from it."""

DIRECT = ("all_to_all", "all_to_all_single")


@dataclass(frozen=True)
class Round:
    """The messages of a round: `num_bytes` to each of the ranks at `distances`, `times` such rounds in a row.

    `kind` is the collective that the round is of. With `part` the messages stay within parts of the group: of that
    many ranks, `step` places apart.
    """

    kind: str
    distances: range
    num_bytes: float
    times: int = 1
    senders: str = ALL
    part: int = 0
    step: int = 1

    def targets(self, place: int, size: int) -> Iterator[int]:
        """Yield the places in the group that the rank at `place` sends to."""
        if self.senders == ALL:
            part = self.part or size
            index = place // self.step % part
            yield from (place + ((index + d) % part - index) * self.step for d in self.distances)
            return
        distance = self.distances[0]
        if self.senders == UP and place % (2 * distance) == distance:
            yield place - distance
        if self.senders == DOWN and place % (2 * distance) == 0 and place + distance < size:
            yield place + distance


@dataclass(frozen=True)
class Message:
    """One message; `needs` are the numbers of the messages that must have arrived at its sender before."""

    number: int
    source: int
    target: int
    num_bytes: float
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Rounds of groups of `size` ranks; the ranks of a group are `stride` numbers apart."""

    size: int
    rounds: tuple[Round, ...]
    stride: int = 1

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends; with a tree, the one that sends in each of its rounds."""
        return sum(each.num_bytes * len(each.distances) * each.times for each in self.rounds)

    def sends(self, num_ranks: int) -> Iterator[list[tuple[list[int], float]]]:
        """Yield for each round the targets of every rank, and the bytes for each of them."""
        for each in chain.from_iterable(repeat(each, each.times) for each in self.rounds):
            made = []
            for rank in range(num_ranks):
                first, place = self._place(rank)
                targets = [first + target * self.stride for target in each.targets(place, self.size)]
                made.append((targets, each.num_bytes))
            yield made

    def messages(self, num_ranks: int) -> Iterator[Message]:
        """Yield the messages of all groups of `num_ranks` ranks, each after those that it needs."""
        arrived: list[tuple[int, ...]] = [()] * num_ranks
        number = 0
        for sends in self.sends(num_ranks):
            coming: list[list[int]] = [[] for _ in range(num_ranks)]
            for rank, (targets, num_bytes) in enumerate(sends):
                for target in targets:
                    yield Message(number, rank, target, num_bytes, arrived[rank])
                    coming[target].append(number)
                    number += 1
            arrived = [tuple(came) or before for came, before in zip(coming, arrived, strict=True)]

    def _place(self, rank: int) -> tuple[int, int]:
        """Return the first rank of the group of `rank`, and the place of `rank` in the group."""
        span = self.size * self.stride
        start = rank // span * span + rank % self.stride
        return start, (rank - start) // self.stride


def schedule_of(calls: Iterable[Call], size: int, stride: int = 1) -> Schedule:
    """Return the schedule of collectives in groups of `size` ranks, as `ProcessGroupComm` and gloo send them.

    An all_reduce is a ring, and so is a gather of large blocks. Small blocks go to all others at once, or along the
    rows and columns of a grid where the ranks are many.

    >>> [(each.distances, each.num_bytes) for each in schedule_of([Call("all_gather", 30)], size=4).rounds]
    [(range(1, 4), 40.0)]
    >>> [(each.distances, each.num_bytes) for each in schedule_of([Call("all_gather", 630)], size=64).rounds]
    [(range(1, 8), 40.0), (range(1, 8), 320.0)]
    """
    rounds: list[Round] = []
    for call, same in groupby(calls if size > 1 else ()):
        made, times = _rounds_of(call, size), len(list(same))
        rounds += [replace(made[0], times=times * made[0].times)] if len(made) == 1 else made * times
    return Schedule(size, tuple(rounds), stride)


def _rounds_of(call: Call, size: int) -> list[Round]:
    kind, num_bytes, peers = call.collective, call.words * WORD_BYTES, size - 1
    is_small = kind == "all_gather" and num_bytes < LARGE_BYTES * peers
    if is_small and has_two_levels(size):
        width, height = grid_of(size)
        along_row = Round(kind, range(1, width), num_bytes / peers, part=width)
        return [along_row, Round(kind, range(1, height), width * num_bytes / peers, part=height, step=width)]
    if kind in DIRECT or is_small:
        return [Round(kind, range(1, size), num_bytes / peers)]
    if kind.startswith("all_reduce"):
        return [Round(kind, range(1, 2), num_bytes / (2 * peers), 2 * peers)]
    if kind in ("all_gather", "reduce_scatter"):
        return [Round(kind, range(1, 2), num_bytes / peers, peers)]
    if kind == "sendrecv":
        return [Round(kind, range(1, 2), num_bytes)]
    raise SettingError(f"no schedule for the collective {kind!r}")


def tree(num_bytes: float, size: int) -> Schedule:
    """Return a tree of merges: up to rank 0, and down again, `num_bytes` a message."""
    heights = [1 << i for i in range((size - 1).bit_length())]
    up = [Round("sendrecv", range(d, d + 1), num_bytes, senders=UP) for d in heights]
    down = [Round("sendrecv", range(d, d + 1), num_bytes, senders=DOWN) for d in reversed(heights)]
    return Schedule(size, (*up, *down))


def crossings(schedule: Schedule, each: Round, block: int) -> int:
    """Return the messages of a round that pass the busiest link, each way, of `block` ranks.

    >>> eight, pairs = schedule_of([Call("all_to_all", 7)], 8), schedule_of([Call("all_gather", 1)], 2, stride=4)
    >>> crossings(eight, eight.rounds[0], 4), crossings(pairs, pairs.rounds[0], 4)
    (16, 4)
    """
    if each.senders == ALL:
        return _of_all(each.part or schedule.size, schedule.stride * each.step, each.distances, block)
    return _of_tree(schedule.size, schedule.stride, each.distances[0], each.senders, block)


@lru_cache(maxsize=4096)
def _of_all(size: int, stride: int, distances: range, block: int) -> int:
    members, groups = max(1, block // stride), min(block, stride)
    if members >= size:
        return 0
    return groups * sum(min(d % size, members, size - d % size) for d in distances)


@lru_cache(maxsize=4096)
def _of_tree(size: int, stride: int, distance: int, senders: str, block: int) -> int:
    """Count, of the groups that lie across a block, the messages out of it and into it."""
    each, ranks = Round("sendrecv", range(distance, distance + 1), 0.0, senders=senders), Counter[tuple[int, str]]()
    for place in range(size):
        for target in each.targets(place, size):
            source_block, target_block = place * stride // block, target * stride // block
            if source_block != target_block:
                ranks.update([(source_block, "out"), (target_block, "in")])
    return max(ranks.values(), default=0) * min(block, stride)


def wire_seconds(each: Round, schedule: Schedule, topology: Topology) -> tuple[float, float]:
    """Return the seconds that the busiest link needs for a round, and the latency of the farthest message."""
    wire_s = latency_s = 0.0
    for level, ranks in topology.blocks():
        count = crossings(schedule, each, ranks)
        if count:
            wire_s, latency_s = max(wire_s, level.wire_s(count * each.num_bytes)), level.latency_s
    return wire_s, latency_s
