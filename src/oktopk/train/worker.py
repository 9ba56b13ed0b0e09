"""The workers of a run: start them on this machine, and be one from its start to its end: join, train, leave."""

import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oktopk.errors import OktopkError, PeerError, SettingError
from oktopk.telemetry.format import count
from oktopk.telemetry.schema import VERSION
from oktopk.train import checkpoint
from oktopk.train.collectives import all_or_none, check_same_data, gather_objects, lost_peers_named
from oktopk.train.config import Config
from oktopk.train.console import Console, end_table
from oktopk.train.dist import HERE, STARTER, STORE, Place
from oktopk.train.local import LocalTrainer
from oktopk.train.loop import Trainer
from oktopk.train.plan import Plan, make_plan
from oktopk.train.rundir import RunDir, RunLogger
from oktopk.train.workload import Workload
from oktopk.train.workloads import workload_of


class StoppedError(OktopkError):
    """A signal, such as that of Ctrl-C, ended the run; the exit status is a shell's: 130 after Ctrl-C."""

    def __init__(self, number: int, advice: str) -> None:
        super().__init__(f"{signal.Signals(number).name} ended the run; {advice}")
        self.exit_status = 128 + number


@dataclass(frozen=True)
class Job:
    """The job of all workers of a run."""

    config: Config
    path: Path  # of the run's folder; a new run that finds it taken gets a number
    is_new: bool = True  # rank 0 has to make the folder
    resume: Path | None = None  # a checkpoint

    def folder(self) -> RunDir:
        """Return the run's folder: a new one, or that of a resumed run, with the settings of now."""
        if self.is_new:
            return RunDir.create(self.path.parent, self.path.name, self.config)
        run = RunDir(self.path)
        run.write_config(self.config)
        return run


def start_workers(command: Sequence[str], nproc: int, folder: Path, max_restarts: int, threads: int) -> None:
    """Run `nproc` workers with torch's elastic launcher until all are done; one that fails ends all, or restarts all.

    They meet through files in `folder` and talk through the loopback: nothing listens to the outside.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = folder / f".meeting-{os.getpid()}"
    meeting.mkdir()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, max_restarts=max_restarts, run_id=folder.name, local_addr=HERE,
        rdzv_backend="c10d", rdzv_endpoint=str(meeting / "rendezvous"), rdzv_configs={"store_type": "file"},
        logs_specs=DefaultLogsSpecs(log_dir=str(meeting)),
    )  # fmt: skip
    before = dict(os.environ)
    os.environ |= {  # the launcher hands its own environment to the workers
        STORE: str(meeting / "store-"),
        STARTER: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or the launcher would listen on all addresses
    }
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # it would comment on a Ctrl-C in three lines
            logging.getLogger(name).setLevel(logging.ERROR)
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        raise PeerError(f"worker {rank} {how}, and all others were ended; its last words are above") from None
    except SignalException as error:
        can_resume = checkpoint.find_last(RunDir(folder)) is not None
        advice = f"oktopk train --resume {folder} goes on" if can_resume else "there is no checkpoint to go on from yet"
        raise StoppedError(error.sigval, advice) from None
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(meeting, ignore_errors=True)


def work(job: Job, place: Place) -> dict[str, Any]:
    """Train as one of the workers; return the summary of the run."""
    config = job.config
    device = pick_device(config, place)
    torch.set_num_threads(config.threads or place.num_cores())
    place.join(config.timeout_s, device)
    try:
        with lost_peers_named():
            kind = workload_of(config)
            all_or_none("preparing the data", lambda: kind.prepare(config) if place.rank == 0 else None)
            data = all_or_none("reading the data", lambda: kind(config))
            check_same_data(data.sizes)
            data.batches(place.size)  # raises on every rank, if there is too little
            plan = make_plan(config, place.size, data.num_train, data.num_val, kind.data_dir_of(config), str(device))
            made = all_or_none("making the run's folder", lambda: job.folder() if place.rank == 0 else None)
            run = gather_objects(made)[0]
            assert run is not None
            return _train(job, place, data, plan, run)
    finally:
        dist.destroy_process_group()


def _train(job: Job, place: Place, data: Workload, plan: Plan, run: RunDir) -> dict[str, Any]:
    unit = "window" if job.config.is_text else "utt"
    run_logger, console = RunLogger(run, place.rank), Console(place.rank, job.config.max_epochs, plan.steps, unit)
    run_logger.log(f"worker {place.rank} of {place.size}, started by {place.launcher}, process {os.getpid()}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from now on Ctrl-C is in the record
    try:
        with lost_peers_named():
            kind = LocalTrainer if job.config.local_steps else Trainer
            trainer = kind(place, data, plan, run_logger, console)
            restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
            folder = checkpoint.find_last(run) if restarted else job.resume
            if folder is None:
                begin(plan, run_logger, console)
            else:
                trainer.resume(folder)
                console.say(f"going on from {folder}, step {trainer.progress.step} of {plan.steps}")
            summary = trainer.run()
    except KeyboardInterrupt:
        run_logger.ended("stopped", "Ctrl-C stopped it")
        raise
    except BaseException as error:
        run_logger.ended("failed", f"ended by {type(error).__name__}: {error}")
        raise
    finally:
        run_logger.close()
    console.out.print(end_table(summary, place.size, is_dense=job.config.is_dense))
    console.say(f"everything is in {run.path}\nnext: oktopk report {run.path}")
    if plan.is_cut_short:
        longer = f"oktopk train --resume {run.path} --max-steps {2 * plan.steps}"
        console.say(f"      {longer}   goes on: {count(plan.steps, 'step')} of {plan.steps_of_epochs:,} are made")
    return summary


def begin(plan: Plan, run_logger: RunLogger, console: Console) -> None:
    """Show the plan, and start the records."""
    console.out.print(plan.table())
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    planned = {name: getattr(plan, name) for name in ("workers", "numel", "sparse_numel", "steps", "dense_bytes")}
    planned["planned_sparse_steps"] = plan.sparse_steps
    run_logger.start(version=VERSION, started=started, config=vars(plan.config), **planned)
    if plan.warning is not None:
        run_logger.event("warning", 0, plan.warning)
        console.warn(plan.warning)


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
