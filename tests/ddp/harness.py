"""Real processes that become a fresh world of P ranks for every job, and the small nets that they train.

A job is `fn(*args)`, an importable function; it runs on every rank with `torch.distributed` set up, and asks
`dist.get_rank()` who it is. A world for each job: whatever one job breaks, the next one does not see.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from tests.harness import JOB_TIMEOUT_S, collect, end, forking

WORLD_TIMEOUT_S = 20.0
EXCHANGE_TIMEOUT_S = 15.0  # for attach(): below the world's, so that the exchange is what gives up


@dataclass(frozen=True)
class Task:
    """What the first `size` processes are asked to do, and the file where they meet."""

    size: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    store: str


@dataclass(frozen=True)
class Raised:
    """An error as text: not every exception survives a pickle."""

    kind: str
    message: str


@dataclass(frozen=True)
class Failed:
    """What a job that raised comes back as."""

    error: Raised


def run_script(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, which imports what the tests do, and return how it ended."""
    return subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )


class Worlds:
    """Processes that stay, since starting one costs seconds; a world of up to `size` of them costs milliseconds."""

    def __init__(self, size: int, folder: Path) -> None:
        context = forking()
        self._folder = folder
        self._tasks = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what every rank returned, or `Failed`."""
        self._tasks += 1
        task = pickle.dumps(Task(size, fn, args, str(self._folder / f"store{self._tasks}")))
        for pipe in self._pipes[:size]:
            pipe.send_bytes(task)
        return collect(self._pipes[:size], JOB_TIMEOUT_S)

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what every rank returned; fail if one raised."""
        outcomes = self.outcomes(size, fn, *args)
        for rank, outcome in enumerate(outcomes):
            assert not isinstance(outcome, Failed), f"rank {rank}: {outcome}"
        return outcomes

    def run_all(self, size: int, fn: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
        """Return what every rank returned for each case's arguments, by name, all in one world; fail if one raised."""
        by_rank = self.run(size, _each, fn, dict(cases))
        return {name: [results[name] for results in by_rank] for name in cases}

    def close(self) -> None:
        """End the processes: they wait for a task, and have nothing to put away."""
        for process in self._processes:
            process.kill()
        end(self._processes)
        for pipe in self._pipes:
            pipe.close()


def _each(fn: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    results = {}
    for name, args in cases.items():
        try:
            results[name] = fn(*args)
        except Exception as error:
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
    return results


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_outcome(task, rank)))


def _outcome(task: Task, rank: int) -> Any:
    try:
        with _world(task, rank):
            return task.fn(*task.args)
    except Exception as error:
        return Failed(Raised(type(error).__name__, str(error)))


@contextmanager
def _world(task: Task, rank: int) -> Iterator[None]:
    timeout = timedelta(seconds=WORLD_TIMEOUT_S)
    store = dist.FileStore(task.store, task.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.size, timeout=timeout)
    try:
        dist.barrier()  # or a rank with little to do leaves while others still connect to it
        yield
    except Exception:
        gc.collect()  # what the job left attached belongs to this world
        raise
    finally:
        dist.destroy_process_group()


def attach(model: DDP, algorithm: Any = None, **settings: Any) -> oktopk.Attached:
    """Attach as most tests want it: Ok-Topk at density 1 from the first step, every parameter sparse."""
    defaults: dict[str, Any] = {"dense_steps": 0, "exclude": (), "timeout": EXCHANGE_TIMEOUT_S}
    algorithm = oktopk.OkTopk(density=1.0) if algorithm is None else algorithm
    with redirect_stderr(io.StringIO()):
        return oktopk.attach(model, algorithm, **{**defaults, **settings})


