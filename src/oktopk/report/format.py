"""Figures for people: with their unit, and "n/a" where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

UNKNOWN = "n/a"


def megabytes(count: float) -> str:
    """Return bytes for people.

    >>> megabytes(4_252_320)
    '4.25 MB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    """Return a time for people.

    >>> [seconds(value) for value in (0.00123, 1.5, 100.0, 3725.0)]
    ['1.23 ms', '1.5 s', '1 min 40 s', '1 h 2 min']
    """
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float) -> str:
    """Return four figures, without a power of ten where people would not write one."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


SHOWN: dict[str, Callable[[Any], str]] = {
    "text": lambda value: f"{value:,}" if type(value) is int else str(value),
    "count": lambda value: f"{value:,.0f}",
    "number": number,
    "bytes": megabytes,
    "seconds": seconds,
    "share": lambda value: f"{100 * value:.3g} %",
    "times": lambda value: f"{value:.3g}x",
}
"""How each kind of figure is written."""


def shown(value: Any, kind: str) -> str:
    """Return a figure of this kind for people.

    >>> shown(0.0517, "share"), shown(None, "bytes")
    ('5.17 %', 'n/a')
    """
    return UNKNOWN if value is None else SHOWN[kind](value)
