"""Do workers meet where they were told to, and is a rank that does not come named?"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from oktopk.errors import PeerError
from oktopk.train import dist
from oktopk.train.dist import HERE, Place, PlaceError


def stores(size=2, address=HERE, timeout_s=5.0):
    """Return the places of a job that meets through TCP, and the timeout of its store."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port = probe.getsockname()[1]
    first = Place(
        launcher="mpirun (MPICH)", size=size, local_size=size, master_addr=address, master_port=port, job="one"
    )
    return [replace(first, rank=rank) for rank in range(size)], timedelta(seconds=timeout_s)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")
@pytest.mark.parametrize("address", ["127.0.0.2", "localhost"])
def test_rank_0_listens_on_the_address_that_was_named_and_on_no_other(address):
    (first, _), timeout = stores(address=address)
    store = first._store(timeout)
    socket.create_connection((address, first.master_port), timeout=5).close()
    others = {"127.0.0.1", "127.0.0.2", "127.0.0.3", *addresses_of_this_machine()} - {socket.gethostbyname(address)}
    for other in others:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, first.master_port), timeout=5)
    del store


def addresses_of_this_machine():
    """Return the addresses with which this machine would talk to others; nothing is sent."""
    found = set()
    for family, elsewhere in ((socket.AF_INET, "192.0.2.77"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))
                found.add(probe.getsockname()[0])
        except OSError:  # it talks to nobody in this family
            continue
    return found


def test_workers_hand_each_other_their_words():
    places, timeout = stores(size=3)
    said, kept = {}, []

    def meet(place):
        store = place._store(timeout)
        kept.append(store)  # rank 0's has to stay until all have heard
        said[place.rank] = place._tell(store, f"gpu {place.rank}" if place.rank else None, 5)

    threads = [threading.Thread(target=meet, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said == {rank: [None, "gpu 1", "gpu 2"] for rank in range(3)}


def test_jobs_that_come_to_one_port_do_not_meet():
    (first, second), timeout = stores(timeout_s=2)
    kept = first._store(timeout)
    store = replace(second, job="another")._store(timeout)
    store.set("oktopk/told/1", "I am of another job")
    assert not kept.check(["oktopk/told/1"])
    with pytest.raises(PeerError, match=r"rank 0 cannot listen on .*MASTER_PORT"):
        replace(first, job="another")._store(timeout)


def test_a_rank_that_does_not_come_is_named():
    (first, _), _ = stores()
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(PeerError, match=r"rank 1 of 2 did not come within 0\.2 s"):
        first._tell(store, None, 0.2)


def test_a_rank_0_that_has_left_is_named():
    """At once, and not after the timeout."""
    (first, second), timeout = stores(timeout_s=30)
    kept = [first._store(timeout)]
    store = second._store(timeout)
    threading.Timer(0.2, kept.clear).start()
    with pytest.raises(PeerError, match="rank 0, through which all ranks meet, has left"):
        second._tell(store, None, 30)


def test_a_rank_0_that_is_not_there_is_named():
    (_, second), timeout = stores(timeout_s=1)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=rf"rank 1 cannot reach rank 0 at 127\.0\.0\.1:{second.master_port} within 1 s"):
        second._store(timeout)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_cannot_be_reached_is_named_at_once(rank):
    unknown, timeout = stores(address="no-such-host.invalid")
    with pytest.raises(PlaceError, match=rf"no-such-host\.invalid.*rank {rank}.*set MASTER_ADDR"):
        unknown[rank]._store(timeout)
    loopback, _ = stores()
    with pytest.raises(PlaceError, match=rf"127\.0\.0\.1 on the host of rank {rank}.*: set MASTER_ADDR"):
        replace(loopback[rank], local_size=1)._store(timeout)


def test_a_worker_ends_when_its_starter_is_gone():
    """A starter that is killed cannot end its workers; they look after it."""
    worker = 'from oktopk.train import dist; dist._end_with(int(os.environ["OKTOPK_STARTER"]))'
    code = (
        "import os, subprocess, sys, time; os.environ['OKTOPK_STARTER'] = str(os.getpid());"
        f"p = subprocess.Popen([sys.executable, '-c', 'import os; {worker}']); print(p.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(dist.__file__).parents[2])}
    starter = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process = int(starter.stdout.readline())
    starter.send_signal(signal.SIGKILL)
    _, said = starter.communicate(timeout=40)  # the pipe closes when the worker has ended, too
    assert f"worker {process}: oktopk train, which started it, is gone" in said


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_a_worker_has_its_share_of_the_cores(mine, more, local_size):
    """Bound by its launcher to some of the launcher's cores it uses those, and never more than its share of all."""
    assume(mine <= more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_num_cores", lambda process: more if process else mine)
        bound = Place(launcher="srun", size=64, local_size=local_size).num_cores()
        ours = Place(launcher="oktopk", size=64, local_size=local_size).num_cores()
    assert bound == max(1, min(mine, more // local_size))
    assert ours == max(1, mine // local_size)


@pytest.fixture
def joined(monkeypatch):
    """Return what joins without others, and gives the backend."""
    backends = []
    monkeypatch.setattr(Place, "_store", lambda *_: HashStore())
    monkeypatch.setattr(dist.dist, "init_process_group", lambda backend, **_: backends.append(backend))

    def join(gpus, local_size=2):
        monkeypatch.setattr(Place, "_tell", lambda *_: gpus)
        Place(launcher="srun", size=2, local_size=local_size).join(1, torch.device("cpu"))
        return backends[-1]

    return join


def test_nccl_is_taken_where_every_worker_has_a_gpu_of_its_own(joined, monkeypatch):
    """As each worker names its GPU, not as it counts them: under srun each may see one, which is another's first."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth9")
    assert joined([None, None]) == joined(["host a", "host a"]) == joined(["host a", None]) == "gloo"
    assert joined(["host a", "host b"]) == "cpu:gloo,cuda:nccl"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"


def test_on_one_host_gloo_and_nccl_stay_on_the_loopback(joined, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    joined([None, None], local_size=1)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    joined([None, None])
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == dist.LOOPBACK
