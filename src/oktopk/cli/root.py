"""`oktopk`: the root of the command line. Each command is imported when it is called, and no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import oktopk

COMMANDS = ("train", "data", "bench", "report", "watch", "doctor", "worker")


def load(name: str) -> Any:
    """Import the command of that name, and return it."""
    if name == "train":
        from oktopk.train.cli import Train, train

        return command(train, cls=Train)
    if name == "worker":
        from oktopk.train.cli import worker

        return command(worker, hidden=True)
    if name == "data":
        from oktopk.train.data.cli import app as data

        return typer.main.get_command(data)
    if name == "bench":
        from oktopk.bench.cli import app as bench

        return typer.main.get_command(bench)
    if name == "doctor":
        from oktopk.doctor.cli import doctor

        return command(doctor)
    from oktopk.report.cli import report, watch

    return command(report if name == "report" else watch)


def command(function: Callable[..., None], *, cls: type[TyperCommand] = TyperCommand, hidden: bool = False) -> Any:
    """Return the command that calls `function` with the options of its signature."""
    single = typer.Typer(rich_markup_mode="rich", add_completion=False)
    single.command(cls=cls, hidden=hidden)(function)
    return typer.main.get_command(single)


class Commands(TyperGroup):
    """The group of all commands, which imports a command when it is looked up."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return the command of that name; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        found = load(cmd_name)
        found.name = cmd_name
        return found


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Sparse allreduce for data-parallel training: train with it, and see what it sends.\n\n"
    "Start here: oktopk train makes speech offline and learns it on two workers, in minutes.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oktopk {oktopk.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Read the options before the command."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    app(args=argv, prog_name="oktopk")
