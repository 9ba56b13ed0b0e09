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
from dataclasses import dataclass
from pathlib import Path

from oktopk.errors import SettingError

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

_CLEAN = """cat > /dev/null
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
    """Return the bytes that the kernel counted on the link of this process's host, headers included."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return int(next(fields for name, fields in lines.items() if name.strip() == DEVICE).split()[8])


class Lab:
    """The network, which `with Lab(4, mbit=1000) as lab:` makes and the end of the block removes.

    mbit        speed of each link, each way (0: unlimited)
    delay_ms    milliseconds that a packet takes from host to host
    loss        share of the packets that get lost
    """

    def __init__(self, hosts: int, mbit: float = 0.0, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        _check_settings(hosts, mbit, delay_ms, loss)
        check_possible()
        prefix = f"oklab{os.getpid()}"
        self.switch = f"{prefix}-switch"
        self.hosts = [Host(f"{prefix}-{i}", f"10.77.{i // 250}.{i % 250 + 1}") for i in range(hosts)]
        self.mbit, self.delay_ms, self.loss = mbit, delay_ms, loss
        self._janitor: subprocess.Popen[bytes] | None = None
        self._switch_process: _SwitchProcess | None = None

    def __enter__(self) -> Lab:
        # The janitor cleans up when its standard input ends: at the end of the block, or with this process.
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
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._janitor is not None
        self._janitor.communicate()
        if self._switch_process:
            self._switch_process.close()

    def check(self) -> None:
        """Raise a `LabError` if the switch has ended."""
        if self._switch_process:
            self._switch_process.check()

    def _build(self) -> None:
        _ip("netns", "add", self.switch)
        ports = [f"p{i}" for i in range(len(self.hosts))]
        for host, port in zip(self.hosts, ports, strict=True):
            self._link(host, port)
        if self.delay_ms or self.loss:
            self._switch_process = _SwitchProcess(self.switch, ports, self.delay_ms, self.loss)
            self._switch_process.wait_until_ready()
            return
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")
        for port in ports:
            _ip("-n", self.switch, "link", "set", port, "master", "bridge")

    def _link(self, host: Host, port: str) -> None:
        _ip("netns", "add", host.name)
        _ip("link", "add", DEVICE, "netns", host.name, "type", "veth", "peer", "name", port, "netns", self.switch)
        _ip("-n", host.name, "address", "add", f"{host.address}/16", "dev", DEVICE)
        for namespace, device in ((self.switch, port), (host.name, "lo"), (host.name, DEVICE)):
            _ip("-n", namespace, "link", "set", device, "up")
        if self.loss:  # each frame is one packet, so that a loss is never a burst
            _ip("-n", host.name, "link", "set", DEVICE, "gso_max_segs", "1")
        if self.mbit:
            self._shape(host.name, DEVICE)  # the bytes that the host sends
            self._shape(self.switch, port)  # and those that it receives

    def _shape(self, namespace: str, device: str) -> None:
        bytes_per_s = self.mbit * 125_000
        burst = int(max(LEAST_BURST_BYTES, bytes_per_s * BURST_S))
        queue = int(burst + bytes_per_s * QUEUE_S)
        largest = int(burst * GSO_SHARE)
        if largest < GSO_BYTES:  # the kernel would cut a larger frame into packets
            _ip("-n", namespace, "link", "set", device, "gso_max_size", str(largest))
        shape = ["rate", f"{round(self.mbit * 1000)}kbit", "burst", str(burst), "limit", str(queue)]
        _checked(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape])


class _SwitchProcess:
    """The process that forwards frames, in the switch's namespace, so that the janitor ends it."""

    def __init__(self, namespace: str, ports: Sequence[str], delay_ms: float, loss: float) -> None:
        # Isolated from the modules beside it, and without site, so that it starts sooner.
        python = [sys.executable, "-I", "-S", str(SWITCH), str(delay_ms / 1000), str(loss)]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (it ends with the process)
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *python, *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C goes to the ranks
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
        raise SettingError(f"mbit is the speed of a link, 0 for an unlimited one: not {mbit:g}")
    if not 0 <= delay_ms < math.inf:
        raise SettingError(f"delay_ms is the time of a packet from host to host, 0 or more: not {delay_ms:g}")
    if not 0 <= loss < 1:
        raise SettingError(f"loss is the share of packets that get lost, at least 0 and less than 1: not {loss:g}")


def check_possible() -> None:
    """Raise a `LabError` that names the missing tool or right, if no network can be made here."""
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise LabError(f"the laboratory needs {' and '.join(missing)}: install iproute2")
    if os.geteuid():
        raise LabError("the laboratory makes network namespaces, which only root may: use sudo")


def _ip(*argv: str) -> None:
    _checked(["ip", *argv])


def _checked(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip()}")
