"""The errors of oktopk. All are `OktopkError`s, and a ValueError or RuntimeError as well.

An `InputError`, `NonFiniteError` or `MismatchError` is raised on every rank alike, before any gradient travels, and
leaves the residual as it was (steps on a GPU: see docs/gpu.md). A `MalformedError` is raised on the rank that received
the block, before anything of it is used; the others raise a `PeerError`.
"""

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class OktopkError(Exception):
    """Base class of the errors that oktopk raises on purpose."""


class SettingError(OktopkError, ValueError):
    """An impossible setting: density 2, an unknown wire."""


class InputError(OktopkError, ValueError):
    """A tensor that is refused: integer, of another size."""


class NonFiniteError(InputError):
    """A gradient that holds NaN or Inf; `rank` and `index` say where, if that is known."""

    def __init__(self, message: str, rank: int | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.index = rank, index


class MismatchError(OktopkError, ValueError):
    """Ranks that disagree on what they are about to reduce."""


class StateError(OktopkError, ValueError):
    """A state dict of another algorithm, version or size."""


class MalformedError(OktopkError, ValueError):
    """A malformed block, index or value; `rank` is the rank that sent it, if it is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message if rank is None else f"a malformed message from rank {rank}: {message}")
        self.rank = rank


class PeerError(OktopkError, RuntimeError):
    """Another rank failed, or left, while this one waited for it."""


def one_of(kind: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known, else raise a `SettingError` that lists the known names and the closest one."""
    names = sorted(known)
    if name in names:
        return name
    raise SettingError(f"unknown {kind} {name!r}; there is {', '.join(names)}.{hint(str(name).lower(), names)}")


def hint(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the question whether the closest of the known names was meant; nothing if none is close."""
    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def within(kind: str, value: float, low: float, high: float = float("inf"), *, open_low: bool = False) -> float:
    """Return `value` if it lies in [low, high] (or in (low, high]), else raise a `SettingError`."""
    if isinstance(value, (int, float)) and value <= high and (value > low if open_low else value >= low):
        return value
    upper = f" and at most {high:g}" if high < sys.float_info.max else ""
    raise SettingError(f"{kind} must be {'above' if open_low else 'at least'} {low:g}{upper}, not {value!r}")


def check_counts(counts: list[int], most: Sequence[int]) -> list[int]:
    """Return the number of pairs that each rank announces; refuse one above its limit, before room is made for it."""
    for source, (count, limit) in enumerate(zip(counts, most, strict=True)):
        if not 0 <= count <= limit:
            raise MalformedError(f"it announces {count} pairs, where there can be 0 to {limit}", source)
    return counts
