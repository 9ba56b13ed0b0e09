"""`oktopk plan`: whether compression pays for a model on a network."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
Hosts = Annotated[str, typer.Option(help="Hosts to profile --model on and to measure the links of, by ssh: a,b.")]
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
    hosts: Hosts = "",
    optimizer: Optimizer = "",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Predict the step of each method on a network, and say whether compression pays.

    oktopk plan --model lstman4 --ranks 4 --mbit 1000

    oktopk plan --numel 124000000 --compute-ms 400 --ranks 16 --mbit 10000 --optimizer adam

    oktopk plan cluster.toml --out plan

    oktopk plan --model your.module:factory --hosts a,b

    torchrun --nproc-per-node 2 -m oktopk plan --model gpt-tiny
    """
    inputs = Inputs() if file is None else read_plan(file)
    asked = _Asked(
        inputs, model, batch, numel, 1e-3 * compute_ms,
        flat(ranks, mbit, 1e-3 * delay_ms) if ranks else inputs.topology,
        one_of("optimizer", optimizer, OPTIMIZERS) if optimizer else "sgd",
    )  # fmt: skip
    if hosts:
        asked.check_model()
        words = [
            *(["--json"] if as_json else []),
            *(["--out", str(out)] if out else []),
            *([str(file)] if file else []),
        ]
        same = ["--model", model, "--batch", str(batch), "--optimizer", asked.optimizer, *words]
        from oktopk.plan.job import start_on

        return start_on(hosts.split(","), same)
    facts = _facts(asked)
    if facts is None:  # rank 0 of the job prints
        return None
    profile, topology = facts
    rows = rows_of(asked.candidates, profile, topology)
    made = show.to_json(rows, judge(rows, profile, topology), profile, topology, inputs.steps, inputs.money)
    files = [] if out is None else show.write(made, out)
    if as_json:
        print(json.dumps(made, allow_nan=False))
        return None
    return _print(made, topology, inputs, files)


@dataclass(frozen=True)
class _Asked:
    """The user's wishes; the topology is None where only a job can tell it."""

    inputs: Inputs
    model: str
    batch: int
    numel: int
    compute_s: float
    topology: Topology | None
    optimizer: str

    @property
    def candidates(self) -> list[Method]:
        """The methods to compare."""
        return methods(len(self.topology.levels) if self.topology else 1, self.inputs.every)

    def check_model(self) -> None:
        """Refuse to profile nothing."""
        if not self.model:
            raise SettingError("several ranks profile a model together: name it with --model")


def _facts(asked: _Asked) -> tuple[Profile, Topology] | None:
    """Return the profile and the topology: of the running job, of a profile here, of the flags, or of the file."""
    if asked.model and asked.numel:
        raise SettingError("--model is profiled here, and --numel is given by you: name one of them")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        asked.check_model()
        from oktopk.plan.job import plan_job

        measured = plan_job(asked.model, asked.batch, asked.candidates, asked.optimizer)
        return measured and (measured[0], asked.topology or measured[1])
    if asked.topology is None:
        raise SettingError("say how many ranks there are: --ranks 4 --mbit 1000, or a file with [[level]]")
    return _profile(asked, asked.topology.size), asked.topology


def _profile(asked: _Asked, size: int) -> Profile:
    if asked.model:
        from oktopk.plan.measure import measure

        return measure(asked.model, asked.batch, min(size, 2), asked.candidates, asked.optimizer)
    if asked.numel:
        within("--compute-ms", asked.compute_s, 0, open_low=True)
        return from_numbers(asked.numel, asked.compute_s, asked.optimizer)
    if asked.inputs.profile is None:
        raise SettingError(
            "say what trains: --model module:factory, or --numel and --compute-ms, or a file with [model]"
        )
    return asked.inputs.profile


def _print(made: dict[str, Any], topology: Topology, inputs: Inputs, files: Sequence[Path]) -> None:
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
    console.print(escape(str(topology)))
    console.print(show.table_of(made, inputs.money.currency if inputs.money else ""))
    console.print(escape(made["verdict"]["sentence"]), style="bold", soft_wrap=True)
    console.print(escape(made["verdict"]["code"]), soft_wrap=True)
    for path in files:
        console.print(f"wrote {escape(str(path))}")
