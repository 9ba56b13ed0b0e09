"""`Finding`: a line of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec

INFO, OK, NOTE, FAIL = "info", "ok", "note", "FAIL"
"""Status of a finding: nothing to judge; as it should be; works, but could be better; wrong."""

P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """Subject and result of a check, for people; its status, advice if it is not `ok`, and figures for programs.

    >>> Finding("versions", "torch", "2.9.0").status
    'info'
    """

    about: str
    name: str
    found: str
    status: str = INFO
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def raising_is_failing(about: str) -> Callable[[Callable[P, Iterator[Finding]]], Callable[P, Iterator[Finding]]]:
    """Turn an exception of a check into a finding, so that the other checks still run."""

    def around(check: Callable[P, Iterator[Finding]]) -> Callable[P, Iterator[Finding]]:
        @wraps(check)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
            try:
                yield from check(*args, **kwargs)
            except Exception as error:
                line = f"{type(error).__name__}: {error}".splitlines()[0]
                yield Finding(about, "could not be done", line, FAIL)

        return checked

    return around
