"""Errors as the user sees them: what oktopk raises on purpose is one line; a traceback is for bugs."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from oktopk.errors import OktopkError

FAILED = 1
CANNOT = 2
"""Exit statuses: it failed on the way; it could not be started as it was asked for."""


@contextmanager
def exit_on_error(rank: int | None = None, failed: tuple[type[OktopkError], ...] = ()) -> Iterator[None]:
    """Print what oktopk or the file system has to say, with the rank of the worker, and leave.

    The status is that of a mistake, but for the errors `failed`, which come up on the way, and those that have a
    status of their own.
    """
    try:
        yield
    except (OktopkError, OSError) as error:
        where = "" if rank is None else f"rank {rank}: "
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error[/] {escape(where + str(error))}")
        status = FAILED if isinstance(error, failed) else CANNOT
        raise typer.Exit(getattr(error, "exit_status", status)) from None
