"""`oktopk train`: the command."""

import os
import signal
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from oktopk.cli.errors import exit_on_error
from oktopk.errors import OktopkError, PeerError, SettingError
from oktopk.telemetry.format import count
from oktopk.train import checkpoint, supervisor
from oktopk.train.config import BOOLEANS, Config, make_config, parse_pairs
from oktopk.train.console import Console, end_table
from oktopk.train.data import loader, synth
from oktopk.train.dist import Place, end_with_starter, find_place
from oktopk.train.divergence import DivergedError
from oktopk.train.elastic import Bounds, be_member, elastic_part
from oktopk.train.models.gpt import SIZES
from oktopk.train.plan import make_plan
from oktopk.train.recipes import DEFAULT, OF_NET, load_recipe, recipe_names
from oktopk.train.rundir import RunDir, RunLogger, check_creatable
from oktopk.train.supervisor import bounds_of
from oktopk.train.worker import Job, StoppedError, begin, pick_device, start_workers, threads_of, work
from oktopk.train.workloads import workload_of

RENAMED = {"--nworkers": "--nproc", "--lstm-lr": "--lr"}
COMPRESSORS = {"none": "dense", "topkA": "topka", "topkDSA": "topkdsa", "gTopk": "gtopk", "oktopkA": "oktopk"}
"""Spellings of the research code, and ours."""


def modern(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments as we spell them, and a note for each that was changed.

    >>> modern(["train", "--data_dir", "d", "--compression", "False"])[0]
    ['train', '--data-dir', 'd', '--compressor', 'dense']
    """
    made, notes, coming = list[str](), list[str](), list(arguments)
    while coming:
        word = coming.pop(0)
        flag, equals, value = word.partition("=")
        if not flag.startswith("--"):
            made.append(word)
            continue
        spelled = flag.replace("_", "-")
        spelled = RENAMED.get(spelled, spelled)
        given = value if equals else "".join(coming[:1])
        if spelled == "--compression":
            said = BOOLEANS.get(given.lower())
            if not equals and said is not None:  # it stood alone as well
                coming.pop(0)
            made += ["--compressor", "dense"] if said is False else []
            notes.append(f"{flag}: compression is on unless --compressor is dense")
            continue
        if spelled != flag:
            notes.append(f"{flag} is now {spelled}")
        if spelled == "--compressor" and given in COMPRESSORS:
            notes.append(f"{spelled} {given} is now {COMPRESSORS[given]}")
            made += [spelled, COMPRESSORS[given]]
            coming = coming if equals else coming[1:]
        else:
            made.append(spelled + equals + value)
    return made, notes


class Train(TyperCommand):
    """`oktopk train`, which also takes the spellings of the research code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments in today's spelling, with a note about each other one."""
        arguments, notes = modern(args)
        for note in notes:
            rich.console.Console(stderr=True, soft_wrap=True).print(f"note: {escape(note)}")
        return super().parse_args(ctx, arguments)


def _show_settings(wanted: bool) -> None:
    if wanted:
        settings, recipes = Table("setting", "default", "meaning"), Table("recipe", "purpose")
        for each in fields(Config):
            settings.add_row(each.name, str(each.default).lower(), escape(each.metadata["help"]))
        for name in recipe_names():
            recipes.add_row(name, load_recipe(name).about)
        rich.console.Console().print(settings, "A recipe may give another default:", recipes)
        raise typer.Exit


def _flag(name: str) -> Any:
    """Return the option of a setting, with the setting's help text."""
    return typer.Option(help=Config.__dataclass_fields__[name].metadata["help"])


def train(
    recipe: Annotated[str | None, typer.Option(help=f"Tuned settings: {', '.join(recipe_names())}.")] = None,
    dnn: Annotated[str | None, _flag("dnn")] = None,
    dataset: Annotated[str | None, _flag("dataset")] = None,
    data_dir: Annotated[str | None, _flag("data_dir")] = None,
    max_epochs: Annotated[int | None, _flag("max_epochs")] = None,
    max_steps: Annotated[int | None, _flag("max_steps")] = None,
    batch_size: Annotated[int | None, _flag("batch_size")] = None,
    nsteps_update: Annotated[int | None, _flag("nsteps_update")] = None,
    lr: Annotated[float | None, _flag("lr")] = None,
    compressor: Annotated[str | None, _flag("compressor")] = None,
    density: Annotated[float | None, _flag("density")] = None,
    local_steps: Annotated[int | None, _flag("local_steps")] = None,
    dense_steps: Annotated[int | None, _flag("dense_steps")] = None,
    seed: Annotated[int | None, _flag("seed")] = None,
    on_nonfinite: Annotated[str | None, _flag("on_nonfinite")] = None,
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any setting of --settings.")] = [],  # noqa: B006
    nproc: Annotated[int | None, typer.Option(min=1, help="Workers to start here; not under another launcher.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of all workers after one has died.")] = 0,
    elastic: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Members may come and go within these numbers (torchft).")
    ] = None,
    lighthouse: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where members meet: join it, or start it on this host.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Name of the run: its folder is RUNS/NAME.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with, or of a checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and do nothing.")] = False,
    settings: Annotated[
        bool, typer.Option("--settings", callback=_show_settings, is_eager=True, help="List all settings and recipes.")
    ] = False,
) -> None:
    """Train a speech recogniser or a GPT with a sparse exchange, on this machine or a cluster.

    oktopk train                            a small net on synthetic speech, 2 workers
    oktopk train --recipe gpt-tiny          a small GPT on the sources of Python
    oktopk train --local-steps 30           the same, with an exchange after each 30 steps
    oktopk train --data-dir DIR --nproc 2   the same on your data (see oktopk data)
    oktopk train --recipe lstman4 --data-dir DIR --density 0.02 --nproc 4
    torchrun ... -m oktopk train            workers of a launcher, also mpirun or srun
    oktopk train --resume runs/NAME         go on where a run stopped

    A run first prints its plan: dense and sparse steps, and their bytes. It leaves everything in RUNS/NAME.
    """
    given = {key: value for key, value in locals().items() if key in Config.__dataclass_fields__ and value is not None}
    with exit_on_error(_rank(), failed=(DivergedError, PeerError)):
        given |= parse_pairs(set_)
        job, workers = _resumed(resume, given) if resume else _fresh(given, runs, name)
        if lighthouse is not None and elastic is None:
            raise SettingError("--lighthouse is where the members of an elastic run meet: give --elastic MIN:MAX, too")
        place = _place(nproc) if elastic is None else None
        if elastic is not None:
            _start_elastic(job, bounds_of(elastic), lighthouse, nproc or workers, max_restarts, dry_run)
        elif dry_run:
            _dry_run(job, place.size if place else nproc or workers)
        elif place is not None:
            work(job, place)
        else:
            _start(job, nproc or workers, max_restarts)


