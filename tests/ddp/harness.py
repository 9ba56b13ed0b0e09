"""Real processes that become a fresh world of P ranks for every job, an importable function that each rank runs."""

import functools
import gc
import inspect
import io
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from tests.harness import JOB_TIMEOUT_S, collect, end, forking

WORLD_TIMEOUT_S = 20.0
EXCHANGE_TIMEOUT_S = 15.0  # for attach(): below the world's, so that the exchange is what gives up
ATTACHED: weakref.WeakSet[oktopk.Attached] = weakref.WeakSet()


class Failed(str):
    """The traceback of a job that raised, as text: not every exception survives a pickle."""


class Worlds:
    """Processes that stay, since starting one costs seconds; a world of up to `size` of them costs milliseconds."""

    def __init__(self, size: int, folder: Path) -> None:
        self._size, self._folder = size, folder
        self._tasks = 0
        self._pipes, self._processes = started(size, _serve)

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what every rank returned; fail if one raised."""
        if not self._processes:
            self._pipes, self._processes = started(self._size, _serve)
        self._tasks += 1
        task = pickle.dumps((size, str(self._folder / f"store{self._tasks}"), fn, args))
        try:
            for pipe in self._pipes[:size]:
                pipe.send_bytes(task)
            outcomes = collect(self._pipes[:size], JOB_TIMEOUT_S)
        except BaseException:
            self.close()  # or the next task would get the answers to this one
            raise
        failed = [f"rank {i}: {each}" for i, each in enumerate(outcomes) if isinstance(each, Failed)]
        assert not failed, "\n".join(failed)
        return outcomes

    def close(self) -> None:
        """End the processes: they wait for a task, and have nothing to put away."""
        end_now(self._pipes, self._processes)
        self._pipes, self._processes = [], []


def started(size: int, serve: Callable[..., None], *args: Any) -> tuple[list[Connection], list[Any]]:
    """Start a process for each rank that runs `serve(rank, pipe, *args)`; return the other ends of their pipes too."""
    context, pipes, processes = forking(), [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, theirs, *args), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    return pipes, processes


def end_now(pipes: list[Connection], processes: list[Any]) -> None:
    for process in processes:
        process.kill()
    end(processes)
    for pipe in pipes:
        pipe.close()


def _serve(rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # all that was imported, which a test's gc.collect() would look through
    while True:
        try:
            size, store, fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            with _world(size, store, rank):
                outcome = getattr(fn, "body", fn)(*args)
        except Exception:
            outcome = Failed(traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))


@contextmanager
def _world(size: int, path: str, rank: int) -> Iterator[None]:
    store, timeout = dist.FileStore(path, size), timedelta(seconds=WORLD_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        dist.barrier()  # or a rank with little to do leaves while others still connect to it
        yield
    finally:
        for attached in list(ATTACHED):  # it belongs to this world
            attached.detach()
        dist.destroy_process_group()


def on_ranks(*sizes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that every rank runs, asserts and all, in worlds of these sizes."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.processes
        @pytest.mark.parametrize("size", sizes)
        @functools.wraps(body)
        def test(worlds: Worlds, size: int, **arguments: Any) -> None:
            worlds.run(size, test, *(arguments[name] for name in names))

        names = list(inspect.signature(body).parameters)
        test.body, test.__signature__ = body, _asking_for("worlds", "size", *names)
        return test

    return decorate


def on_threads(*sizes: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function `body(comm, ...)` that every rank runs, asserts and all, as threads of this process."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("size", sizes)
        @functools.wraps(body)
        def test(size: int, **arguments: Any) -> None:
            oktopk.run_local(size, lambda comm: body(comm, **arguments))

        test.__signature__ = _asking_for("size", *list(inspect.signature(body).parameters)[1:])
        return test

    return decorate


def _asking_for(*fixtures: str) -> inspect.Signature:
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures])


def gathered(mine: Any) -> list[Any]:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def attach(model: DDP, algorithm: Any = None, **settings: Any) -> oktopk.Attached:
    """Attach until the world ends: by default Ok-Topk at density 1 from the first step, every parameter sparse."""
    defaults: dict[str, Any] = {"dense_steps": 0, "exclude": (), "timeout": EXCHANGE_TIMEOUT_S}
    algorithm = oktopk.OkTopk(density=1.0) if algorithm is None else algorithm
    with redirect_stderr(io.StringIO()):
        attached = oktopk.attach(model, algorithm, **{**defaults, **settings})
    ATTACHED.add(attached)
    return attached


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def error_of(fn: Callable[..., Any], *args: Any) -> str:
    """Return what `fn(*args)` raises, as "Kind: message"; nothing if it returns."""
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_words(said: str, *words: str) -> None:
    assert all(each in said for each in words), f"{words} are not all in {said!r}"


def num_buckets(model: DDP) -> int:
    return len(model.reducer._get_zeros_like_grad_buckets())


def exchange_threads() -> list[str]:
    """Return the names of the threads that attachments have started here, but for those that nobody holds."""
    gc.collect()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("oktopk")]
