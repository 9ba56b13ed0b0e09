"""A network in one machine: P hosts, each with a network stack of its own and a link as slow as you like.

    sudo python -m benchmarks.netlab --hosts 4 --mbit 1000 -- python train.py

Runs the command once on each host, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME set as
torchrun would set them for one process a host: a program that runs under torchrun runs here, so try your model on a
slower network than you have. Rank 0's output is shown as it comes, the others' if they fail.

The hosts are network namespaces on a bridge in a namespace of its own; nothing outside can be reached from them, and
they are gone when the command ends, however it ends. Each link is full duplex and shaped both ways (tc's token bucket,
small, so that no burst gets through). With --delay-ms or --loss a process takes the bridge's place, which holds every
packet that long and drops that share (`oktopk.bench.switch`). Linux, root, `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oktopk.errors import SettingError

BURST_S = 0.0003
"""Link time that a link may save up while it is idle."""

LEAST_BURST_BYTES = 8_000
GSO_BYTES = 65_536
GSO_SHARE = 0.9
"""Of the bucket, for the largest frame: it pays for the headers of all the packets that it holds, 5 % or so."""

QUEUE_S = 0.1
PORT = 29_500
DEVICE = "eth0"
CLONE_NEWNET = 0x40000000
GRACE_S = 5.0
"""Between the first rank's failure and the end of the others."""

LAST_WORDS = 4000
SWITCH = Path(__file__).with_name("switch.py")

_CLEAN = """cat > /dev/null
for name in "$@"; do ip netns pids "$name" | xargs -r kill -9; done
for name in "$@"; do ip netns delete "$name"; done"""


class LabError(RuntimeError):
    """The network cannot be made here."""


