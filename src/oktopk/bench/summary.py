"""The rows of a table from the samples of all ranks: medians with their spread, and ratios round by round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from oktopk.bench.methods import BF16, DENSE, Entry
from oktopk.bench.processes import spread
from oktopk.bench.rounds import WARM_UP, Sample

Row = dict[str, Any]
"""The figures of one method and density in one setting."""


def rows_of(entries: Sequence[Entry], ranks: Sequence[Sequence[Sequence[Sample]]]) -> list[Row]:
    """Return a row for each entry, given each rank's samples of each entry."""
    several = len({entry.density for entry in entries} - {None}) > 1
    rows = [_row(entry, several, [samples[i] for samples in ranks]) for i, entry in enumerate(entries)]
    for rival in (DENSE, BF16):
        theirs = next((row["rounds_s"] for row in rows if row["method"] == rival), None)
        for row in rows:
            row[f"x_{rival}"] = theirs and times_faster(theirs, row["rounds_s"])
    return rows


def times_faster(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return the ratio of their time to ours, round by round.

    >>> times_faster([2.0, 3.0, 8.0], [1.0, 3.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 4.0}
    """
    return spread([their / our for their, our in zip(theirs, ours, strict=True)])


def _row(entry: Entry, several: bool, ranks: Sequence[Sequence[Sample]]) -> Row:
    """Return one entry's figures, given its samples by rank: the slowest rank's sample counts in each round."""
    slowest = [max(samples, key=lambda sample: float(sample["seconds"])) for samples in zip(*ranks, strict=True)]
    counted = slowest[WARM_UP:]
    seconds = [sample["seconds"] for sample in slowest]
    parts = dict.fromkeys(name for sample in counted for name in sample["parts"])
    return {
        "name": f"{entry.method} {entry.density:g}" if several and entry.density is not None else entry.method,
        "method": entry.method,
        "density": entry.density,
        "seconds": spread(seconds[WARM_UP:]),
        "rounds_s": seconds[WARM_UP:],
        "warm_up_s": seconds[:WARM_UP],
        "sent_bytes": _most(ranks, "sent_bytes"),
        "record_bytes": _most(ranks, "record_bytes"),
        "parts_s": {name: median(sample["parts"].get(name, 0.0) for sample in counted) for name in parts},
    }


def _most(ranks: Sequence[Sequence[Sample]], name: str) -> float | None:
    """Return the median figure of the rank that has most; None if it is not counted."""
    counted = [[sample[name] for sample in samples[WARM_UP:]] for samples in ranks]
    return None if counted[0][0] is None else max(median(samples) for samples in counted)
