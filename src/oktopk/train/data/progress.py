"""A bar on stderr while something takes long; nothing where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def tracked(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    """Return the items, counted by a bar as they are used."""
    console = Console(stderr=True)
    return track(items, description, total, console=console, disable=not console.is_terminal, transient=True)
