"""The commands as objects of typer. Each is imported when it is called, and no other is."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand


def load(name: str) -> Any:
    """Import the command of that name, and return it."""
    if name == "train":
        from oktopk.train.cli import Train, train

        return command(train, cls=Train)
    if name == "worker":
        from oktopk.train.cli import worker

        return command(worker)
    if name == "data":
        from oktopk.train.data import cli as data

        return command(data.an4, data.check, data.synth_an4, data.text, about=data.ABOUT)
    if name == "bench":
        from oktopk.bench import cli as bench

        return command(bench.exchange, bench.step, bench.local, bench.chaos, bench.probe, about=bench.ABOUT)
    if name == "plan":
        from oktopk.plan.cli import plan

        return command(plan)
    from oktopk.report.cli import report, watch

    return command(report if name == "report" else watch)


def command(*functions: Callable[..., None], about: str = "", cls: type[TyperCommand] = TyperCommand) -> Any:
    """Return the command that calls a function with the options of its signature; several make a group.

    A docstring is the help text, with the lines of its examples as they are.
    """
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(
        rich_markup_mode=None, add_completion=False, no_args_is_help=True, help=about, context_settings=settings
    )
    for function in functions:
        text = re.sub(r"\n\n(?=(sudo )?oktopk |torchrun )", "\n\n\b\n", inspect.cleandoc(function.__doc__ or ""))
        app.command(cls=cls, help=text, context_settings=settings)(function)
    return typer.main.get_command(app)
