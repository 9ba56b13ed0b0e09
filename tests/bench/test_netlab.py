"""The laboratory's network: as fast as it says, cut off from the world, and gone when its command is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import netlab as commands
from oktopk.bench import netlab
from oktopk.bench.netlab import Lab, LabError, sent_bytes
from oktopk.bench.processes import run_processes
from oktopk.errors import PeerError, SettingError

ROOT = Path(__file__).parents[2]
SECONDS = 50


def can_make_one() -> str:
    """Return why no network can be made here; nothing if one can."""
    try:
        with Lab(1, mbit=100):
            return ""
    except LabError as error:
        return str(error)


needs_a_lab = pytest.mark.skipif(bool(why := can_make_one()), reason=why)


def namespaces(pid: int) -> list[str]:
    """Return what there is of the laboratory of that process: others may have theirs."""
    return [path.name for path in Path("/run/netns").glob(f"oklab{pid}-*")]


def transfer(num_bytes: int) -> dict[str, float]:
    """Send to the next rank and receive from the one before, at the same time."""
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
@pytest.mark.parametrize("mbit", [20, 80, 300])
def test_a_link_is_as_fast_as_it_says_in_both_directions_at_once(mbit: int) -> None:
    num_bytes = 3 * mbit * 125_000  # three seconds' worth
    for rank in run_processes(transfer, 2, num_bytes, mbit=mbit):
        assert 0.9 < 8e-6 * rank["sent"] / rank["seconds"] / mbit < 1.1
        assert num_bytes < rank["sent"] < 1.1 * num_bytes


@needs_a_lab
@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("mbit", [20, 300])
def test_a_link_with_delay_is_as_fast_as_it_says(mbit: int) -> None:
    num_bytes = 3 * mbit * 125_000
    for rank in run_processes(transfer, 2, num_bytes, mbit=mbit, delay_ms=5):
        assert 0.85 < 8e-6 * rank["sent"] / rank["seconds"] / mbit < 1.1
        assert num_bytes < rank["sent"] < 1.1 * num_bytes


ECHO = """
import os, socket, sys, time
end, other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), ("10.77.0.2", 7000)
end.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE: datagrams get lost on the way, not here
end.bind(("", 7000))
end.settimeout(30)
if os.environ["RANK"] == "1":
    while (said := end.recvfrom(9))[0] != b"end":
        end.sendto(*said)
    sys.exit()
end.settimeout(0.5)
said = None
while said is None:
    end.sendto(b"hello", other)
    try:
        said = end.recv(9)
    except TimeoutError:
        pass
"""

FASTEST_ROUND_TRIP = """
end.settimeout(30)
seconds = []
for i in range(10):
    start = time.perf_counter()
    end.sendto(b"%d" % i, other)
    while end.recv(9) != b"%d" % i:
        pass
    seconds.append(time.perf_counter() - start)
print(min(seconds))
"""

NUM_BACK = """
for i in range(2000):
    end.sendto(b"%d" % i, other)
    time.sleep(0.003 * (i % 10 == 9))
end.settimeout(3)
num_back = 0
try:
    while True:
        num_back += end.recv(9) != b"hello"
except TimeoutError:
    print(num_back)
"""

END = """
for _ in range(30):
    end.sendto(b"end", other)
