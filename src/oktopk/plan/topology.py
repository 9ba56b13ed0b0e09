"""`Topology`: ranks in levels, such as 8 GPUs of a node, 16 nodes of a site, and 4 sites."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from oktopk.errors import SettingError, within

PAYLOAD = 0.94
"""Part of a link's bits that is payload, because a full Ethernet frame of 1,538 bytes carries 1,448 of them."""

MOST_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level: `size` equal parts, each with a full-duplex link of `mbit` to the others.

    A part of the first level is a rank. A part of each further level is everything below it: a node, a site.
    """

    name: str
    size: int
    mbit: float  # 0: no limit
    latency_s: float = 0.0  # of a message, one way

    def __post_init__(self) -> None:
        within(f"size of level {self.name!r}", self.size, 1, MOST_RANKS)
        within(f"mbit of level {self.name!r}", self.mbit, 0)
        within(f"latency of level {self.name!r}", self.latency_s, 0)

    def wire_s(self, num_bytes: float) -> float:
        """Return the seconds that a link needs for `num_bytes` of payload."""
        return 8e-6 * num_bytes / (self.mbit * PAYLOAD) if self.mbit else 0.0


@dataclass(frozen=True)
class Topology:
    """Levels, the innermost first. Ranks are numbered so that those of a part follow each other."""

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise SettingError("a topology needs at least one level: [[level]] with name, size and mbit")
        within("the number of ranks", self.size, 1, MOST_RANKS)

    @property
    def size(self) -> int:
        """P, the number of ranks."""
        return math.prod(level.size for level in self.levels)

    @property
    def inner_size(self) -> int:
        """Ranks of a part of the outermost level."""
        return math.prod(level.size for level in self.levels[:-1])

    def blocks(self) -> Iterator[tuple[Level, int]]:
        """Yield each level with the number of ranks that share one of its links."""
        ranks = 1
        for level in self.levels:
            yield level, ranks
            ranks *= level.size

    def with_outer(self, *, mbit: float | None = None, size: int | None = None) -> Topology:
        """Return the same with another speed, or number of parts, of the outermost level."""
        outer = self.levels[-1]
        changed = replace(outer, mbit=outer.mbit if mbit is None else mbit, size=size or outer.size)
        return Topology((*self.levels[:-1], changed))

    def __str__(self) -> str:
        return ", ".join(
            f"{level.size} x {level.name} ({f'{level.mbit:g} Mbit/s' if level.mbit else 'no limit'}"
            + (f", {1e3 * level.latency_s:g} ms)" if level.latency_s else ")")
            for level in self.levels
        )


def flat(size: int, mbit: float, latency_s: float = 0.0) -> Topology:
    """Return hosts of one rank each at one switch.

    >>> flat(4, 1000).size
    4
    """
    return Topology((Level(name="host", size=size, mbit=mbit, latency_s=latency_s),))
