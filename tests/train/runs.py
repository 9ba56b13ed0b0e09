"""Runs of the trainer on real workers: processes of their own that have PyTorch loaded already, and what they left."""

from __future__ import annotations

import math
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from oktopk.errors import OktopkError
from oktopk.telemetry.reader import read_records
from oktopk.train.checkpoint import SHARED, find_last
from oktopk.train.config import make_config
from oktopk.train.dist import STORE, Place
from oktopk.train.rundir import RunDir
from oktopk.train.worker import Job, work
from tests.harness import forking

MARGIN_S = 15.0
"""Between the deadline of a run and the end of its test, so that a run that hangs is named with what it printed."""

_deadline = math.inf


def set_deadline(seconds: float) -> None:
    """Let every run from now on end in `seconds`; `conftest.py` calls this with what each test has."""
    global _deadline
    _deadline = time.monotonic() + seconds


def seconds_left() -> float:
    """Return how long a run may still take."""
    return max(0.0, _deadline - time.monotonic())


Settings = dict[str, Any]
TIMES = ("split", "ranks", "seconds", "wait_seconds", "epoch_seconds", "started")


@dataclass
class Ended:
    """What became of a run: its folder, and by rank what it returned or raised and what it printed."""

    folder: Path
    results: list[Any] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records, the times aside."""
        made = read_records(self.folder / "metrics.jsonl")
        return [{key: value for key, value in record.items() if key not in TIMES} for record in made]

    @property
    def raw_steps(self) -> list[dict[str, Any]]:
        """The records of the steps, times included."""
        return [record for record in read_records(self.folder / "metrics.jsonl") if record["kind"] == "step"]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "step"]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "epoch"]

    def events(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "event" and record["event"] == event]

    @property
    def shared(self) -> dict[str, Any]:
        """The last checkpoint: weights, optimizer, progress."""
        folder = find_last(RunDir(self.folder))
        assert folder is not None
        return dict(torch.load(folder / SHARED, weights_only=True))

    def digests(self, rank: int) -> list[str]:
        """The digests of the weights at each checkpoint, from a worker's log."""
        return re.findall(r"weights ([0-9a-f]{16})$", (self.folder / "logs" / f"rank{rank}.log").read_text(), re.M)


def train(
    folder: Path,
    size: int = 1,
    *,
    resume: Path | None = None,
    prepare: Callable[[int], None] | None = None,
    watch: Callable[[list[Any]], None] | None = None,
    **settings: Any,
) -> Ended:
    """Run the trainer on `size` workers; `prepare(rank)` runs in each before, `watch(processes)` here, meanwhile."""
    run = RunDir.open(folder) if resume else None
    given = {**(vars(run.load_config()) if run else {}), **settings}
    job = Job(config=make_config(given), runs=folder.parent, name=folder.name, run=run, resume=resume)
    store = folder.parent / f".store-{time.monotonic_ns()}"
    context, pipes, processes = forking(), [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(rank, size, str(store), job, prepare, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    if watch is not None:
        watch(processes)
    return _ended(folder, store, pipes, processes)


def last(folder: Path) -> Path:
    """Return the checkpoint to go on from."""
    found = find_last(RunDir(folder))
    assert found is not None
    return found


def succeed(folder: Path, size: int = 1, **how: Any) -> Ended:
    """Run the trainer; every worker has to reach the end."""
    ended = train(folder, size, **how)
    for rank, result in enumerate(ended.results):
        assert isinstance(result, dict), f"rank {rank}: {result!r}\n{ended.printed[rank]}"
    return ended


def _work(rank: int, size: int, store: str, job: Job, prepare: Callable[[int], None] | None, pipe: Connection) -> None:
    """Be a worker; what it prints goes into a file."""
    out = os.open(f"{store}-out{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ[STORE] = store + "-"
    try:
        if prepare is not None:
            prepare(rank)
        result: Any = work(job, Place(launcher="oktopk", rank=rank, size=size, local_rank=rank, local_size=size))
    except Exception as error:
        traceback.print_exc()
        result = _portable(error)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(pickle.dumps(result))
    os._exit(0)  # at once: taking gloo's threads apart takes seconds


def _portable(error: Exception) -> Exception:
    """Return the error as it can travel: with its words, if not with its type."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]
    except Exception:
        return OktopkError(f"{type(error).__name__}: {error}")


def _ended(folder: Path, store: Path, pipes: list[Connection], processes: list[Any]) -> Ended:
    ended, start = Ended(folder), time.monotonic()
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(seconds_left()):
                printed = "\n".join(path.read_text() for path in sorted(store.parent.glob(f"{store.name}-out*")))
                raise AssertionError(f"rank {rank} did not end in {time.monotonic() - start:.0f} s\n{printed}")
            try:
                ended.results.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:  # it was killed
                ended.results.append(None)
            ended.printed.append(Path(f"{store}-out{rank}").read_text())
    return ended


def same_weights(one: Ended, other: Ended) -> bool:
    """Return whether the last checkpoints agree in every bit of weights, running statistics and optimizer state."""
    mine, theirs = one.shared, other.shared
    return all(torch.equal(mine["net"][name], theirs["net"][name]) for name in mine["net"]) and _same(
        mine["optimizer"], theirs["optimizer"]
    )


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    return bool(mine == theirs)
