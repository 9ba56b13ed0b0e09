"""Laps: the contenders take turns, all ranks start each lap together, and what it took and sent is written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from oktopk.bench.netlab import sent_bytes

WARM_UP = 3
"""Laps of each contender before those that count: they make buffers, PowerSGD's first two are dense, and the first one
of the paper's mode takes the exact thresholds that the others reuse."""

EMPTY_LAPS = 5

Sample = dict[str, Any]
"""One contender, one round, one rank: seconds, sent_bytes (by the interface; None outside of a lab), record_bytes (by
the method's own account; None if it has none), parts (seconds by name)."""


class Candidate(Protocol):
    """What takes its turn."""

    def prepare(self, turn: int) -> None:
        """Do what is not timed."""

    def run(self, turn: int) -> None:
        """Do what is."""

    def account(self) -> Sample:
        """Return record_bytes and parts of the latest run."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """How many laps, and how they are measured.

    rounds       laps of each contender that count
    seconds      no round is started after so many seconds of those that count
    in_lab       each rank has an interface of its own, whose bytes can be counted
    lap_file     where rank 0 leaves a byte for each lap, so that others can see how far it is
    """

    rounds: int
    seconds: float
    in_lab: bool
    lap_file: str


def take_turns(contenders: Sequence[Candidate], laps: Samples) -> list[list[Sample]]:
    """Return the laps of each contender on this rank, those of the warm-up first."""
    count = sent_bytes if laps.in_lab else None
    between = _bytes_between(count)
    taken: list[list[Sample]] = [[] for _ in contenders]
    start = time.monotonic()
    for turn in range(WARM_UP + laps.rounds):
        if turn == WARM_UP:
            start = time.monotonic()
        if turn > WARM_UP and not _all_agree(time.monotonic() - start < laps.seconds):
            break
        for contender, rows in zip(contenders, taken, strict=True):
            rows.append(_lap(contender, turn, count, between))
            if dist.get_rank() == 0:
                with Path(laps.lap_file).open("ab") as file:
                    file.write(b".")
    return taken


def _lap(contender: Candidate, turn: int, count: Callable[[], int] | None, between: int) -> Sample:
    contender.prepare(turn)
    dist.barrier()
    before = count() if count else 0
    start = time.perf_counter()
    contender.run(turn)
    seconds = time.perf_counter() - start
    dist.barrier()  # or what is still in a socket's buffer would be counted in another's lap
    sent = count() - before - between if count else None
    return {"seconds": seconds, "sent_bytes": sent, **contender.account()}


def _bytes_between(count: Callable[[], int] | None) -> int:
    """Return what an empty lap sends: the barrier at its end."""
    laps = [_lap(_Nothing(), turn, count, 0) for turn in range(EMPTY_LAPS)]
    return int(median(lap["sent_bytes"] for lap in laps)) if count else 0


class _Nothing:
    def prepare(self, turn: int) -> None:
        pass

    def run(self, turn: int) -> None:
        pass

    def account(self) -> Sample:
        return {}


def _all_agree(mine: bool) -> bool:
    """Return rank 0's word, on all ranks."""
    word = torch.tensor([int(mine)])
    dist.broadcast(word, 0)
    return bool(word.item())
