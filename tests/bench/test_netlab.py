"""The laboratory's network: as fast as it says, cut off from the world, and gone when its command is."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import netlab as commands
from oktopk.bench import netlab
from oktopk.bench.netlab import Lab, LabError, sent_bytes
from oktopk.bench.processes import run_processes
from oktopk.errors import SettingError

ROOT = Path(__file__).parents[2]
SECONDS = 50
SO_RCVBUFFORCE = 33
slow = partial(pytest.param, marks=pytest.mark.slow)
needs_a_lab = pytest.mark.usefixtures("lab_works")


def namespaces(pid: int) -> list[str]:
    """Return what there is of the laboratory of that process: others may have theirs."""
    return [path.name for path in Path("/run/netns").glob(f"oklab{pid}-*")]


def pids_of(namespace: str) -> list[int]:
    said = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in said.split()]


def transfer(num_bytes: int) -> dict[str, float]:
    """Send to the other rank and receive from it, at the same time."""
    block = torch.zeros(num_bytes // 4)
    dist.all_reduce(torch.zeros(1))  # connections are made
    before, start = sent_bytes(), time.perf_counter()
    peer = 1 - dist.get_rank()
    for work in [dist.irecv(torch.empty_like(block), peer), dist.isend(block, peer)]:
        work.wait()
    dist.all_reduce(torch.zeros(1))  # the other has all of it, too
    return {"seconds": time.perf_counter() - start, "sent": sent_bytes() - before}


@needs_a_lab
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(
    ("mbit", "delay_ms", "least"), [(20, 0, 0.9), (80, 0, 0.9), (300, 0, 0.9), (20, 5, 0.85), (300, 5, 0.85)]
)
def test_a_link_is_as_fast_as_it_says_in_both_directions_at_once(mbit: int, delay_ms: int, least: float) -> None:
    num_bytes = 3 * mbit * 125_000  # three seconds' worth
    for rank in run_processes(transfer, 2, num_bytes, mbit=mbit, delay_ms=delay_ms):
        assert least < 8e-6 * rank["sent"] / rank["seconds"] / mbit < 1.1
        assert num_bytes < rank["sent"] < 1.1 * num_bytes


def open_end() -> tuple[socket.socket, tuple[str, int]]:
    """Return a socket for datagrams, and the other rank's address; both are ready then."""
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)  # datagrams get lost on the way, not here
    end.bind(("", 7000))
    end.settimeout(30)
    dist.barrier()
    return end, (f"10.77.0.{2 - dist.get_rank()}", 7000)


def look_around() -> dict[str, Any]:
    """Return rank 0's fastest of 10 round trips, and the error of a connection to an address of nobody's."""
    seconds = []
    end, other = open_end()
    with end, socket.socket() as outside:
        outside.settimeout(2)
        for _ in range(10):
            start = time.perf_counter()
            if dist.get_rank() == 0:
                end.sendto(b"ping", other)
            heard = end.recv(9)
            seconds.append(time.perf_counter() - start)
            if dist.get_rank() == 1:
                end.sendto(heard, other)
        return {"round_trip_s": min(seconds), "outside": outside.connect_ex(("192.0.2.1", 9))}


@pytest.mark.slow
@needs_a_lab
def test_a_round_trip_takes_twice_the_delay_and_nothing_outside_can_be_reached() -> None:
    ranks = run_processes(look_around, 2, delay_ms=40)
    assert [rank["outside"] for rank in ranks] == [errno.ENETUNREACH] * 2
    assert 0.080 <= ranks[0]["round_trip_s"] < 0.150


def lose() -> dict[str, int]:
    """Return how many of the other rank's 2000 datagrams arrive, the wrong elements of a sum, and what TCP repeated."""
    end, other = open_end()
    arrived, counting = 0, torch.arange(200_000, dtype=torch.float64)
    with end, suppress(TimeoutError):
        for i in range(2000):
            end.sendto(b"datagram", other)
            time.sleep(0.003 * (i % 10 == 9))
        end.settimeout(3)
        while end.recv(9):
            arrived += 1
    block = counting * (dist.get_rank() + 1)
    dist.all_reduce(block)
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if "Tcp:" in line)
    wrong = int((block != 3 * counting).sum())
    return {"arrived": arrived, "wrong": wrong, "again": int(values[names.index("RetransSegs")])}


