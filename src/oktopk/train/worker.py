"""`work`: one worker from its start to its end: join the others, train, leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oktopk.errors import SettingError
from oktopk.telemetry.schema import VERSION
from oktopk.train import checkpoint, corpus
from oktopk.train.collectives import all_or_none, lost_peers_named, share
from oktopk.train.config import Config
from oktopk.train.console import Console, end_table
from oktopk.train.dist import Place
from oktopk.train.loop import Trainer
from oktopk.train.plan import Plan, make_plan
from oktopk.train.recipes import load_recipe
from oktopk.train.run_logger import RunLogger
from oktopk.train.rundir import RunDir

COMPARABLE = frozenset(
    {
        "compressor", "density", "dense_steps", "ranking", "wire", "sparse_momentum",
        "data_dir", "device", "threads", "timeout_s", "validate_every", "checkpoint_every", "on_nonfinite",
    }
)  # fmt: skip
"""Settings in which a run may differ from its recipe and still be compared with the recipe's dense reference."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of all workers of a run; `run` is None until rank 0 has made the folder."""

    config: Config
    runs: Path
    name: str
    run: RunDir | None = None
    resume: Path | None = None  # a checkpoint

    def folder(self) -> RunDir:
        """Return the run's folder: a new one, or that of a resumed run, with the settings of now."""
        if self.run is None:
            return RunDir.create(self.runs, self.name, self.config)
        self.run.change_config(self.config)
        return self.run


def work(job: Job, place: Place) -> dict[str, Any]:
    """Train as one of the workers; return the summary of the run."""
    config = job.config
    device = pick_device(config, place)
    torch.set_num_threads(config.threads or place.num_cores())
    with _group(place, config.timeout_s, device):
        all_or_none("preparing the data", lambda: corpus.prepare(config) if place.rank == 0 else None)
        data = all_or_none("reading the data", lambda: corpus.load(config))
        corpus.check_enough(config, data, place.size)  # the same on every rank
        folder = corpus.data_dir_of(config)
        plan = make_plan(config, place.size, len(data.train), len(data.val), folder, str(device))
        run = all_or_none("making the run's folder", lambda: job.folder() if place.rank == 0 else None)
        return _train(job, place, data, plan, share(run))


def _train(job: Job, place: Place, data: corpus.Corpus, plan: Plan, run: RunDir) -> dict[str, Any]:
    run_logger, console = RunLogger(run, place.rank), Console(place.rank, job.config.max_epochs)
    run_logger.log(f"worker {place.rank} of {place.size}, started by {place.launcher}, process {os.getpid()}")
    try:
        with lost_peers_named():
            trainer = Trainer(job.config, place, data, plan, run_logger, console)
            _open(job, trainer, run, plan)
            summary = trainer.run()
    except BaseException as error:
        run_logger.failed(f"ended by {type(error).__name__}: {error}")
        raise
    finally:
        run_logger.close()
    console.out.print(end_table(summary, plan, reference_of(job.config)))
    console.say(f"everything is in {run.path}\nnext: {_next_command(job.config, run)}")
    return summary


def _open(job: Job, trainer: Trainer, run: RunDir, plan: Plan) -> None:
    """Go on from a checkpoint if there is one, else show the plan and start the records."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    folder = checkpoint.find_last(run) if restarted else job.resume
    if folder is not None:
        trainer.resume(folder)
        trainer.console.say(f"going on from {folder}, step {trainer.progress.step} of {plan.steps}")
        return
    trainer.console.out.print(plan.table())
    trainer.run_logger.start(
        version=VERSION,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        config=vars(job.config),
        workers=plan.workers,
        numel=plan.numel,
        sparse_numel=plan.sparse_numel,
        steps=plan.steps,
        planned_sparse_steps=plan.sparse_steps,
        dense_bytes=plan.dense_bytes,
    )
    if plan.warning is not None:
        trainer.run_logger.event("warning", 0, plan.warning)
        trainer.console.warn(plan.warning)


def reference_of(config: Config) -> dict[str, float]:
    """Return the dense figures of the recipe; empty if this run learns in another way than its recipe."""
    if not config.recipe:
        return {}
    recipe = load_recipe(config.recipe)
    ours, theirs = vars(config), vars(Config(recipe=config.recipe, **recipe.settings))
    return recipe.reference if all(ours[name] == theirs[name] for name in ours.keys() - COMPARABLE) else {}


def _next_command(config: Config, run: RunDir) -> str:
    if config.is_dense:
        return "oktopk train --compressor oktopk    # the same, with a sparse exchange"
    if config.dataset == "synth-an4":
        return "oktopk data an4 ARCHIVE --out DIR, then oktopk train --data-dir DIR    # real speech"
    return f"oktopk train --resume {run.path} --max-epochs {config.max_epochs + 10}    # go on learning"


@contextmanager
def _group(place: Place, timeout_s: float, device: torch.device) -> Iterator[None]:
    place.join(timeout_s, device)
    try:
        with lost_peers_named():
            yield
    finally:
        dist.destroy_process_group()


def pick_device(config: Config, place: Place) -> torch.device:
    """Return the device of a worker; GPUs are assigned by local rank."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise SettingError("--set device=cuda: PyTorch sees no GPU here; use device=auto or cpu")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def threads_of(config: Config, local_size: int) -> int:
    """Return the threads of a worker to start on this machine: the setting, or its share of the cores."""
    return config.threads or Place(launcher="oktopk", local_size=local_size).num_cores()