@dataclass(frozen=True)
class Host:
    """One of the hosts: the name of its namespace, and its address."""

    name: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return what runs `argv` on this host."""
        return ["ip", "netns", "exec", self.name, *argv]

    def enter(self) -> None:
        """Make the calling process, which must have one thread, a process of this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def sent_bytes() -> int:
    """Return what has left the host of the calling process, headers included, by the kernel's own count."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return int(next(fields for name, fields in lines.items() if name.strip() == DEVICE).split()[8])


class Lab:
    """`with Lab(4, mbit=1000) as lab:` makes the network; leaving it, in whatever way, removes it.

    `mbit`: speed of each link, each way (0: as fast as it goes); `delay_ms`: from host to host, one way; `loss`: each
    packet's chance of getting lost.
    """

    def __init__(self, hosts: int, mbit: float = 0.0, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        _check_settings(hosts, mbit, delay_ms, loss)
        check_possible()
        prefix = f"oklab{os.getpid()}"
        self.switch = f"{prefix}-switch"
        self.hosts = [Host(f"{prefix}-{i}", f"10.77.{i // 250}.{i % 250 + 1}") for i in range(hosts)]
        self.mbit = mbit
        self.delay_ms = delay_ms
        self.loss = loss
        self._janitor: subprocess.Popen[bytes] | None = None
        self._switch_process: _SwitchProcess | None = None

    def __enter__(self) -> Lab:
        # The janitor cleans up when its standard input ends: when we say so, and when we are no more.
        names = [host.name for host in self.hosts] + [self.switch]
        self._janitor = subprocess.Popen(
            ["sh", "-c", _CLEAN, "janitor", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._build()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

    def _clean(self) -> None:
        assert self._janitor is not None
        self._janitor.communicate()
        if self._switch_process:
            self._switch_process.close()

    def _build(self) -> None:
        _ip("netns", "add", self.switch)
        ports = [f"p{i}" for i in range(len(self.hosts))]
        for host, port in zip(self.hosts, ports, strict=True):
            self._link(host, port)
        if self.delay_ms or self.loss:
            self._switch_process = _SwitchProcess(self.switch, ports, self.delay_ms, self.loss)
            self._switch_process.wait_until_ready()
        else:
            self._bridge(ports)

    def _link(self, host: Host, port: str) -> None:
        _ip("netns", "add", host.name)
        _ip("link", "add", DEVICE, "netns", host.name, "type", "veth", "peer", "name", port, "netns", self.switch)
        _ip("-n", host.name, "address", "add", f"{host.address}/16", "dev", DEVICE)
        for namespace, device in ((self.switch, port), (host.name, "lo"), (host.name, DEVICE)):
            _ip("-n", namespace, "link", "set", device, "up")
        if self.mbit:
            self._shape(host.name, DEVICE)  # what the host sends
            self._shape(self.switch, port)  # what it gets

    def _bridge(self, ports: Sequence[str]) -> None:
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")
        for port in ports:
            _ip("-n", self.switch, "link", "set", port, "master", "bridge")

    def _shape(self, namespace: str, device: str) -> None:
        bytes_per_s = self.mbit * 125_000
        burst = int(max(LEAST_BURST_BYTES, bytes_per_s * BURST_S))
        queue = int(burst + bytes_per_s * QUEUE_S)
        largest = int(burst * GSO_SHARE)
        if largest < GSO_BYTES:  # or a frame larger than the bucket would be cut up, packet by packet
            _ip("-n", namespace, "link", "set", device, "gso_max_size", str(largest))
        shape = ["rate", f"{round(self.mbit * 1000)}kbit", "burst", str(burst), "limit", str(queue)]
        _checked(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape])

    def check(self) -> None:
        """Raise a `LabError` if the network is no more."""
        if self._switch_process:
            self._switch_process.check()

    def run(self, argv: Sequence[str], timeout_s: float = 600.0) -> None:
        """Run the command on every host, as one rank each, rank 0's output shown; one that fails ends all."""
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder) / f"rank{rank}.log" for rank in range(len(self.hosts))]
            ranks = [self._start(argv, rank, log) for rank, log in enumerate(logs)]
            try:
                _wait(ranks, logs, timeout_s, self.check)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()

    def _start(self, argv: Sequence[str], rank: int, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            output = None if rank == 0 else file
            return subprocess.Popen(
                self.hosts[rank].command(argv), env=self._environment(rank), stdout=output, stderr=output
            )

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


class _SwitchProcess:
    """The process that forwards frames, in the switch's namespace, where the janitor finds it."""

    def __init__(self, namespace: str, ports: Sequence[str], delay_ms: float, loss: float) -> None:
        # Isolated, or a module beside it might stand in for one of Python's; without site it starts sooner.
        python = [sys.executable, "-I", "-S", str(SWITCH), str(delay_ms / 1000), str(loss)]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (it ends with the process)
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *python, *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C is for the ranks
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self._process.wait()
            self.check()

    def check(self) -> None:
        if self._process.poll() is not None:
            self._words.seek(0)
            words = self._words.read().decode(errors="replace")[-LAST_WORDS:]
            raise LabError(f"the switch ended with {self._process.returncode}\n{words}".rstrip())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._words.close()


def _check_settings(hosts: int, mbit: float, delay_ms: float, loss: float) -> None:
    if hosts < 1:
        raise SettingError(f"a laboratory has one host or more, not {hosts}")
    if not 0 <= mbit < math.inf:
        raise SettingError(f"mbit is the speed of a link, 0 for as fast as it goes: not {mbit:g}")
    if not 0 <= delay_ms < math.inf:
        raise SettingError(f"delay_ms is how long a packet takes from host to host, 0 or more: not {delay_ms:g}")
    if not 0 <= loss < 1:
        raise SettingError(f"loss is the share of packets that get lost, at least 0 and less than 1: not {loss:g}")


def check_possible() -> None:
    """Raise a `LabError` that says what is missing, if a network cannot be made here."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise LabError(f"the laboratory needs {' and '.join(missing)}: install iproute2")
    if os.geteuid():
        raise LabError("the laboratory makes network namespaces, which only root may: use sudo")


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout_s: float, check: Callable[[], None]
) -> None:
    """Wait until all have ended well; raise when the first has not, when `check` does, or when the time is up."""
    deadline = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks):
        check()
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed and time.monotonic() < deadline - GRACE_S:
            deadline = time.monotonic() + GRACE_S  # the others have something to say about it, too
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    for rank in (*failed, *late):
        how = f"ended with {ranks[rank].poll()}" if rank in failed else f"was not done after {timeout_s:g} s"
        raise LabError(f"rank {rank} {how}\n{logs[rank].read_text(errors='replace')[-LAST_WORDS:]}".rstrip())


def _ip(*argv: str) -> None:
    _checked(["ip", *argv])


def _checked(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command on the hosts of a network that is made for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=0.0, help="speed of each link, each way; 0: as fast as it goes")
    parser.add_argument(
        "--delay-ms", type=float, default=0.0, help="how long a packet takes from host to host, one way"
    )
    parser.add_argument("--loss", type=float, default=0.0, help="share of the packets that get lost: 0.001 is 0.1 %%")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which the command is ended")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    args = parser.parse_args(argv)
    try:
        with Lab(args.hosts, args.mbit, args.delay_ms, args.loss) as lab:
            lab.run(args.command, args.timeout)
    except (LabError, SettingError) as error:
        print(f"benchmarks.netlab: {error}", file=sys.stderr)
        return 1
    return 0