@needs_a_lab
@pytest.mark.slow
def test_the_share_that_gets_lost_is_the_one_set_and_tcp_makes_it_good() -> None:
    for rank in run_processes(lose, 2, loss=0.05):
        assert 1850 < rank["arrived"] < 1950  # each with 0.95: 1900, with a standard deviation of 10
        assert rank["wrong"] == 0
        assert rank["again"] > 20  # each sends 1.6 MB or more, 1100 packets: 55 are lost


def sleep_on_hosts() -> None:
    with Lab(2, delay_ms=1) as lab:
        commands.run(lab, ["sleep", "300"])


@needs_a_lab
@pytest.mark.parametrize("run", [
    sleep_on_hosts, slow(lambda: run_processes(time.sleep, 2, 300, delay_ms=1)),
])  # fmt: skip
@pytest.mark.parametrize("code", ["print('ready', flush=True); time.sleep(1); sys.exit('dead')", "sys.exit('dead')"])
def test_a_switch_that_ends_or_cannot_start_ends_all(run: Any, code: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(netlab, "SWITCH", tmp_path / "switch.py")
    netlab.SWITCH.write_text(f"import sys, time\n{code}")
    with pytest.raises(LabError, match="the switch ended with 1\ndead"):
        run()
    assert not namespaces(os.getpid())


def start(*command: str, delay_ms: float = 0.0) -> subprocess.Popen[str]:
    def heed() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it

    words = [sys.executable, "-m", "benchmarks.netlab", "--hosts", "2", "--delay-ms", str(delay_ms), "--", *command]
    return subprocess.Popen(words, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=heed)


@needs_a_lab
def test_the_command_sees_what_torchrun_would_tell_it_beside_another_laboratory() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"]
    cores = "len(os.sched_getaffinity(0))"
    show = f"import json, os; print(json.dumps([{{n: os.environ[n] for n in {names}}}, {cores}]))"
    with Lab(1) as other:
        lab = start(sys.executable, "-c", show)
        output, errors = lab.communicate(timeout=SECONDS)
        assert other.hosts[0].name in namespaces(os.getpid())
    told, num_cores = json.loads(output)
    assert told == dict(zip(names, ["0", "2", "0", "10.77.0.1", "29500", "eth0"], strict=True)), errors
    assert num_cores == max(1, -(-len(os.sched_getaffinity(0)) // 2)), "rank 0 of two hosts has its share"
    assert not namespaces(lab.pid)


@needs_a_lab
@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_words() -> None:
    fail = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('rank one is out')\ntime.sleep(40)"
    lab = start(sys.executable, "-c", fail)
    _, errors = lab.communicate(timeout=SECONDS)
    assert lab.returncode == 1
    assert "rank one is out" in errors
    assert not namespaces(lab.pid)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


@needs_a_lab
@pytest.mark.parametrize(("how", "delay_ms"), [(signal.SIGKILL, 1), slow(signal.SIGTERM, 1), slow(signal.SIGINT, 0)])
def test_it_cleans_up_however_it_ends(how: signal.Signals, delay_ms: float, tmp_path: Path) -> None:
    lab = start("sh", "-c", f"echo $$ > {tmp_path}/$RANK; exec sleep 300", delay_ms=delay_ms)
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [pid for name in namespaces(lab.pid) for pid in pids_of(name)]
    lab.send_signal(how)
    lab.communicate(timeout=SECONDS)
    while (namespaces(lab.pid) or any(map(is_alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == (3 if delay_ms else 2)
    assert not namespaces(lab.pid)
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize(("found", "said"), [("/sbin/ip", "only root"), (None, "install iproute2")])
def test_without_root_or_its_tools_it_says_what_it_needs(found: Any, said: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(netlab.shutil, "which", lambda _: found)
    assert commands.main(["--", "true"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hosts", 0), ("mbit", -1), ("delay_ms", -1), ("delay_ms", float("nan")), ("loss", 1), ("loss", -0.1)],
)
def test_a_setting_that_cannot_be_is_refused(setting: str, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    said = f"{setting} must be at least .* not {value:g}"
    with pytest.raises(SettingError, match=said):
        Lab(**{"hosts": 2, setting: value})
    assert commands.main([f"--{setting.replace('_', '-')}={value}", "--", "true"]) == 1
    assert re.match(f"benchmarks.netlab: {said}", capsys.readouterr().err)
    if setting != "hosts":
        with pytest.raises(SettingError, match=said):
            run_processes(print, 2, **{setting: value})
