"""Rounds: the candidates take turns, all ranks start together, and each turn's time and bytes are one sample."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oktopk.bench.machine import threads_for
from oktopk.bench.methods import Entry
from oktopk.bench.netlab import sent_bytes
from oktopk.bench.processes import Setting
from oktopk.bench.summary import WARM_UP, Sample, rows_of

MOST_SECONDS = 300.0
"""Seconds of a setting after which no further round is started, because a slow link would take hours."""

EMPTY_TURNS = 5


class Candidate:
    """A method that takes its turn in every round; this one does nothing."""

    def prepare(self, number: int) -> None:
        """Prepare the round of that number; this is not timed."""

    def run(self, number: int) -> None:
        """Do the work that is timed."""

    def account(self) -> Sample:
        """Return record_bytes and parts of the latest run."""
        return {"record_bytes": None, "parts": {}}


@dataclass(frozen=True)
class Samples:
    """The number of rounds that count, and how they are measured."""

    rounds: int
    seconds: float  # limit after which no further round is started
    in_lab: bool  # each rank has an interface of its own, whose bytes can be counted
    turns_file: str  # rank 0 adds a byte for each turn, for the progress bar


def measure(
    work: Callable[..., Any], args: tuple[Any, ...], entries: Sequence[Entry], setting: Setting, rounds: int
) -> dict[str, Any]:
    """Return the rows that `work(*args, entries, samples)` measured on the ranks of a setting."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("turns")
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with tempfile.NamedTemporaryFile() as turns, bar:
        task = bar.add_task(str(setting), total=(WARM_UP + rounds) * len(entries))

        def show() -> None:
            bar.update(task, completed=Path(turns.name).stat().st_size)

        samples = Samples(rounds, MOST_SECONDS, setting.mbit is not None, turns.name)
        ranks = setting.run(work, *args, entries, samples, show=show)
    num_rounds, rows = len(ranks[0][0]) - WARM_UP, rows_of(entries, ranks)
    return {**asdict(setting), "threads": threads_for(setting.ranks), "rounds": num_rounds, "rows": rows}


def take_turns(candidates: Sequence[Candidate], samples: Samples) -> list[list[Sample]]:
    """Return the samples of each candidate on this rank, those of the warm-up first."""
    count = sent_bytes if samples.in_lab else None
    barriers = [_turn(Candidate(), number, count, 0)["sent_bytes"] for number in range(EMPTY_TURNS)]
    between = int(median(barriers)) if count else 0
    taken: list[list[Sample]] = [[] for _ in candidates]
    for number in range(WARM_UP + samples.rounds):
        if number <= WARM_UP:
            start = time.monotonic()
        elif not _all_agree(time.monotonic() - start < samples.seconds):
            break
        for candidate, row in zip(candidates, taken, strict=True):
            row.append(_turn(candidate, number, count, between))
            if dist.get_rank() == 0:
                with Path(samples.turns_file).open("ab") as file:
                    file.write(b".")
    return taken


def _turn(candidate: Candidate, number: int, count: Callable[[], int] | None, between: int) -> Sample:
    """Return one sample, less the bytes of the barrier at its end."""
    candidate.prepare(number)
    dist.barrier()
    before = count() if count else 0
    start = time.perf_counter()
    candidate.run(number)
    seconds = time.perf_counter() - start
    dist.barrier()  # bytes that are still in a socket's buffer belong to this turn
    sent = count() - before - between if count else None
    return {"seconds": seconds, "sent_bytes": sent, **candidate.account()}


def _all_agree(mine: bool) -> bool:
    """Return rank 0's answer, on all ranks."""
    answer = torch.tensor([int(mine)])
    dist.broadcast(answer, 0)
    return bool(answer.item())
