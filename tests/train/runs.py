"""Runs of the trainer on real workers: processes of their own that have PyTorch loaded already, and what they left."""

import os
import pickle
import re
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oktopk.telemetry.reader import read_records
from oktopk.train.checkpoint import SHARED, find_last
from oktopk.train.config import make_config
from oktopk.train.dist import STORE, Place
from oktopk.train.rundir import RunDir
from oktopk.train.worker import Job, work
from tests.harness import forking

RUN_S = 200.0
"""Limit of a run of seconds on a busy machine, below that of its test, so that a run that hangs is named."""

TIMES = ("split", "ranks", "seconds", "wait_seconds", "step_seconds", "predicted_seconds", "epoch_seconds", "started")


@dataclass
class Ended:
    """What became of a run: its folder, and by rank what it returned or raised and what it printed."""

    folder: Path
    results: list[Any] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    @property
    def records(self):
        return list(read_records(self.folder / "metrics.jsonl"))

    def of(self, kind, leave_out=()):
        """The records of a kind."""
        chosen = [record for record in self.records if record["kind"] == kind]
        return [{key: value for key, value in record.items() if key not in leave_out} for record in chosen]

    @property
    def steps(self):
        """The records of the steps without times and figures of each rank."""
        return self.of("step", leave_out=TIMES)

    @property
    def epochs(self):
        return self.of("epoch", leave_out=TIMES)

    def events(self, event):
        return [record for record in self.of("event") if record["event"] == event]

    @property
    def shared(self):
        """The last checkpoint: weights, optimizer, progress."""
        return dict(torch.load(last(self.folder) / SHARED, weights_only=True))

    def digests(self, rank):
        """The digests of the weights at each checkpoint, from a worker's log."""
        return re.findall(r"weights ([0-9a-f]{16})$", (self.folder / "logs" / f"rank{rank}.log").read_text(), re.M)


def last(folder):
    """Return the checkpoint to go on from."""
    found = find_last(RunDir(folder))
    assert found is not None
    return found


def train(folder, size=1, *, resume=None, prepare=None, **settings):
    """Run the trainer on `size` workers; `prepare(rank)` runs in each before."""
    before = vars(RunDir.open(folder).load_config()) if resume else {}
    job = Job(make_config({**before, **settings}), folder, is_new=resume is None, resume=resume)
    store = folder.parent / f".store-{time.monotonic_ns()}"
    workers = [(rank, size, store, job, prepare) for rank in range(size)]
    processes = [forking().Process(target=_work, args=worker, daemon=True) for worker in workers]
    deadline = time.monotonic() + RUN_S
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
    printed = [Path(f"{store}-out{rank}").read_text() for rank in range(size)]
    assert not hanging, f"ranks {hanging} did not end in {RUN_S:g} s\n" + "\n".join(printed)
    results = [Path(f"{store}-result{rank}") for rank in range(size)]  # one that was killed has none
    return Ended(folder, [pickle.loads(path.read_bytes()) if path.exists() else None for path in results], printed)


def succeed(folder, size=1, **how):
    """Run the trainer; every worker has to reach the end."""
    ended = train(folder, size, **how)
    for rank, result in enumerate(ended.results):
        assert isinstance(result, dict), f"rank {rank}: {result!r}\n{ended.printed[rank]}"
    return ended


def _work(rank, size, store, job, prepare):
    """Be a worker; what it prints, returns or raises goes into files."""
    out = os.open(f"{store}-out{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ[STORE] = f"{store}-"
    try:
        if prepare is not None:
            prepare(rank)
        result = work(job, Place(launcher="oktopk", rank=rank, size=size, local_rank=rank, local_size=size))
    except Exception as error:
        traceback.print_exc()
        result = error
    sys.stdout.flush()
    sys.stderr.flush()
    Path(f"{store}-result{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)  # at once: taking gloo's threads apart takes seconds
