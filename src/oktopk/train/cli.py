"""`oktopk`: the command line."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.markup import escape
from rich.table import Table

import oktopk
from oktopk.bench.cli import app as bench_app
from oktopk.cli.errors import exit_on_error
from oktopk.doctor.cli import doctor
from oktopk.errors import OktopkError, PeerError, SettingError
from oktopk.report.cli import report, watch
from oktopk.train import checkpoint, corpus
from oktopk.train.config import Config, describe_settings, make_config, parse_pairs
from oktopk.train.data.cli import app as data_app
from oktopk.train.data.folder import TRAIN_MANIFEST
from oktopk.train.dist import Place
from oktopk.train.dist_env import find_place
from oktopk.train.divergence import DivergedError
from oktopk.train.legacy_flags import modern
from oktopk.train.plan import make_plan
from oktopk.train.recipes import DEFAULT, OF_NET, load_recipe, recipe_names
from oktopk.train.rundir import RunDir
from oktopk.train.spawn import start_workers
from oktopk.train.worker import Job, pick_device, threads_of, work

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Sparse allreduce for data-parallel training: train with it, and see what it sends.\n\n"
    "Start here: oktopk train makes speech offline and learns it on two workers, in minutes.",
)
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.command()(report)
app.command()(watch)
app.command()(doctor)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    arguments, notes = modern(sys.argv[1:] if argv is None else argv)
    for note in notes:
        rich.console.Console(stderr=True, soft_wrap=True).print(f"note: {escape(note)}")
    app(args=arguments, prog_name="oktopk")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oktopk {oktopk.__version__}")
        raise typer.Exit


def _show_recipes(wanted: bool) -> None:
    if wanted:
        table = Table("recipe", "what for")
        for name in recipe_names():
            table.add_row(name, load_recipe(name).about)
        rich.console.Console().print(table)
        raise typer.Exit


def _show_settings(wanted: bool) -> None:
    if wanted:
        table = Table("setting", "default", "what it means", title="for --set; recipes have values of their own")
        for row in describe_settings():
            table.add_row(*map(escape, row))
        rich.console.Console().print(table)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take what comes before the command."""


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Option(help=f"Settings known to work; --recipes lists them. Without it: {DEFAULT}.")
    ] = None,
    dnn: Annotated[str | None, typer.Option(help="The net: lstman4 (27.6 M parameters) or lstman4-small.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="an4: the manifests in --data-dir. synth-an4: speech made offline.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="What oktopk data made; without it speech is made.")] = None,
    max_epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Utterances of each worker.")] = None,
    nsteps_update: Annotated[int | None, typer.Option(help="Forward passes a step, averaged.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    compressor: Annotated[
        str | None, typer.Option(help="oktopk, topka, topkdsa, gtopk, gaussiank, or dense to compare.")
    ] = None,
    density: Annotated[float | None, typer.Option(help="The part of the gradient that is sent: 0.02 is 2 %.")] = None,
    dense_steps: Annotated[int | None, typer.Option(help="Steps before the first sparse one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and order.")] = None,
    on_nonfinite: Annotated[str | None, typer.Option(help="A NaN or Inf: stop the run, or skip the step.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; --settings has them.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Workers to start here. Under torchrun, mpirun or srun: leave it out.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all workers start again from the last checkpoint if one dies.")
    ] = 0,
    runs: Annotated[Path, typer.Option(help="Where the folders of the runs are.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="The run's name: its folder is RUNS/NAME.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with a run: its folder, or one of its checkpoints.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and do nothing.")] = False,
    recipes: Annotated[  # noqa: ARG001 - acts while it is read
        bool, typer.Option("--recipes", callback=_show_recipes, is_eager=True, help="List the recipes.")
    ] = False,
    settings: Annotated[  # noqa: ARG001 - acts while it is read
        bool, typer.Option("--settings", callback=_show_settings, is_eager=True, help="List all settings.")
    ] = False,
) -> None:
    """Train the speech recogniser with a sparse exchange, on this machine or a cluster.

    oktopk train                              a small net on synthetic speech, two workers, minutes
    oktopk train --data-dir DIR --nproc 2     the same on your data, which oktopk data imports
    oktopk train --dnn lstman4 --dataset an4 --data-dir DIR --lr 0.001 --compressor oktopk --density 0.02
    torchrun, mpirun or srun oktopk train     workers started by others, on any number of machines
    oktopk train --resume runs/NAME           go on where a run stopped

    A run first prints its plan, dense and sparse steps and their bytes; it leaves everything in RUNS/NAME.
    """
    asked = {
        "dnn": dnn, "dataset": dataset, "data_dir": None if data_dir is None else str(data_dir),
        "max_epochs": max_epochs, "batch_size": batch_size, "nsteps_update": nsteps_update, "lr": lr,
        "compressor": compressor, "density": density, "dense_steps": dense_steps, "seed": seed,
        "on_nonfinite": on_nonfinite,
    }  # fmt: skip
    given: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    with exit_on_error(_rank(), failed=(DivergedError, PeerError)):
        given |= parse_pairs(set_ or [])
        place = find_place(os.environ)
        job, workers = _resumed(resume, given) if resume else _fresh(recipe, given, runs, name)
        workers = nproc or workers
        if place is not None and place.size == 1 and workers > 1 and nproc:
            place = None  # the only task of a job, an interactive shell of srun's say, starts workers as anyone else
        if place is not None and nproc not in (None, place.size):
            raise SettingError(f"{place.launcher} started {place.size} workers: leave --nproc {nproc} out")
        if dry_run:
            _dry_run(job, place.size if place else workers)
        elif place is not None:
            work(job, place)
        else:
            _start(job, workers, max_restarts)


@app.command(hidden=True)
def worker(run: Path, resume: Annotated[Path | None, typer.Option()] = None) -> None:
    """Be one of the workers that `train` started."""
    with exit_on_error(_rank(), failed=(DivergedError, PeerError)):
        place = find_place(os.environ)
        assert place is not None
        folder = RunDir.open(run)
        work(Job(config=folder.load_config(), runs=run.parent, name=run.name, run=folder, resume=resume), place)


def _fresh(recipe: str | None, given: dict[str, Any], runs: Path, name: str | None) -> tuple[Job, int]:
    """Return a new job, and how many workers its recipe wants."""
    chosen = load_recipe(recipe or OF_NET.get(str(given.get("dnn")), DEFAULT))
    if "data_dir" in given and "dataset" not in given:
        given = {**given, "dataset": "an4"}  # whoever names a folder has data in it
    config = make_config({"recipe": chosen.name, **chosen.settings, **given})
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Job(config=config, runs=runs, name=name or f"{chosen.name}-{config.compressor}-{stamp}"), chosen.nproc


def _resumed(path: Path, given: dict[str, Any]) -> tuple[Job, int]:
    """Return the job of a run that goes on, with what is to be different, and how many workers it had."""
    is_checkpoint = (path / checkpoint.SHARED).is_file()
    run = RunDir.open(path.parent.parent if is_checkpoint else path)
    folder = path if is_checkpoint else checkpoint.find_last(run)
    if folder is None:
        raise SettingError(f"{path} has no checkpoint to go on from: start the run again")
    config = make_config({**vars(run.load_config()), **given})
    job = Job(config=config, runs=run.path.parent, name=run.path.name, run=run, resume=folder)
    return job, checkpoint.num_workers(folder)


def _start(job: Job, workers: int, max_restarts: int) -> None:
    """Run the job here: in this process if it is one worker, else in workers of their own."""
    if workers == 1 and not max_restarts:
        work(job, Place(launcher="oktopk train"))
        return
    _check_before(job.config, workers)
    run = job.folder()
    command = ["-m", "oktopk", "worker", str(run.path)]
    if job.resume is not None:
        command += ["--resume", str(job.resume)]
    start_workers(command, workers, run.path, max_restarts, threads_of(job.config, workers))


def _check_before(config: Config, workers: int) -> None:
    """Find what would stop every worker, once, before any is started."""
    corpus.prepare(config)
    corpus.check_enough(config, corpus.load(config), workers)


def _dry_run(job: Job, workers: int) -> None:
    config, folder = job.config, corpus.data_dir_of(job.config)
    counts = (config.utterances, config.val_utterances)
    if config.dataset == "an4" or (folder / TRAIN_MANIFEST).exists():
        data = corpus.load(config)
        counts = (len(data.train), len(data.val))
    device = pick_device(config, Place(launcher="dry run"))
    plan = make_plan(config, workers, *counts, data_dir=folder, device=str(device))
    out = rich.console.Console(soft_wrap=True)
    out.print(plan.table())
    out.print(f"would write {job.runs / job.name}; {threads_of(config, workers)} threads a worker")
    if plan.warning:
        out.print(f"[bold yellow]WARNING[/] {escape(plan.warning)}")


def _rank() -> int | None:
    try:
        place = find_place(os.environ)
    except OktopkError:
        return None
    return None if place is None else place.rank
