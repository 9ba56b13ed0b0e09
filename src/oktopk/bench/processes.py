"""gloo processes on this machine, over the loopback or each on a host of its own."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from oktopk.bench.machine import threads_for
from oktopk.bench.netlab import Host, Lab
from oktopk.errors import PeerError

COLLECTIVE_TIMEOUT = timedelta(seconds=120)
DEADLINE_S = 900.0


def run_processes(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    mbit: float | None = None,
    delay_ms: float = 0.0,
    loss: float = 0.0,
) -> list[Any]:
    """Return `[fn(*args) for each rank]`, run in `size` gloo processes that share the cores; results travel as JSON.

    With `mbit`, `delay_ms` or `loss` each process is a host of a `Lab`. Without, they use the loopback.
    """
    if mbit is None and not delay_ms and not loss:
        return _run(fn, size, args, None)
    with Lab(size, mbit or 0.0, delay_ms, loss) as lab:
        return _run(fn, size, args, lab)


def _run(fn: Callable[..., Any], size: int, args: tuple[Any, ...], lab: Lab | None) -> list[Any]:
    hosts = lab.hosts if lab else []
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(_process, (size, folder, fn, args, hosts), nprocs=size, join=False)  # type: ignore[no-untyped-call]
        try:
            _wait(context, lab)
        finally:
            for process in context.processes:
                process.kill()
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(size)]


def _wait(context: ProcessContext, lab: Lab | None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not _ended(context):
        if time.monotonic() > deadline:
            raise PeerError(f"the ranks did not end within {DEADLINE_S:g} s: ask for fewer rounds, methods or elements")
        if lab:
            lab.check()


def _ended(context: ProcessContext) -> bool:
    try:
        return bool(context.join(timeout=1.0))
    except ProcessExitedException as error:
        if error.signal_name != "SIGKILL":
            raise
        raise PeerError(
            f"rank {error.error_index} was killed, most likely for want of memory: "
            "ask for fewer ranks, methods or elements"
        ) from None


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the largest of the values."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def _process(
    rank: int, size: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...], hosts: list[Host]
) -> None:
    if hosts:
        hosts[rank].enter()
    torch.set_num_threads(threads_for(size))
    store = FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    try:
        result = fn(*args)
    finally:
        dist.destroy_process_group()
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(result))
