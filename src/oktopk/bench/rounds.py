"""Rounds: the candidates take turns, all ranks start together, and each turn's time and bytes are one sample."""

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
"""Rounds before those that count. They make buffers, PowerSGD's first two are dense, and paper mode takes the exact
thresholds that later steps reuse."""

EMPTY_TURNS = 5

Sample = dict[str, Any]
"""One candidate, round and rank: seconds, sent_bytes (by the interface; None outside of a lab), record_bytes (by the
method's own record; None if it has none), parts (seconds by name)."""


class Candidate(Protocol):
    """A method that takes its turn in every round."""

    def prepare(self, number: int) -> None:
        """Prepare the round of that number; this is not timed."""

    def run(self, number: int) -> None:
        """Do the work that is timed."""

    def account(self) -> Sample:
        """Return record_bytes and parts of the latest run."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The number of rounds, and how they are measured.

    rounds       rounds that count
    seconds      limit after which no further round is started
    in_lab       whether each rank has an interface of its own, whose bytes can be counted
    turns_file   file to which rank 0 adds a byte for each turn, for the progress bar
    """

    rounds: int
    seconds: float
    in_lab: bool
    turns_file: str


def take_turns(candidates: Sequence[Candidate], samples: Samples) -> list[list[Sample]]:
    """Return the samples of each candidate on this rank, those of the warm-up first."""
    count = sent_bytes if samples.in_lab else None
    between = _barrier_bytes(count)
    taken: list[list[Sample]] = [[] for _ in candidates]
    start = time.monotonic()
    for number in range(WARM_UP + samples.rounds):
        if number == WARM_UP:
            start = time.monotonic()
        if number > WARM_UP and not _all_agree(time.monotonic() - start < samples.seconds):
            break
        for candidate, row in zip(candidates, taken, strict=True):
            row.append(_turn(candidate, number, count, between))
            if dist.get_rank() == 0:
                with Path(samples.turns_file).open("ab") as file:
                    file.write(b".")
    return taken


def _turn(candidate: Candidate | None, number: int, count: Callable[[], int] | None, between: int) -> Sample:
    """Return one sample; without a candidate, of the barriers alone."""
    if candidate:
        candidate.prepare(number)
    dist.barrier()
    before = count() if count else 0
    start = time.perf_counter()
    if candidate:
        candidate.run(number)
    seconds = time.perf_counter() - start
    dist.barrier()  # bytes that are still in a socket's buffer belong to this turn
    sent = count() - before - between if count else None
    return {"seconds": seconds, "sent_bytes": sent, **(candidate.account() if candidate else {})}


def _barrier_bytes(count: Callable[[], int] | None) -> int:
    """Return the bytes of the barrier at the end of a turn."""
    turns = [_turn(None, number, count, 0) for number in range(EMPTY_TURNS)]
    return int(median(turn["sent_bytes"] for turn in turns)) if count else 0


def _all_agree(mine: bool) -> bool:
    """Return rank 0's answer, on all ranks."""
    answer = torch.tensor([int(mine)])
    dist.broadcast(answer, 0)
    return bool(answer.item())
