"""Figures as people read them: with their unit, and "n/a" where there is none."""

import math
from collections.abc import Callable
from typing import Any


def format_bytes(count: float) -> str:
    """Return bytes with three digits and a unit.

    >>> format_bytes(4_252_320)
    '4.25 MB'
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def count(number: int, noun: str) -> str:
    """Return a number of things, with the plural of their noun.

    >>> count(1, "step"), count(2000, "worker")
    ('1 step', '2,000 workers')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_seconds(value: float) -> str:
    """Return a time with its unit.

    >>> [format_seconds(value) for value in (0.00123, 1.5, 100.0, 3725.0)]
    ['1.23 ms', '1.5 s', '1 min 40 s', '1 h 2 min']
    """
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_ratio(value: float, more: str, less: str) -> str:
    """Return a ratio in the words that fit it.

    >>> format_ratio(2.5, "faster", "slower"), format_ratio(0.5, "faster", "slower"), format_ratio(1.0, "fewer", "more")
    ('2.5x faster', '2x slower', 'the same')
    """
    if f"{value:.3g}" == "1" or value <= 0:
        return "the same" if value > 0 else "n/a"
    return f"{value:.3g}x {more}" if value > 1 else f"{1 / value:.3g}x {less}"


WRITTEN: dict[str, Callable[[Any], str]] = {
    "text": lambda value: f"{value:,}" if type(value) is int else str(value),
    "count": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}",
    "bytes": format_bytes,
    "seconds": format_seconds,
    "share": lambda value: f"{100 * value:.3g} %",
    "times": lambda value: f"{value:.3g}x",
    "faster": lambda value: format_ratio(value, "faster", "slower"),
    "fewer": lambda value: format_ratio(value, "fewer", "more"),
    "sooner": lambda value: format_ratio(value, "sooner", "later"),
}
"""Functions that write a figure, by unit."""


def format_value(value: Any, unit: str = "number") -> str:
    """Return a figure with its unit; "n/a" if it is None or not finite.

    >>> format_value(0.0517, "share"), format_value(None, "bytes")
    ('5.17 %', 'n/a')
    """
    known = value is not None and (not isinstance(value, float) or math.isfinite(value))
    return WRITTEN[unit](value) if known else "n/a"