def _place(nproc: int | None) -> Place | None:
    """Return the place that a launcher gave this process; None if this process is to start the workers."""
    place = find_place(os.environ)
    if place is not None and place.size == 1 and (nproc or 1) > 1:
        return None  # the only task of a job, such as a shell of srun, starts workers as any shell does
    if place is not None and nproc not in (None, place.size):
        raise SettingError(f"{place.launcher} started {place.size} workers: leave --nproc {nproc} out")
    return place


def worker(
    run: Path,
    resume: Annotated[Path | None, typer.Option()] = None,
    elastic: Annotated[str | None, typer.Option()] = None,
    lighthouse: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Run one of the workers that `train` started."""
    with exit_on_error(_rank(), failed=(DivergedError, PeerError)):
        if elastic is not None and lighthouse is not None:
            end_with_starter()
            be_member(RunDir.open(run), lighthouse, bounds_of(elastic))
            return
        place = find_place(os.environ)
        assert place is not None
        work(Job(RunDir.open(run).load_config(), run, is_new=False, resume=resume), place)


def _fresh(given: dict[str, Any], runs: Path, name: str | None) -> tuple[Job, int]:
    """Return a new job, and the number of workers of its recipe."""
    chosen = load_recipe(given.get("recipe") or OF_NET.get(str(given.get("dnn")), DEFAULT))
    named = "text" if given.get("dnn", chosen.settings["dnn"]) in SIZES else "an4"
    dataset = {"dataset": named} if "data_dir" in given else {}  # a folder that is named has data in it
    # A worker that trains alone has no dense steps, and those of the recipe are for an exchange in each step.
    dense_steps = {"dense_steps": 0} if str(given.get("local_steps", 0)) != "0" else {}
    config = make_config({**chosen.settings, **dataset, **dense_steps, **given, "recipe": chosen.name})
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Job(config, runs / (name or f"{chosen.name}-{config.compressor}-{stamp}")), chosen.nproc


def _resumed(path: Path, given: dict[str, Any]) -> tuple[Job, int]:
    """Return the job of a run that goes on with the settings `given`, and the number of workers it had."""
    if "recipe" in given:
        raise SettingError("--resume goes on with the settings of its run: leave --recipe out")
    is_checkpoint = (path / checkpoint.SHARED).is_file()
    run = RunDir.open(path.parent.parent if is_checkpoint else path)
    folder = path if is_checkpoint else checkpoint.find_last(run)
    if folder is None:
        raise SettingError(f"{path} has no checkpoint to go on from: start the run again")
    before = run.load_config()
    config = make_config({**vars(before), **given})
    if config.optimizer != before.optimizer:
        raise SettingError(
            f"the checkpoint has the state of {before.optimizer}: leave optimizer={config.optimizer} out"
        )
    if bool(config.local_steps) != bool(before.local_steps):
        how = "local steps" if before.local_steps else "an exchange in every step"
        raise SettingError(f"the checkpoint is of a run with {how}: leave local_steps={config.local_steps} out")
    return Job(config, run.path, is_new=False, resume=folder), checkpoint.num_workers(folder)


def _start(job: Job, workers: int, max_restarts: int) -> None:
    """Run the job on this machine: in this process if it is one worker, else in processes of their own."""
    if workers == 1 and not max_restarts:
        work(job, Place(launcher="oktopk train"))
        return
    workload = workload_of(job.config)
    workload.prepare(job.config)  # an error of the data is told once, before any worker starts
    workload(job.config).batches(workers)
    run = job.folder()
    command = ["-m", "oktopk", "worker", str(run.path), *(["--resume", str(job.resume)] if job.resume else [])]
    start_workers(command, workers, run.path, max_restarts, threads_of(job.config, workers))


def _start_elastic(
    job: Job, bounds: Bounds, lighthouse: str | None, workers: int, max_restarts: int, dry_run: bool
) -> None:
    """Run members of an elastic run on this machine."""
    supervisor.check_possible(job.config, bounds, workers, lighthouse)
    if dry_run:
        return _dry_run(job, workers)
    workload = workload_of(job.config)
    workload.prepare(job.config)
    data = workload(job.config)
    data.batches(1)
    run, threads = job.folder(), threads_of(job.config, workers)
    size = max(workers, bounds.least)  # at least, with those of other machines
    plan = make_plan(job.config, size, data.num_train, data.num_val, workload.data_dir_of(job.config), "cpu")
    run_logger, console = RunLogger(run, 0), Console(0, job.config.max_epochs)
    if job.resume is None:
        begin(plan, run_logger, console)
    else:
        saved = checkpoint.load_shared(job.resume)
        step = elastic_part(saved, job.resume)["manager"]["step"]
        run_logger.go_on_from(step, saved["trainer"]["progress"]["epoch"])
    run_logger.close()
    try:
        supervisor.run_members(run.path, bounds, lighthouse, workers, max_restarts, threads, console.say)
    except KeyboardInterrupt:
        goes_on = f"oktopk train --resume {run.path} --elastic {bounds.least}:{bounds.most} goes on"
        can_resume = checkpoint.find_last(run) is not None
        raise StoppedError(signal.SIGINT, goes_on if can_resume else "there is no checkpoint yet") from None
    summary = run_logger.finish()
    console.out.print(end_table(summary, workers, is_dense=job.config.is_dense))
    console.say(f"everything is in {run.path}\nnext: oktopk report {run.path}")
    return None


def _dry_run(job: Job, workers: int) -> None:
    """Show the plan; refuse what the run would refuse."""
    config, workload = job.config, workload_of(job.config)
    folder = workload.data_dir_of(config)
    if job.is_new:
        check_creatable(job.path)
    counts = (config.utterances, config.val_utterances)
    if workload.is_there(config):
        data = workload(config)
        data.batches(workers)
        counts = (data.num_train, data.num_val)
    elif not config.is_text:  # the speech that the run would make
        synth.check_possible()
        loader.check_enough(config.utterances, config.batch_size * config.nsteps_update, workers, "step")
        loader.check_enough(config.val_utterances, 1, workers, "validation")
    device = pick_device(config, Place(launcher="dry run"))
    plan = make_plan(config, workers, *counts, data_dir=folder, device=str(device))
    console = Console(0, config.max_epochs)
    console.out.print(plan.table())
    console.say(f"would write {job.path}; {count(threads_of(config, workers), 'thread')} a worker")
    if plan.warning:
        console.warn(plan.warning)


def _rank() -> int | None:
    with suppress(OktopkError):
        place = find_place(os.environ)
        return place.rank if place else None
    return None