"""


def ask(question: str, capfd: pytest.CaptureFixture[str], **settings: float) -> float:
    """Return what rank 0 prints, with rank 1 sending back what it gets."""
    with Lab(2, **settings) as lab:
        commands.run(lab, [sys.executable, "-c", ECHO + question + END], timeout_s=SECONDS)
    return float(capfd.readouterr().out)


@needs_a_lab
def test_a_round_trip_takes_twice_the_delay(capfd: pytest.CaptureFixture[str]) -> None:
    assert 0.080 <= ask(FASTEST_ROUND_TRIP, capfd, delay_ms=40) < 0.150


@needs_a_lab
@pytest.mark.long
def test_the_share_that_gets_lost_is_the_one_set(capfd: pytest.CaptureFixture[str]) -> None:
    # Each of 2000 gets there and back with 0.8 * 0.8: 1280, with a standard deviation of 21.
    assert 1150 < ask(NUM_BACK, capfd, loss=0.2) < 1410


def sum_with_losses(numel: int) -> dict[str, float]:
    block = torch.arange(numel, dtype=torch.float64) * (dist.get_rank() + 1)
    dist.all_reduce(block)
    wrong = block != 3 * torch.arange(numel, dtype=torch.float64)
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if "Tcp:" in line)
    return {"wrong": int(wrong.sum()), "again": int(values[names.index("RetransSegs")])}


@needs_a_lab
@pytest.mark.slow
def test_losses_are_made_good() -> None:
    ranks = run_processes(sum_with_losses, 2, 1_000_000, loss=0.01)
    assert [rank["wrong"] for rank in ranks] == [0, 0]
    assert all(rank["again"] > 20 for rank in ranks)  # each sends 8 MB or more, 5525 packets: 55 are lost


def end_the_switch() -> None:
    if dist.get_rank() == 0:
        os.kill(pids_of(f"oklab{os.getppid()}-switch")[0], signal.SIGKILL)
    time.sleep(300)


@needs_a_lab
@pytest.mark.slow
def test_processes_end_with_the_switch() -> None:
    with pytest.raises(LabError, match="the switch ended with -9"):
        run_processes(end_the_switch, 2, delay_ms=1)
    assert not namespaces(os.getpid())


def pids_of(namespace: str) -> list[int]:
    said = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in said.split()]


@needs_a_lab
def test_a_switch_that_ends_ends_all_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    switch = tmp_path / "switch.py"
    switch.write_text("import sys, time\nprint('ready', flush=True)\ntime.sleep(1)\nsys.exit('no more current')")
    monkeypatch.setattr(netlab, "SWITCH", switch)
    with Lab(2, delay_ms=1) as lab, pytest.raises(LabError, match="ended with 1\nno more current"):
        commands.run(lab, ["sleep", "300"])


@needs_a_lab
def test_a_switch_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(netlab, "SWITCH", tmp_path / "none.py")
    with pytest.raises(LabError, match=r"none\.py"), Lab(2, delay_ms=1):
        pass
    assert not namespaces(os.getpid())


def reach_outside() -> str:
    with socket.socket() as probe:
        probe.settimeout(2)
        try:
            probe.connect(("192.0.2.1", 9))  # an address of nobody's
        except OSError as error:
            return type(error).__name__ + str(error)
    return "reached"


@needs_a_lab
def test_nothing_outside_can_be_reached() -> None:
    assert all("unreachable" in said for said in run_processes(reach_outside, 2, mbit=0))


@needs_a_lab
def test_two_laboratories_do_not_meet() -> None:
    with Lab(1) as one:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "from oktopk.bench.netlab import Lab\n"
            "with Lab(1) as lab: print(lab.hosts[0].name)"
        )
        other = subprocess.run([sys.executable, "-c", code, ROOT], capture_output=True, text=True, timeout=SECONDS)
        assert other.returncode == 0, other.stderr
        assert other.stdout.strip() != one.hosts[0].name
        assert one.hosts[0].name in namespaces(os.getpid())


def start(*command: str, delay_ms: float = 0.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.netlab", "--hosts", "2", "--delay-ms", str(delay_ms), "--", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    )


@needs_a_lab
def test_the_command_sees_what_torchrun_would_tell_it() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"]
    show = f"import json, os; print(json.dumps({{n: os.environ[n] for n in {names}}}))"
    lab = start(sys.executable, "-c", show)
    output, errors = lab.communicate(timeout=SECONDS)
    assert json.loads(output) == dict(zip(names, ["0", "2", "0", "10.77.0.1", "29500", "eth0"], strict=True)), errors
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


@needs_a_lab
@pytest.mark.parametrize("delay_ms", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
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


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_without_root_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(netlab.shutil, "which", lambda tool: f"/sbin/{tool}")
    assert commands.main(["--", "true"]) == 1
    assert "only root" in capsys.readouterr().err


def test_without_its_tools_it_names_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(netlab.shutil, "which", lambda _: None)
    assert commands.main(["--", "true"]) == 1
    assert "install iproute2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value"),
    [("hosts", 0), ("mbit", -1), ("delay_ms", -1), ("delay_ms", float("nan")), ("loss", 1), ("loss", -0.1)],
)
def test_a_setting_that_cannot_be_is_refused(setting: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"{value:g}"):
        Lab(**{"hosts": 2, setting: value})


@pytest.mark.parametrize("option", ["--delay-ms=-1", "--loss=1.5"])
def test_so_is_an_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([option, "--", "true"]) == 1
    assert capsys.readouterr().err.startswith(f"benchmarks.netlab: {option[2:6]}")


def test_processes_pass_on_what_they_are_given() -> None:
    with pytest.raises(SettingError, match="loss"):
        run_processes(print, 2, loss=2)
    with pytest.raises(SettingError, match="delay_ms"):
        run_processes(print, 2, delay_ms=-2)


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(PeerError, match=r"rank \d was killed, most likely for want of memory"):
        run_processes(kill_oneself, 1)
