"""Rows of figures from the samples of all ranks, and the links or numbers of ranks at which a method beats dense."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from oktopk.bench.methods import BF16, DENSE, METHODS, Entry
from oktopk.bench.processes import link_name, spread

WARM_UP = 3
"""Rounds before those that count. They make buffers, PowerSGD's first two are dense, and paper mode takes the exact
thresholds that later steps reuse."""

Sample = dict[str, Any]
"""One candidate, round and rank: seconds, sent_bytes (by the interface; None outside of a lab), record_bytes (by the
method's own record; None if it has none), parts (seconds by name)."""


def rows_of(entries: Sequence[Entry], ranks: Sequence[Sequence[Sequence[Sample]]]) -> list[dict[str, Any]]:
    """Return a row for each entry, given each rank's samples of each entry; ratios are taken round by round."""
    several = len({entry.density for entry in entries} - {None}) > 1
    rows = [_row(entry, several, [samples[i] for samples in ranks]) for i, entry in enumerate(entries)]
    for rival in (DENSE, BF16):
        theirs = next((row["rounds_s"] for row in rows if row["method"] == rival), None)
        for row in rows:
            row[f"x_{rival}"] = theirs and _ratios([a / b for a, b in zip(theirs, row["rounds_s"], strict=True)])
    return rows


def _ratios(values: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of all rounds, with their quartiles."""
    low, _, high = quantiles(values, method="inclusive") if len(values) > 1 else (*values, *values, *values)
    return {**spread(values), "low": low, "high": high}


def side_of(ratios: dict[str, float]) -> int:
    """Return 1 if a method is faster than its rival, -1 if it is slower, and 0 if the rounds do not tell.

    Three quarters of the rounds must agree.
    """
    return (ratios["low"] > 1) - (ratios["high"] < 1)


def _row(entry: Entry, several: bool, ranks: Sequence[Sequence[Sample]]) -> dict[str, Any]:
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


def series_of(settings: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield (field, name, settings): those of each P by their links ("mbit"), then of each link by their "ranks"."""
    for fixed, over in (("ranks", "mbit"), ("mbit", "ranks")):
        for value in dict.fromkeys(setting[fixed] for setting in settings):
            chosen = [setting for setting in settings if setting[fixed] == value]
            name = f"P = {value}" if fixed == "ranks" else link_name(value)
            yield over, name, sorted(chosen, key=lambda setting: setting[over] or math.inf)


def verdicts_of(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each method's verdict over the links for each P, and over P for each link that has several."""
    if not settings or all(row["x_dense"] is None for row in settings[0]["rows"]):
        return []
    names = [row["name"] for row in settings[0]["rows"] if row["method"] in METHODS and row["method"] != DENSE]
    return [
        _verdict(name, over, where, chosen)
        for over, where, chosen in series_of(settings)
        if over == "mbit" or len(chosen) > 1
        for name in names
    ]


def _verdict(name: str, over: str, where: str, settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = [(setting, row) for setting in settings for row in setting["rows"] if row["name"] == name]
    sides = {float(setting[over] or math.inf): side_of(row["x_dense"]) for setting, row in rows}
    points = [(float(setting[over] or math.inf), row["x_dense"]["median"]) for setting, row in rows]
    told = [(x, ratio) for x, ratio in points if sides[x]]
    alike = ", ".join(_place(x, over) for x, side in sides.items() if not side)
    says = [_sentence(told, over)] * bool(told)
    says += [f"no faster or slower than dense beyond the spread at {alike}"] * bool(alike)
    return {
        "name": name,
        "over": over,
        "where": where,
        "pays_at": [None if math.isinf(x) else x for x, side in sides.items() if side > 0],
        "changes_at": [place for *_, place in crossings(told)],
        "sentence": f"{name}, {where}: {'; '.join(says)}",
    }


def crossings(points: Sequence[tuple[float, float]]) -> list[tuple[float, float, float | None]]:
    """Return the pairs of places between which a method starts or stops to pay, and the place between them.

    A point is a place (Mbit/s, infinite for an unlimited link; or ranks) and the ratio of dense's time to the method's.
    The place is on a straight line in the logarithms of both. Next to an unlimited link there is none: None.
    """
    found = []
    for (a, before), (b, after) in pairwise(points):
        if (before > 1) != (after > 1):
            share = math.log(before) / (math.log(before) - math.log(after))
            found.append((a, b, None if math.isinf(b) else round(a * (b / a) ** share, 6)))
    return found


def _sentence(points: list[tuple[float, float]], over: str) -> str:
    paying, parts = {x for x, ratio in points if ratio > 1}, []
    for a, b, place in crossings(points):
        where = f"at about {_place(place, over)}" if place else f"between {_place(a, over)} and {_place(b, over)}"
        parts.append(f"{'stops paying' if a in paying else 'starts to pay'} {where}")
    if parts:
        return ", ".join(parts)
    everywhere = ", ".join(_place(x, over) for x, _ in points)
    return f"{'faster' if paying else 'slower'} than dense at {everywhere}"


def _place(x: float, over: str) -> str:
    """Return a place with its unit: a whole number as it is, any other to two figures."""
    if math.isinf(x):
        return "an unlimited link"
    number = f"{x:.0f}" if x == int(x) else f"{float(f'{x:.2g}'):g}"
    return f"P = {number}" if over == "ranks" else f"{number} Mbit/s"
