"""Where a method stops paying: the link speed, or the number of ranks, from which on it is no faster than dense."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from oktopk.bench.methods import DENSE, METHODS
from oktopk.bench.settings import link_name

Point = tuple[float, float]
"""Where (Mbit/s, infinite for an unlimited link; or ranks), and how many times faster than dense."""


def verdicts_of(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each method, where it pays: over the links for each P and, if there are several, over P for each."""
    if not settings or all(row["x_dense"] is None for row in settings[0]["rows"]):
        return []
    verdicts = []
    for ranks in dict.fromkeys(setting["ranks"] for setting in settings):
        chosen = [setting for setting in settings if setting["ranks"] == ranks]
        verdicts += _verdicts(chosen, "mbit", f"P = {ranks}", _speed, _links)
    for mbit in dict.fromkeys(setting["mbit"] for setting in settings):
        chosen = [setting for setting in settings if setting["mbit"] == mbit]
        if len(chosen) > 1:
            verdicts += _verdicts(chosen, "ranks", link_name(mbit), lambda setting: float(setting["ranks"]), _sizes)
    return verdicts


def sentences_of(verdicts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the verdicts in sentences, those that say the same of several methods as one.

    >>> sentences_of([{"name": name, "sentence": f"{name}, P = 4: it pays"} for name in ("bf16", "topka")])
    ['bf16, topka, P = 4: it pays']
    """
    names: dict[str, list[str]] = {}
    for verdict in verdicts:
        names.setdefault(verdict["sentence"].removeprefix(verdict["name"]), []).append(verdict["name"])
    return [", ".join(same) + rest for rest, same in names.items()]


def crossings(points: Sequence[Point]) -> list[tuple[float, float, float | None]]:
    """Return where it changes whether a method pays: between which two points, and where between them.

    Straight lines in the logarithms of both; next to an unlimited link there is nothing to draw one to: None.

    >>> crossings([(100, 4.0), (1000, 1.0), (10000, 0.25)])
    [(100, 1000, 1000.0)]
    """
    found = []
    for (a, before), (b, after) in pairwise(sorted(points)):
        if (before > 1) != (after > 1):
            place = None if math.isinf(b) else round(math.exp(_between(a, b, math.log(before), math.log(after))), 6)
            found.append((a, b, place))
    return found


def _between(a: float, b: float, before: float, after: float) -> float:
    return math.log(a) + (math.log(b) - math.log(a)) * before / (before - after)


def _verdicts(
    settings: Sequence[dict[str, Any]],
    over: str,
    where: str,
    place: Callable[[dict[str, Any]], float],
    shown: Callable[[Sequence[float]], str],
) -> list[dict[str, Any]]:
    names = [row["name"] for row in settings[0]["rows"] if row["method"] in METHODS and row["method"] != DENSE]
    return [
        _verdict(
            [(place(s), r["x_dense"]["median"]) for s in settings for r in s["rows"] if r["name"] == name],
            {"name": name, "over": over, "where": where},
            shown,
        )
        for name in names
    ]


def _verdict(points: list[Point], about: dict[str, Any], shown: Callable[[Sequence[float]], str]) -> dict[str, Any]:
    paying = sorted(x for x, ratio in points if ratio > 1)
    changes = crossings(points)
    return {
        **about,
        "pays_at": [None if math.isinf(x) else x for x in paying],
        "changes_at": [place for *_, place in changes],
        "sentence": f"{about['name']}, {about['where']}: {_sentence(points, paying, changes, shown)}",
    }


def _sentence(
    points: list[Point],
    paying: list[float],
    changes: Sequence[tuple[float, float, float | None]],
    shown: Callable[[Sequence[float]], str],
) -> str:
    everywhere = shown(sorted(x for x, _ in points))
    if not changes:
        return f"{'faster' if paying else 'no faster'} than dense wherever it was measured ({everywhere})"
    parts = []
    for a, b, place in changes:
        what = "stops paying" if a in paying else "starts to pay"
        parts.append(f"{what} {f'at about {shown([place])}' if place else f'between {shown([a])} and {shown([b])}'}")
    return ", ".join(parts)


def _speed(setting: dict[str, Any]) -> float:
    return float(setting["mbit"] or math.inf)


def _links(speeds: Sequence[float]) -> str:
    return ", ".join("an unlimited link" if math.isinf(speed) else f"{_rounded(speed)} Mbit/s" for speed in speeds)


def _sizes(sizes: Sequence[float]) -> str:
    return ", ".join(f"P = {_rounded(size)}" for size in sizes)


def _rounded(number: float) -> str:
    """Return two figures of a number, more of what was given as a whole number.

    >>> _rounded(1000.0), _rounded(347.4)
    ('1000', '350')
    """
    return f"{number:.0f}" if number == int(number) else f"{float(f'{number:.2g}'):g}"
