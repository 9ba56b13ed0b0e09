"""A bar on stderr while something takes long; nothing where nobody watches."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


def counted() -> Progress:
    """Return a bar that counts things; a context manager."""
    return _bar(MofNCompleteColumn())


def measured() -> Progress:
    """Return a bar that shows a percentage; a context manager."""
    return _bar(TaskProgressColumn())


def _bar(figure: MofNCompleteColumn | TaskProgressColumn) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), figure, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
