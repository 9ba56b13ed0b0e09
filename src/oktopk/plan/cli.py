"""`oktopk plan`: whether compression pays for a model on a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from oktopk.cli.errors import exit_on_error
from oktopk.errors import SettingError, one_of, within
from oktopk.plan import show
from oktopk.plan.learning import OPTIMIZERS
from oktopk.plan.methods import Method, methods
from oktopk.plan.profile import Profile, from_numbers
from oktopk.plan.read import Inputs, read_plan
from oktopk.plan.topology import Topology, flat
from oktopk.plan.verdict import judge, rows_of

PLAIN_WIDTH = 150
"""Columns of the output if it is no terminal."""

File = Annotated[Path | None, typer.Argument(help="TOML file with the model, the levels of the network, the price.")]
Model = Annotated[str, typer.Option(help="Model to profile by a few steps here: gpt-tiny, lstman4, or module:factory.")]
Batch = Annotated[int, typer.Option(min=1, help="Examples of each rank, for --model.")]
Numel = Annotated[int, typer.Option(min=0, help="Parameters, in place of --model; with --compute-ms.")]
Compute = Annotated[float, typer.Option("--compute-ms", min=0, help="Milliseconds of forward and backward on a rank.")]
Ranks = Annotated[int, typer.Option(min=0, help="Ranks, each a host of its own.")]
Mbit = Annotated[float, typer.Option(min=0, help="Mbit/s of each host's link. 0: no limit.")]
Delay = Annotated[float, typer.Option("--delay-ms", min=0, help="Milliseconds of a message from host to host.")]
Optimizer = Annotated[str, typer.Option(help="sgd or adam: whose learning factors count.")]
Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")]
Out = Annotated[Path | None, typer.Option(help="Folder for plan.json and the plot.")]


@exit_on_error()
def plan(
    file: File = None,
    model: Model = "",
    batch: Batch = 2,
    numel: Numel = 0,
    compute_ms: Compute = 0.0,
    ranks: Ranks = 0,
    mbit: Mbit = 1000.0,
    delay_ms: Delay = 0.1,
    optimizer: Optimizer = "",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Predict the step of each method on a network, and say whether compression pays.

    oktopk plan --model lstman4 --ranks 4 --mbit 1000

    oktopk plan --numel 124000000 --compute-ms 400 --ranks 16 --mbit 10000 --optimizer adam

    oktopk plan cluster.toml --out plan
    """
    inputs = Inputs() if file is None else read_plan(file)
    topology = flat(ranks, mbit, 1e-3 * delay_ms) if ranks else inputs.topology
    if topology is None:
        raise SettingError("say how many ranks there are: --ranks 4 --mbit 1000, or a file with [[level]]")
    candidates = methods(len(topology.levels), inputs.every)
    profile = _profile(inputs, model, batch, numel, compute_ms, topology, optimizer, candidates)
    rows = rows_of(candidates, profile, topology)
    made = show.to_json(rows, judge(rows, profile, topology), profile, topology, inputs.steps, inputs.money)
    files = [] if out is None else show.write(made, out)
    if as_json:
        print(json.dumps(made, allow_nan=False))
        return
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
    console.print(escape(str(topology)))
    console.print(show.table_of(made, inputs.money.currency if inputs.money else ""))
    console.print(escape(made["verdict"]["sentence"]), style="bold", soft_wrap=True)
    console.print(escape(made["verdict"]["code"]), soft_wrap=True)
    for path in files:
        console.print(f"wrote {escape(str(path))}")


def _profile(
    inputs: Inputs,
    model: str,
    batch: int,
    numel: int,
    compute_ms: float,
    topology: Topology,
    optimizer: str,
    candidates: Sequence[Method],
) -> Profile:
    """Return the profile of a model here, of the flags, or of the file."""
    chosen = one_of("optimizer", optimizer, OPTIMIZERS) if optimizer else "sgd"
    if model and numel:
        raise SettingError("--model is profiled here, and --numel is given by you: name one of them")
    if model:
        from oktopk.plan.measure import measure

        return measure(model, batch, min(topology.size, 2), candidates, chosen)
    if numel:
        within("--compute-ms", compute_ms, 0, open_low=True)
        return from_numbers(numel, 1e-3 * compute_ms, chosen)
    if inputs.profile is None:
        raise SettingError(
            "say what trains: --model module:factory, or --numel and --compute-ms, or a file with [model]"
        )
    return inputs.profile
