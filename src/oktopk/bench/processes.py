"""gloo processes on this machine, over the loopback or each on a host of its own, and the settings that name these."""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, start_processes

from oktopk.bench.machine import threads_for
from oktopk.bench.netlab import Host, Lab, LabError, check_possible
from oktopk.errors import PeerError, SettingError, within

COLLECTIVE_TIMEOUT = timedelta(seconds=120)
DEADLINE_S = 900.0
DEFAULT_MBIT = 1000.0


@dataclass(frozen=True)
class Setting:
    """P ranks, and the network between them. Each `shard` ranks are one host, over whose loopback they talk."""

    ranks: int
    mbit: float | None  # of each link (0: unlimited; None: the loopback, without a lab)
    delay_ms: float = 0.0  # of a packet, one way
    shard: int = 1

    def __str__(self) -> str:
        ranks = f"{self.ranks // self.shard} x {self.shard}" if self.shard > 1 else self.ranks
        return f"P = {ranks}, {link_name(self.mbit)}" + (f", {self.delay_ms:g} ms away" if self.delay_ms else "")

    def run(self, work: Callable[..., Any], *args: Any, show: Callable[[], None] = lambda: None) -> list[Any]:
        """Return the result of `work(*args)` on each rank, and call `show()` once a second meanwhile."""
        try:
            return run_processes(
                work, self.ranks, *args, mbit=self.mbit, delay_ms=self.delay_ms, shard=self.shard, show=show
            )
        except LabError as error:
            raise SettingError(f"no network for {self}: {error}") from error


Network = tuple[list[Setting], list[str]]


def make_settings(ranks: Sequence[int], mbit: Sequence[float] | None, delay_ms: float, shard: int = 1) -> Network:
    """Return a setting for each number of ranks and each link, and notes for the user."""
    within("--delay-ms", delay_ms, 0)
    for size in ranks:
        if size % shard or size == shard:
            raise SettingError(
                f"--shard {shard} wants --ranks of several times {shard}, such as {2 * shard}, not {size}"
            )
    try:
        check_possible()
    except LabError as error:
        wanted = [f"links of {link:g} Mbit/s" for link in mbit or () if link] + ["delay"] * (delay_ms > 0)
        if wanted:
            advice = "--mbit 0 alone measures over the loopback"
            raise SettingError(f"wanted {', '.join(wanted)}, but {error}; {advice}") from None
        note = f"over the loopback of this machine, and no bytes counted by an interface: {error}"
        return [Setting(size, None, shard=shard) for size in ranks], [note]
    return [Setting(size, link, delay_ms, shard) for size in ranks for link in mbit or [DEFAULT_MBIT]], []


def link_name(mbit: float | None) -> str:
    """Return the name of a link.

    >>> link_name(1000), link_name(0), link_name(None)
    ('1000 Mbit/s', 'unlimited link', 'loopback')
    """
    if mbit is None:
        return "loopback"
    return f"{mbit:g} Mbit/s" if mbit else "unlimited link"


def run_processes(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    mbit: float | None = None,
    delay_ms: float = 0.0,
    loss: float = 0.0,
    shard: int = 1,
    show: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return `[fn(*args) for each rank]`, run in `size` gloo processes that share the cores; results travel as JSON.

    With `mbit`, `delay_ms` or `loss` each `shard` processes are a host of a `Lab`. Without, they use the loopback.
    Meanwhile `show()` is called once a second.
    """
    shaped = mbit is not None or delay_ms or loss
    with (
        Lab(size // shard, mbit or 0.0, delay_ms, loss) if shaped else nullcontext() as lab,
        tempfile.TemporaryDirectory() as folder,
    ):
        hosts = [host for host in lab.hosts for _ in range(shard)] if lab else None
        arguments = (size, folder, fn, args, hosts)
        context = start_processes(_process, arguments, nprocs=size, join=False)  # type: ignore[no-untyped-call]
        try:
            _wait(context, lab, show)
        finally:
            for process in context.processes:
                process.kill()
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(size)]


def _wait(context: ProcessContext, lab: Lab | None, show: Callable[[], None]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not context.join(timeout=1.0):
            show()
            if lab:
                lab.check()
            if time.monotonic() > deadline:
                advice = "ask for fewer rounds, methods or elements"
                raise PeerError(f"the ranks did not end within {DEADLINE_S:g} s: {advice}")
    except ProcessExitedException as error:
        advice = "most likely for want of memory: ask for fewer ranks, methods or elements"
        by = (
            f"killed, {advice}"
            if error.signal_name == "SIGKILL"
            else f"ended by {error.signal_name or error.exit_code}"
        )
        raise PeerError(f"rank {error.error_index} was {by}") from None


def _process(rank: int, size: int, folder: str, fn: Callable[..., Any], args: Any, hosts: list[Host] | None) -> None:
    if hosts:
        hosts[rank].enter()
    torch.set_num_threads(threads_for(size))
    store = FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    try:
        result = fn(*args)
    finally:
        # A DDP sits in reference cycles, and its PowerSGD hook hands Python objects to gloo's threads. Threads that
        # outlive the group abort the process at exit, so the group must have no other owner here.
        gc.collect()
        dist.destroy_process_group()
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(result))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the largest of the values."""
    return {"median": median(values), "min": min(values), "max": max(values)}