class Net(nn.Module):
    """A small net with weights, biases, a norm, and a branch that a forward pass may leave out."""

    def __init__(self, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.entry = nn.Linear(8, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)
        self.branch = nn.Linear(width, width)
        self.exit = nn.Linear(width, 4)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        hidden = torch.tanh(self.entry(x))
        hidden = self.norm(hidden + self.body(hidden))
        return self.exit(hidden + self.branch(hidden) if branch else hidden)


def batch(rank: int, step: int, rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a rank at a step: always the same ones, other ones for each."""
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)
    return (torch.randn(rows, n, generator=generator, dtype=torch.float64).to(dtype) for n in (8, 4))  # type: ignore[return-value]


def loss_of(model: nn.Module, rank: int, step: int, **forward: Any) -> Tensor:
    """Return a regression's loss on this rank's batch of this step."""
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x, **forward), y)


def step_(model: nn.Module, step: int, **forward: Any) -> None:
    """Make the gradients of this rank's batch of this step, and no others."""
    model.zero_grad()
    loss_of(model, dist.get_rank(), step, **forward).backward()


def descend_(module: nn.Module, rate: float = 0.05) -> None:
    """Take a step down the gradients that there are."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad


def grads_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of every gradient, in the order of memory, as attachments keep residuals."""
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {n: None if g is None else g.detach().as_strided((g.numel(),), (1,)).clone() for n, g in grads.items()}


def delivered_nothing(grads: Mapping[str, Tensor | None]) -> bool:
    """Whether these are the gradients of a skipped step: zeros."""
    return not any(bool(grad.any()) for grad in grads.values() if grad is not None)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same_weights_(to: nn.Module, source: nn.Module) -> None:
    """Give one net the other's weights."""
    to.load_state_dict(copy.deepcopy(source.state_dict()))


def through_a_file(state: Any) -> Any:
    """Return what `torch.load` makes, safely, of what `torch.save` made of the state."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def error_of(fn: Callable[[], Any]) -> Raised | None:
    """Return what `fn` raises; None if it returns."""
    try:
        fn()
    except Exception as error:
        return Raised(type(error).__name__, str(error))
    return None


def num_buckets(model: DDP) -> int:
    """Return how many buckets DDP has now."""
    return len(model.reducer._get_zeros_like_grad_buckets())


def exchange_threads() -> list[str]:
    """Return the names of the threads that attachments have started here, but for those that nobody holds."""
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("oktopk")]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, over the largest element of what it should be."""
    difference, scale = (ours.double() - theirs.double()).abs().max(), theirs.double().abs().max()
    return float(difference / scale) if scale > 0 else float(difference)


def distance(ours: DDP, plain: DDP, backward: Callable[[DDP], None]) -> float:
    """Return the largest relative error of the gradients of one model, with the plain one's for the same weights."""
    same_weights_(plain, ours)
    for model in (plain, ours):
        backward(model)
    came, expected = grads_of(ours.module), grads_of(plain.module)
    assert {n for n, grad in came.items() if grad is None} == {n for n, grad in expected.items() if grad is None}
    return max(relative_error(came[n], grad) for n, grad in expected.items() if grad is not None and len(grad))


class Books:
    """One rank's accounts, by parameter, in float64.

    sum of applied gradients + mean over ranks of the residual = sum of the mean dense gradients
    """

    def __init__(self, net: nn.Module, pending: Mapping[str, Tensor] | None = None) -> None:
        self.applied, self.gradient, self.magnitude = (
            {n: torch.zeros(p.numel(), dtype=torch.float64) for n, p in net.named_parameters()} for _ in range(3)
        )
        self.residual: dict[str, Tensor] = {}
        for name, tensor in (pending or {}).items():
            self.gradient[name] += tensor
            self.magnitude[name] += tensor.abs()

    def enter_(self, applied: nn.Module, local: nn.Module, scale: float = 1.0) -> None:
        """Enter a step: the gradients that DDP delivered, and those of a copy outside of DDP, both of a scaled loss."""
        for name, grad in grads_of(applied).items():
            if grad is not None:
                self.applied[name] += grad.double() / scale
        for name, grad in grads_of(local).items():
            if grad is not None:
                self.gradient[name] += grad.double() / scale
                self.magnitude[name] += grad.double().abs() / scale


def check_balance(by_rank: Sequence[Books], relative: float = 1e-5, held: bool = True) -> None:
    """Check that no element lost more than a part of its gradients, signs aside, and whether anything is held back."""
    gradient, magnitude, residual = (
        mean_of([getattr(books, what) for books in by_rank]) for what in ("gradient", "magnitude", "residual")
    )
    for name in gradient:
        for books in by_rank:
            missing = (books.applied[name] + residual[name] - gradient[name]).abs()
            assert bool((missing <= relative * magnitude[name]).all()), (
                f"{name} lost {float((missing / magnitude[name]).nan_to_num().max()):.3g} of its gradients"
            )
    assert not held or any(bool(tensor.any()) for tensor in residual.values())


def mean_of(by_rank: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean over ranks, in float64, by name."""
    return {name: torch.stack([each[name].double() for each in by_rank]).mean(0) for name in by_rank[0]}


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are the same to the last bit."""
    assert ours.keys() == theirs.keys()
    return all(
        torch.equal(ours[n].reshape(-1).view(torch.uint8), theirs[n].reshape(-1).view(torch.uint8)) for n in ours
    )
