"""What the laps of all ranks come to: medians with their spread, and ratios lap by lap."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from oktopk.bench.methods import BF16, DENSE, Entry
from oktopk.bench.processes import spread
from oktopk.bench.rounds import WARM_UP, Sample

Row = dict[str, Any]
"""One method (and density) in one setting."""


def rows_of(entries: Sequence[Entry], ranks: Sequence[Sequence[Sequence[Sample]]]) -> list[Row]:
    """Return a row for each entry, given each rank's laps of each entry."""
    several = len({entry.density for entry in entries} - {None}) > 1
    rows = [
        {"name": _name(entry, several), **_row(entry, [laps[i] for laps in ranks])} for i, entry in enumerate(entries)
    ]
    for rival in (DENSE, BF16):
        theirs = next((row["laps_s"] for row in rows if row["method"] == rival), None)
        for row in rows:
            row[f"x_{rival}"] = theirs and times_faster(theirs, row["laps_s"])
    return rows


def times_faster(theirs: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return how many times our time goes into theirs, lap by lap.

    >>> times_faster([2.0, 3.0, 8.0], [1.0, 3.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 4.0}
    """
    return spread([their / our for their, our in zip(theirs, ours, strict=True)])


def _name(entry: Entry, several: bool) -> str:
    """Return the method, with its density if there are several."""
    return f"{entry.method} {entry.density:g}" if several and entry.density is not None else entry.method


def _row(entry: Entry, ranks: Sequence[Sequence[Sample]]) -> Row:
    """Return one entry's figures, given its laps by rank: each lap is its slowest rank's."""
    slowest = [max(laps, key=lambda lap: float(lap["seconds"])) for laps in zip(*ranks, strict=True)]
    counted = slowest[WARM_UP:]
    return {
        "method": entry.method,
        "density": entry.density,
        "seconds": spread([lap["seconds"] for lap in counted]),
        "laps_s": [lap["seconds"] for lap in counted],
        "warm_up_s": [lap["seconds"] for lap in slowest[:WARM_UP]],
        "sent_bytes": _most(ranks, "sent_bytes"),
        "record_bytes": _most(ranks, "record_bytes"),
        "parts_s": _parts(counted),
    }


def _most(ranks: Sequence[Sequence[Sample]], what: str) -> float | None:
    """Return the median lap of the rank that has most; None where nobody counts it."""
    counted = [[lap[what] for lap in laps[WARM_UP:]] for laps in ranks]
    return None if counted[0][0] is None else max(median(laps) for laps in counted)


def _parts(laps: Sequence[Sample]) -> dict[str, float]:
    """Return the median seconds of each part, as the slowest rank has them."""
    names = dict.fromkeys(name for lap in laps for name in lap["parts"])
    return {name: median(lap["parts"].get(name, 0.0) for lap in laps) for name in names}
