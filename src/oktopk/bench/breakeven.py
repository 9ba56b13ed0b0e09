"""Where a method pays: the link speeds, or the numbers of ranks, at which it is faster than dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from oktopk.bench.methods import DENSE, METHODS
from oktopk.bench.settings import link_name

Point = tuple[float, float]
"""A place (Mbit/s, infinite for an unlimited link; or ranks), and the ratio of dense's time to the method's there."""


def verdicts_of(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each method's verdict over the links for each P, and over P for each link that has several."""
    if not settings or all(row["x_dense"] is None for row in settings[0]["rows"]):
        return []
    verdicts = []
    for ranks in dict.fromkeys(setting["ranks"] for setting in settings):
        chosen = [setting for setting in settings if setting["ranks"] == ranks]
        verdicts += _verdicts(chosen, "mbit", f"P = {ranks}")
    for mbit in dict.fromkeys(setting["mbit"] for setting in settings):
        chosen = [setting for setting in settings if setting["mbit"] == mbit]
        if len(chosen) > 1:
            verdicts += _verdicts(chosen, "ranks", link_name(mbit))
    return verdicts


def sentences_of(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the verdicts as sentences; methods with the same verdict share one.

    >>> sentences_of([{"name": name, "sentence": f"{name}, P = 4: it pays"} for name in ("bf16", "topka")])
    ['bf16, topka, P = 4: it pays']
    """
    names: dict[str, list[str]] = {}
    for verdict in verdicts:
        names.setdefault(verdict["sentence"].removeprefix(verdict["name"]), []).append(verdict["name"])
    return [", ".join(same) + rest for rest, same in names.items()]


def crossings(points: Sequence[Point]) -> list[tuple[float, float, float | None]]:
    """Return the pairs of places between which a method starts or stops to pay, and the place between them.

    The place is on a straight line in the logarithms of both. Next to an unlimited link there is none: None.

    >>> crossings([(100, 4.0), (1000, 1.0), (10000, 0.25)])
    [(100, 1000, 1000.0)]
    """
    found = []
    for (a, before), (b, after) in pairwise(sorted(points)):
        if (before > 1) != (after > 1):
            share = math.log(before) / (math.log(before) - math.log(after))
            found.append((a, b, None if math.isinf(b) else round(a * (b / a) ** share, 6)))
    return found


def _verdicts(settings: Sequence[dict[str, Any]], over: str, where: str) -> list[dict[str, Any]]:
    names = [row["name"] for row in settings[0]["rows"] if row["method"] in METHODS and row["method"] != DENSE]
    verdicts = []
    for name in names:
        points = [
            (float(setting[over] or math.inf), row["x_dense"]["median"])
            for setting in settings
            for row in setting["rows"]
            if row["name"] == name
        ]
        verdicts.append(
            {
                "name": name,
                "over": over,
                "where": where,
                "pays_at": [None if math.isinf(x) else x for x, ratio in sorted(points) if ratio > 1],
                "changes_at": [place for *_, place in crossings(points)],
                "sentence": f"{name}, {where}: {_sentence(points, over)}",
            }
        )
    return verdicts


def _sentence(points: list[Point], over: str) -> str:
    paying, parts = {x for x, ratio in points if ratio > 1}, []
    for a, b, place in crossings(points):
        change = "stops paying" if a in paying else "starts to pay"
        parts.append(
            f"{change} at about {_place(place, over)}"
            if place
            else f"{change} between {_place(a, over)} and {_place(b, over)}"
        )
    if parts:
        return ", ".join(parts)
    everywhere = ", ".join(_place(x, over) for x, _ in sorted(points))
    return f"{'faster' if paying else 'no faster'} than dense wherever it was measured ({everywhere})"


def _place(x: float, over: str) -> str:
    """Return a place with its unit: a whole number as it is, any other to two figures.

    >>> _place(1000.0, "mbit"), _place(347.4, "mbit"), _place(4.0, "ranks")
    ('1000 Mbit/s', '350 Mbit/s', 'P = 4')
    """
    if math.isinf(x):
        return "an unlimited link"
    number = f"{x:.0f}" if x == int(x) else f"{float(f'{x:.2g}'):g}"
    return f"P = {number}" if over == "ranks" else f"{number} Mbit/s"
