"""Run a command on a network of hosts inside this machine, with links as slow as you like.

    sudo python -m benchmarks.netlab --hosts 4 --mbit 1000 -- python train.py

Each host runs the command once, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME set as torchrun
sets them for one process a host. Rank 0's output is shown as it comes, another rank's if it fails. The network is made
by `oktopk.bench.netlab` and removed when the command ends, however it ends. It needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from oktopk.bench.machine import threads_for
from oktopk.bench.netlab import DEVICE, LAST_WORDS, Lab, LabError
from oktopk.errors import SettingError

PORT = 29_500
GRACE_S = 5.0
"""Seconds that the other ranks have to report after the first one failed."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=0.0, help="speed of each link, each way; 0: unlimited")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="time of a packet from host to host, one way")
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets that get lost: 0.001 is 0.1 %%")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which the command is ended")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    args = parser.parse_args(argv)
    try:
        with Lab(args.hosts, args.mbit, args.delay_ms, args.loss) as lab:
            run(lab, args.command, args.timeout)
    except (LabError, SettingError) as error:
        print(f"benchmarks.netlab: {error}", file=sys.stderr)
        return 1
    return 0


def run(lab: Lab, argv: Sequence[str], timeout_s: float = 600.0) -> None:
    """Run the command on every host as one rank each, show rank 0's output, and end all ranks if one fails."""
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(len(lab.hosts))]
        try:
            for rank, (host, log) in enumerate(zip(lab.hosts, logs, strict=True)):
                with log.open("wb") as file:
                    output = None if rank == 0 else file
                    command = ["taskset", "-c", cores_of(rank, len(lab.hosts)), "ip", "netns", "exec", host.name, *argv]
                    ranks.append(subprocess.Popen(command, env=environment(lab, rank), stdout=output, stderr=output))
            wait(lab, ranks, logs, timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def environment(lab: Lab, rank: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(lab.hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": lab.hosts[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_for(len(lab.hosts)))),
    }


def cores_of(rank: int, hosts: int) -> str:
    """Return the cores of a host: its share of this machine's, or one that it shares if there are more hosts."""
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[rank::hosts] or [cores[rank % len(cores)]]))


def wait(lab: Lab, ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout_s: float) -> None:
    """Wait until all ranks have ended well; raise if one fails, if the lab ends, or when the time is up."""
    deadline = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() <= deadline:
        lab.check()
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)  # the others may report the failure, too
        time.sleep(0.02)
    ends = [(rank, process.poll()) for rank, process in enumerate(ranks)]
    for rank, status in sorted(ends, key=lambda end: end[1] is None):
        if status != 0:
            how = f"was not done after {timeout_s:g} s" if status is None else f"ended with {status}"
            raise LabError(f"rank {rank} {how}\n{logs[rank].read_text(errors='replace')[-LAST_WORDS:]}".rstrip())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
