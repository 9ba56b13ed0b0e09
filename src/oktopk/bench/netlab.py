"""A network in one machine: P hosts, each with a network stack of its own and a link of any speed.

Each host is a network namespace, joined to the others by a bridge in a namespace of its own. Nothing outside can be
reached from a host. A token bucket (tc tbf) shapes each link both ways, and is small so that no burst gets through.
With a delay or a loss a process takes the bridge's place (`oktopk.bench.switch`). However the program ends, a janitor
process kills the hosts' processes and removes the namespaces. It needs Linux, root and iproute2.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from oktopk.errors import SettingError, within

BURST_S = 0.0003
"""Seconds of link time that an idle link may save up."""

LEAST_BURST_BYTES = 8_000
GSO_BYTES = 65_536
GSO_SHARE = 0.9
"""Factor of the bucket for the largest frame, because the headers of its packets take about 5 % more."""

QUEUE_S = 0.1
DEVICE = "eth0"
CLONE_NEWNET = 0x40000000
LAST_WORDS = 4000
SWITCH = Path(__file__).with_name("switch.py")

_CLEAN = """exec > /dev/null 2>&1
cat
for name in "$@"; do ip netns pids "$name" | xargs -r kill -9; done
for name in "$@"; do ip netns delete "$name"; done"""


class LabError(RuntimeError):
    """The network cannot be made, or has ended."""


@dataclass(frozen=True)
class Host:
    """A host: the name of its namespace, and its address."""

    name: str
    address: str

    def enter(self) -> None:
        """Move the calling process, which must have one thread, to this host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def sent_bytes() -> int:
    """Return the bytes that the kernel counted out on the link of this process's host, headers included."""
    return _counted(8)


def received_bytes() -> int:
    """Return the bytes that it counted in."""
    return _counted(0)


def _counted(column: int) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return int(next(fields for name, fields in lines.items() if name.strip() == DEVICE).split()[column])


class Lab:
    """The network, which `with Lab(4, mbit=1000) as lab:` makes and the end of the block removes.

    mbit        speed of each link, each way (0: unlimited)
    delay_ms    milliseconds that a packet takes from host to host
    loss        share of the packets that get lost
    """

    def __init__(self, hosts: int, mbit: float = 0.0, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        within("hosts", hosts, 1)
        for name, value, limit in (("mbit", mbit, math.inf), ("delay_ms", delay_ms, math.inf), ("loss", loss, 1)):
            if not 0 <= value < limit:
                raise SettingError(f"{name} must be at least 0 and less than {limit:g}, not {value:g}")
        check_possible()
        prefix = f"oklab{os.getpid()}"
        self.switch = f"{prefix}-switch"
        self.hosts = [Host(f"{prefix}-{i}", f"10.77.{i // 250}.{i % 250 + 1}") for i in range(hosts)]
        self.mbit, self.delay_ms, self.loss = mbit, delay_ms, loss
        self._switch_process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Lab:
        # The janitor cleans up when its standard input ends: at the end of the block, or with this process.
        command = ["sh", "-c", _CLEAN, "janitor", *(host.name for host in self.hosts), self.switch]
        with ExitStack() as cleaning:
            janitor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            cleaning.callback(janitor.communicate)
            self._build(cleaning)
            self._cleaning = cleaning.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleaning.close()

    def plug(self, number: int, *, into: bool) -> None:
        """Plug a host's link into the bridge, or out of it: then nobody reaches the host."""
        _run(f"ip -n {self.switch} link set p{number} {'up' if into else 'down'}")

    def check(self) -> None:
        """Raise a `LabError` if the switch has ended."""
        if self._switch_process and self._switch_process.poll() is not None:
            self._switch_words.seek(0)
            words = self._switch_words.read().decode(errors="replace")[-LAST_WORDS:]
            raise LabError(f"the switch ended with {self._switch_process.returncode}\n{words}".rstrip())

    def _build(self, cleaning: ExitStack) -> None:
        _run(f"ip netns add {self.switch}")
        ports = [f"p{i}" for i in range(len(self.hosts))]
        for host, port in zip(self.hosts, ports, strict=True):
            self._link(host, port)
        if self.delay_ms or self.loss:
            self._start_switch(ports, cleaning)
            return
        _run(f"ip -n {self.switch} link add bridge type bridge")
        _run(f"ip -n {self.switch} link set bridge up")
        for port in ports:
            _run(f"ip -n {self.switch} link set {port} master bridge")

    def _start_switch(self, ports: Sequence[str], cleaning: ExitStack) -> None:
        """Start the process that forwards frames, in the switch's namespace, so that the janitor ends it, too."""
        # Isolated from the modules beside it, and without site, so that it starts sooner.
        python = [sys.executable, "-I", "-S", str(SWITCH), str(self.delay_ms / 1000), str(self.loss), *ports]
        self._switch_words = cleaning.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._switch_process = process = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, *python],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._switch_words,
            start_new_session=True,  # Ctrl-C goes to the ranks
        )
        cleaning.callback(process.communicate)
        cleaning.callback(process.kill)
        assert process.stdout is not None
        if not process.stdout.readline():
            process.wait()
            self.check()

    def _link(self, host: Host, port: str) -> None:
        _run(f"ip netns add {host.name}")
        _run(f"ip link add {DEVICE} netns {host.name} type veth peer name {port} netns {self.switch}")
        _run(f"ip -n {host.name} address add {host.address}/16 dev {DEVICE}")
        for namespace, device in ((self.switch, port), (host.name, "lo"), (host.name, DEVICE)):
            _run(f"ip -n {namespace} link set {device} up")
        if self.loss:  # each frame is one packet, so that a loss is never a burst
            _run(f"ip -n {host.name} link set {DEVICE} gso_max_segs 1")
        if self.mbit:
            self._shape(host.name, DEVICE)  # the bytes that the host sends
            self._shape(self.switch, port)  # and those that it receives

    def _shape(self, namespace: str, device: str) -> None:
        bytes_per_s = self.mbit * 125_000
        burst = int(max(LEAST_BURST_BYTES, bytes_per_s * BURST_S))
        queue = int(burst + bytes_per_s * QUEUE_S)
        largest = int(burst * GSO_SHARE)
        if largest < GSO_BYTES:  # the kernel would cut a larger frame into packets
            _run(f"ip -n {namespace} link set {device} gso_max_size {largest}")
        shape = f"rate {round(self.mbit * 1000)}kbit burst {burst} limit {queue}"
        _run(f"tc -n {namespace} qdisc add dev {device} root tbf {shape}")


def check_possible() -> None:
    """Raise a `LabError` that names the missing tool or right, if no network can be made here."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise LabError(f"the laboratory needs {' and '.join(missing)}: install iproute2")
    if os.geteuid():
        raise LabError("the laboratory makes network namespaces, which only root may: use sudo")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{command}: {done.stderr.strip()}")
