"""One training, and many of them beside each other.

All settings of a seed share their dense steps: these are made once, the trunk, and every setting branches off there.
Ranks are threads of `run_local`: each computes its gradient and exchanges it, and rank 0 makes the update.
"""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oktopk import Comm, run_local
from research.learning.emulated import Emulated
from research.learning.learner import Learner, Optimizer, Rates
from research.learning.mechanisms import Exchange
from research.learning.settings import Setting
from research.learning.workload import METRICS, Recipe, Workload

TIMEOUT_S = 600.0
OUT_OF_TIME = "out of time"
CURVES = ("loss", "sent_bytes", "selected_over_k", "residual_norm", "grad_norm", "seconds")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training: `setting` from step `dense_steps` on, to `steps` in all.

    recipe          net, data, optimizer, seed
    evaluate_every  of the workload's windows
    corpus          a packed file; None: what the recipe says
    scratch         where trunks are
    until           a time (`time.time`) at which the training ends wherever it is; 0: none
    threads         of torch, in each process
    """

    recipe: Recipe
    setting: Setting
    steps: int
    workers: int
    device: str
    evaluate_every: int
    corpus: Path | None
    scratch: Path
    until: float = 0.0
    threads: int = 1

    @property
    def trunk(self) -> Path:
        """The file of the dense steps that this training begins with."""
        steps = min(self.setting.dense_steps, self.steps)
        return self.scratch / f"trunk-{self.recipe.data}-{self.recipe.seed}-{steps}.pt"

    @property
    def is_over(self) -> bool:
        """Whether time is up."""
        return 0 < self.until < time.time()

    @property
    def dense_part(self) -> Task:
        """The training that makes the trunk."""
        dense = replace(self.setting, algorithm="dense", name="trunk")
        return replace(self, setting=dense, steps=min(self.setting.dense_steps, self.steps))


@dataclass
class Record:
    """What a training leaves: a value a step for each curve, and the evaluations."""

    loss: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    selected_over_k: list[float] = field(default_factory=list)
    residual_norm: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    ended: str = ""


def run_all(tasks: Sequence[Task], jobs: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield the results of the tasks as they end, `jobs` at a time, after the trunks that they share."""
    trunks = {task.trunk: task.dense_part for task in tasks if not task.trunk.exists()}
    with _Pool(jobs) as pool:
        for result in pool.run(_make_trunk, list(trunks.values())):
            say(_line(result))
        for result in pool.run(run, tasks):
            say(_line(result))
            yield result


def run(task: Task) -> dict[str, Any] | None:
    """Return the figures of one training, unless time is up; one that fails says why instead of ending the others."""
    if task.is_over:
        return None
    start, training = time.perf_counter(), Training(task)
    training.go_on_from(task.trunk)
    try:
        training.train()
    except Exception:
        training.record.ended = traceback.format_exc(limit=-3)
    return _result(training, time.perf_counter() - start)


def _make_trunk(task: Task) -> dict[str, Any]:
    start, training = time.perf_counter(), Training(task)
    training.train()
    training.save(task.trunk)
    return _result(training, time.perf_counter() - start)


