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

from oktopk.bench import netlab
from oktopk.bench.netlab import Lab, LabError, sent_bytes
from oktopk.bench.processes import run_processes

ROOT = Path(__file__).parents[1]
SECONDS = 50


def can_make_one() -> str:
    """Return why no network can be made here; nothing if one can."""
    try:
        with Lab(1, mbit=100):
            return ""
    except LabError as error:
        return str(error)


needs_a_lab = pytest.mark.skipif(bool(why := can_make_one()), reason=why)


def namespaces() -> list[str]:
    return (
        [name for name in os.listdir("/run/netns") if name.startswith("oklab")] if Path("/run/netns").exists() else []
    )


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
@pytest.mark.slow  # where nothing else runs: it is a measurement
@pytest.mark.parametrize("mbit", [20, 80, 300])
def test_a_link_is_as_fast_as_it_says_in_both_directions_at_once(mbit: int) -> None:
    num_bytes = 3 * mbit * 125_000  # three seconds' worth
    for rank in run_processes(transfer, 2, num_bytes, mbit=mbit):
        assert 0.9 < 8e-6 * rank["sent"] / rank["seconds"] / mbit < 1.1
        assert num_bytes < rank["sent"] < 1.1 * num_bytes


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
        assert one.hosts[0].name in namespaces()


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.netlab", "--hosts", "2", "--", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_a_lab
def test_the_command_sees_what_torchrun_would_tell_it() -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"]
    show = f"import json, os; print(json.dumps({{n: os.environ[n] for n in {names}}}))"
    output, errors = start(sys.executable, "-c", show).communicate(timeout=SECONDS)
    assert json.loads(output) == dict(zip(names, ["0", "2", "0", "10.77.0.1", "29500", "eth0"], strict=True)), errors
    assert not namespaces()


@needs_a_lab
def test_a_rank_that_fails_ends_all_with_its_words() -> None:
    fail = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('rank one is out')\ntime.sleep(40)"
    lab = start(sys.executable, "-c", fail)
    _, errors = lab.communicate(timeout=SECONDS)
    assert lab.returncode == 1
    assert "rank one is out" in errors
    assert not namespaces()


@needs_a_lab
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_cleans_up_however_it_ends(how: signal.Signals, tmp_path: Path) -> None:
    lab = start("sh", "-c", f"echo $$ > {tmp_path}/$RANK; exec sleep 300")
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    lab.send_signal(how)
    lab.communicate(timeout=SECONDS)
    while (namespaces() or any(map(is_alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not namespaces()
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
    assert netlab.main(["--", "true"]) == 1
    assert "only root" in capsys.readouterr().err


def test_without_its_tools_it_names_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(netlab.shutil, "which", lambda _: None)
    assert netlab.main(["--", "true"]) == 1
    assert "install iproute2" in capsys.readouterr().err
