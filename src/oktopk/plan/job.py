"""A plan from a running job: its ranks profile the model at once, and measure the links between them.

torchrun, or any launcher that sets RANK, WORLD_SIZE and MASTER_ADDR, starts such a job. So does `--hosts`, by ssh.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from oktopk.comm import Comm, ProcessGroupComm
from oktopk.errors import PeerError, SettingError
from oktopk.plan.measure import profile_of, time_rank
from oktopk.plan.methods import Method
from oktopk.plan.profile import Profile
from oktopk.plan.topology import PAYLOAD, Topology, flat
from oktopk.words import WORD_BYTES

JOIN_S = 120.0
LONGEST_S = 900.0
PORT = 29_511
PINGS, STREAMS, STREAM_WORDS = 21, 5, 1 << 20
"""Calls of a small and of a large message to a neighbour; 4 MB fill a link for 30 ms at 1 Gbit/s."""


def plan_job(model: str, batch: int, methods: Sequence[Method], optimizer: str) -> tuple[Profile, Topology] | None:
    """Return the profile of a model and the job's links, on rank 0; None on the other ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN_S))
    try:
        comm = ProcessGroupComm()
        mine = {**time_rank(model, batch, optimizer, methods), "links": probe_links(comm)}
        ranks: list[Any] = [None] * comm.size
        dist.all_gather_object(ranks, mine)
    finally:
        dist.destroy_process_group()
    if comm.rank:
        return None
    topology = topology_of([rank["links"] for rank in ranks])
    return profile_of(model, ranks, methods, optimizer, topology.levels[0]), topology


def probe_links(comm: Comm) -> dict[str, float]:
    """Return the seconds of a small message to the next rank, and the Mbit/s to and from it, while all ranks do so."""
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def pass_on(words: int, to: int, source: int) -> None:
        comm.sendrecv(torch.zeros(words, dtype=torch.int32), to, source, words).wait()

    small_s = _median_s(partial(pass_on, 1, following, before), PINGS)
    up_s, down_s = (
        _median_s(partial(pass_on, STREAM_WORDS, to, source), STREAMS)
        for to, source in ((following, before), (before, following))
    )
    megabits = 8e-6 * STREAM_WORDS * WORD_BYTES / PAYLOAD
    return {"latency_s": small_s, "up_mbit": megabits / up_s, "down_mbit": megabits / down_s}


def _median_s(call: Callable[[], None], times: int) -> float:
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(median(seconds[1:]))


def topology_of(links: Sequence[dict[str, float]]) -> Topology:
    """Return hosts at one switch: the slowest link, either way, and the median latency."""
    slowest = min(link[way] for link in links for way in ("up_mbit", "down_mbit"))
    return flat(len(links), slowest, median(link["latency_s"] for link in links))


def start_on(hosts: Sequence[str], argv: Sequence[str]) -> None:
    """Run `oktopk plan ARGV` on each host by ssh, as one job; the first is rank 0 and prints."""
    if len(hosts) < 2:
        raise SettingError(f"--hosts wants two hosts or more, such as --hosts a,b, not {','.join(hosts)!r}")
    started = [subprocess.Popen(_command(hosts, rank, argv), stdin=subprocess.DEVNULL) for rank in range(len(hosts))]
    deadline = time.monotonic() + LONGEST_S
    try:
        for host, process in zip(hosts, started, strict=True):
            if process.wait(max(1.0, deadline - time.monotonic())):
                raise PeerError(f"oktopk plan failed on {host}, with status {process.returncode}: see above")
    except subprocess.TimeoutExpired:
        raise PeerError(f"the hosts did not end within {LONGEST_S:g} s") from None
    finally:
        for process in started:
            process.kill()
            process.wait()


def _command(hosts: Sequence[str], rank: int, argv: Sequence[str]) -> list[str]:
    """Return the ssh command of a rank: the same folder, the same Python, and its place in the environment."""
    place = {"RANK": rank, "WORLD_SIZE": len(hosts), "MASTER_ADDR": hosts[0].rpartition("@")[2], "MASTER_PORT": PORT}
    words = [
        "env",
        *(f"{name}={value}" for name, value in place.items()),
        sys.executable,
        "-m",
        "oktopk",
        "plan",
        *argv,
    ]
    return ["ssh", "-o", "BatchMode=yes", hosts[rank], f"cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"]