class Training:
    """A learner, its data and its record, driven by P threads."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self.task, self.device = task, torch.device(task.device)
        self.workload = _workload(task.recipe, task.corpus, task.workers, self.device)
        self.learner = Learner(self.workload, task.workers, self.device)
        self.record, self.first = Record(), 0
        # What the first pass makes and keeps for all, cuDNN's own among it, is made on one worker's stream; the others
        # would not wait for it: gradients of 1e8 in the first step of every training on a GPU, and NaN.
        self._one_by_one = threading.Lock()
        self._losses, self._sent = [0.0] * task.workers, [0] * task.workers
        self._emulated = (
            Emulated(task.setting, self.learner.layout, task.workers, self.device) if task.setting.emulated else None
        )

    def save(self, path: Path) -> None:
        """Write where this training is."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        torch.save({"learner": self.learner.state_dict(), "record": asdict(self.record)}, unfinished)
        unfinished.replace(path)

    def go_on_from(self, path: Path) -> None:
        """Begin where another ended."""
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.learner.load_state_dict(saved["learner"])
        self.record = Record(**saved["record"])
        self.first = len(self.record.loss)

    def train(self) -> None:
        """Make all steps."""
        run_local(self.task.workers, self._rank, timeout=TIMEOUT_S)

    def _rank(self, comm: Comm) -> None:
        """Be one rank: compute a gradient and exchange it. Rank 0 also makes the update."""
        usual, learner, rank = self.workload.optimizer, self.learner, comm.rank
        exchange = Exchange(
            self.task.setting, comm, learner.layout, device=self.device, clip=usual.clip, momentum=usual.momentum
        )
        for step in range(self.first, self.task.steps):
            start = time.perf_counter()
            with self._one_by_one if step == self.first else nullcontext():
                self._losses[rank] = learner.fill_gradient(rank, step)
            computed = time.perf_counter()
            _meet(comm)
            if not all(map(math.isfinite, self._losses)):
                self.record.ended = f"diverged at step {step}"
                return
            if self._emulated is None or step < self.task.setting.dense_steps:
                mean = _exchanged(exchange, learner.grads[rank], step, learner.optimizer)
            elif rank == 0:
                mean = self._emulated.sparse(learner.grads)
            self._sent[rank] = exchange.take_sent_bytes()
            _meet(comm)
            if rank == 0:
                self._end(step, mean, exchange)
                self.record.compute_s.append(computed - start)
                self.record.seconds.append(time.perf_counter() - start)
            _meet(comm)  # nobody computes with weights that are being changed
            if self.record.ended:
                return

    def _end(self, step: int, mean: Tensor, exchange: Exchange) -> None:
        """Make the update, and note what the step was."""
        if step == self.task.setting.dense_steps:
            self.learner.optimizer.buffer *= self.task.setting.buffer
        workload = self.workload
        norm = self.learner.update(mean, Rates.at(workload.lr_at(step), workload.optimizer, self.task.setting, step))
        held = exchange.residual.held if self._emulated is None else self._emulated.held[0]
        norms = torch.stack([norm, held.norm()]).tolist()
        record = self.record
        record.loss.append(sum(self._losses) / len(self._losses))
        record.sent_bytes.append(max(self._sent))
        record.selected_over_k.append(exchange.selected_over_k)
        record.grad_norm.append(norms[0])
        record.residual_norm.append(norms[1])
        last = step + 1 == self.task.steps
        if last or (step + 1) % (workload.window * self.task.evaluate_every) == 0:
            record.evaluations.append({"step": step + 1, **self.learner.evaluate()})
        if self.task.is_over and not last:
            record.ended = f"{OUT_OF_TIME} after step {step}"


def _exchanged(exchange: Exchange, grad: Tensor, step: int, optimizer: Optimizer) -> Tensor:
    setting = exchange.setting
    if setting.is_dense or step < setting.dense_steps:
        return exchange.dense(grad)
    if exchange.sparse_step == 0:
        exchange.begin(optimizer.velocity)
    return exchange.sparse(grad)


def _meet(comm: Comm) -> None:
    """Wait for all ranks."""
    comm.all_gather(torch.zeros(1))


@lru_cache(maxsize=4)
def _workload(recipe: Recipe, corpus: Path | None, workers: int, device: torch.device) -> Workload:
    """Return what is trained; the next trainings in this process have the same, or that of another seed."""
    return recipe.open(corpus, workers, device)


def _result(training: Training, seconds: float) -> dict[str, Any]:
    task, record = training.task, training.record
    computing = sorted(record.compute_s)
    return {
        "setting": asdict(task.setting),
        "seed": task.recipe.seed,
        "workers": task.workers,
        "steps": len(record.loss),
        "metric": training.workload.metric,
        "window": training.workload.window,
        "ended": record.ended,
        "seconds": round(seconds, 3),
        "compute_s": _short(computing[len(computing) // 2]) if computing else None,
        "evaluations": [{name: _short(value) for name, value in each.items()} for each in record.evaluations],
        "curves": {name: [_short(value) for value in getattr(record, name)] for name in CURVES},
    }


def _short(value: float) -> float | None:
    """Return the number with six digits: curves are long; None where it is not finite, for which JSON has no word."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _line(result: dict[str, Any]) -> str:
    losses, evaluations = result["curves"]["loss"][-result["window"] :], result["evaluations"]
    loss = f"loss {sum(losses) / len(losses):.2f}" if losses else "no step"
    name = result["metric"]
    found = f", {METRICS[name].label} {evaluations[-1][name]:.3f}" if evaluations else ""
    return (
        f"{result['setting']['name']} seed {result['seed']}: {result['steps']} steps in {result['seconds']:.0f} s, "
        f"{loss}{found} {result['ended'].strip()}"
    )


class _Pool:
    """Processes that stay, so that each loads torch and the corpus once; one job needs none."""

    def __init__(self, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(jobs, mp_context=context) if jobs > 1 else None

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor:
            self._executor.shutdown(cancel_futures=True)

    def run(self, work: Callable[[Task], dict[str, Any] | None], tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
        if self._executor:
            results = (future.result() for future in as_completed(self._executor.submit(work, task) for task in tasks))
        else:
            results = (work(task) for task in tasks)
        yield from (result for result in results if result is not None)
