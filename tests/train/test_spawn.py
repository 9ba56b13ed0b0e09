"""Does a worker find its place, whatever started it, and is a wrong environment named?"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from typer.testing import CliRunner

from oktopk.errors import PeerError
from oktopk.train import cli
from oktopk.train import dist as place_module
from oktopk.train.cli import app
from oktopk.train.collectives import lost_peers_named
from oktopk.train.dist import HERE, STORE, Place, PlaceError
from oktopk.train.dist_env import PORTS, find_place, first_of_nodelist

ELASTIC = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {**ELASTIC, "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_4 = {**OPEN_MPI, "PMIX_NAMESPACE": "1978662913", "PMIX_RANK": "1", "OMPI_MCA_ess_base_jobid": "1978662913"}
OPEN_MPI_5 = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node1-7423@1", "PMIX_RANK": "1", "OMPI_VERSION": "5.0.11"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "11", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "b81d0000-8f7f-0239-5660-06008cd00063", "HYDRA_LAUNCH_TYPE": "2"}
BATCH = {  # a batch script that asked for three tasks on two nodes
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "3",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SRUN = {
    **BATCH,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "0,1,2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "node07",
    "SLURM_STEP_NODELIST": "node07",
}
SRUN_NODES = {
    **BATCH,
    "SLURM_PROCID": "2",
    "SLURM_GTIDS": "2",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
PALS = {
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_NODEID": "1",
    "PALS_APID": "5c1f-app",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PBS_JOBID": "12.server",
}
ONE_HOST = {"OPEN_MPI_4": OPEN_MPI_4, "OPEN_MPI_5": OPEN_MPI_5, "MPICH": MPICH, "INTEL": INTEL, "SRUN": SRUN}


@pytest.fixture
def nodefile(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("x3001\nx3001\nx3002\nx3002\n")
    return {"PBS_NODEFILE": str(path)}


@pytest.mark.parametrize(
    ("env", "launcher", "place"),
    [
        ({**ELASTIC, STORE: "x"}, "oktopk", (1, 4, 1, 2)),
        (TORCHRUN, "torchrun", (1, 4, 1, 2)),
        ({**TORCHRUN, **SRUN_NODES, **PALS}, "torchrun", (1, 4, 1, 2)),
        (OPEN_MPI_4, "mpirun (Open MPI)", (1, 2, 1, 2)),
        (OPEN_MPI_5, "mpirun (Open MPI)", (1, 2, 1, 2)),
        ({**SRUN, **OPEN_MPI_5}, "mpirun (Open MPI)", (1, 2, 1, 2)),
        (MPICH, "mpirun (MPICH)", (1, 2, 1, 2)),
        (INTEL, "mpirun (MPICH)", (1, 2, 1, 2)),
        ({**BATCH, "SLURM_STEP_ID": "0", **MPICH}, "mpirun (MPICH)", (1, 2, 1, 2)),
        (SRUN, "srun", (1, 3, 1, 3)),
        (SRUN_NODES, "srun", (2, 3, 0, 1)),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "13"}, "srun", (1, 3, 1, 3)),
        ({**SRUN, **PALS}, "srun", (1, 3, 1, 3)),
    ],
)
def test_a_worker_finds_its_place(env, launcher, place):
    found = find_place(env)
    assert found is not None
    assert found.launcher == launcher
    assert (found.rank, found.size, found.local_rank, found.local_size) == place


def test_a_worker_of_pals_finds_its_place(nodefile):
    place = find_place({**PALS, **nodefile})
    assert place == Place(
        launcher="mpiexec (PALS)", rank=5, size=8, local_rank=1, local_size=4, master_addr="x3001",
        master_port=place.master_port, job="5c1f-app",
    )  # fmt: skip
    older = {"PMI_LOCAL_SIZE" if name == "PALS_LOCAL_SIZE" else name: value for name, value in PALS.items()}
    assert find_place({**older, **nodefile}) == place


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "node1", "MASTER_PORT": "1"},
        BATCH,
        {**BATCH, "SLURM_STEP_ID": "4294967291"},
        {**BATCH, "SLURM_STEP_ID": "4294967290"},
        {"PBS_JOBID": "12.server", "PBS_NODEFILE": "/nowhere"},
    ],
)
def test_who_was_not_started_by_a_launcher_has_no_place(env):
    """The batch script is among these, and the shell that salloc opens: there, `--nproc` is the way."""
    assert find_place(env) is None


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN, "MASTER_PORT"),
        *[(ELASTIC | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, name) for name in ELASTIC],
        *[(OPEN_MPI_5, name) for name in OPEN_MPI],
        *[(MPICH, name) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")],
        *[(SRUN, name) for name in ("SLURM_NTASKS", "SLURM_LOCALID", "SLURM_GTIDS")],
        *[(PALS, name) for name in ("PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")],
    ],
)
def test_a_variable_that_is_missing_is_named(env, named):
    with pytest.raises(PlaceError, match=rf"\b{named}\b"):
        find_place({name: value for name, value in env.items() if name != named})


@pytest.mark.parametrize(
    ("env", "wrong", "value"),
    [
        (TORCHRUN, "RANK", "4"),
        (TORCHRUN, "RANK", "-1"),
        (TORCHRUN, "WORLD_SIZE", "two"),
        (TORCHRUN, "WORLD_SIZE", "0"),
        (TORCHRUN, "LOCAL_WORLD_SIZE", "5"),
        (TORCHRUN, "MASTER_PORT", "http"),
        (TORCHRUN, "MASTER_PORT", "65536"),
        (TORCHRUN, "MASTER_PORT", "0"),
        (TORCHRUN, "RANK", ""),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_RANK", "2"),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE", "\u0663"),
        (MPICH, "MPI_LOCALNRANKS", "0"),
        (SRUN, "SLURM_NTASKS", "1"),
        (PALS, "PMI_SIZE", "5"),
    ],
)
def test_a_variable_that_cannot_be_is_named(env, wrong, value):
    with pytest.raises(PlaceError, match=rf"\b{wrong}\b"):
        find_place({**env, wrong: value})


@pytest.mark.parametrize("name", ONE_HOST)
def test_on_one_host_rank_0_waits_on_its_loopback_at_the_jobs_own_port(name):
    place = find_place(ONE_HOST[name])
    assert place.master_addr == HERE
    assert place.master_port in PORTS
    assert place.on_one_host


def test_on_several_hosts_rank_0_waits_on_the_first(nodefile):
    several = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert find_place(SRUN_NODES).master_addr == "node07"
    assert find_place({**SRUN_NODES, "SLURM_STEP_NODELIST": "node[08,11]"}).master_addr == "node08"
    assert find_place({**OPEN_MPI_5, **several, "SLURM_JOB_NODELIST": "gpu1,gpu2"}).master_addr == "gpu1"
    assert find_place({**OPEN_MPI_5, **several, **nodefile}).master_addr == "x3001"


def test_an_unknown_first_host_is_asked_for(tmp_path):
    alone = {**MPICH, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    with pytest.raises(PlaceError, match="MASTER_ADDR and MASTER_PORT"):
        find_place(alone)
    with pytest.raises(PlaceError, match="MASTER_PORT is not set"):
        find_place({**alone, "MASTER_ADDR": "node1"})
    with pytest.raises(PlaceError, match=r"PBS_NODEFILE is .*/gone.*export MASTER_ADDR"):
        find_place({**PALS, "PBS_NODEFILE": str(tmp_path / "gone")})


@pytest.mark.parametrize("env", [*ONE_HOST.values(), SRUN_NODES, PALS])
def test_what_is_set_explicitly_wins(env):
    place = find_place({**env, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711"})
    assert (place.master_addr, place.master_port) == ("10.0.0.9", 4711)


def test_all_ranks_of_a_job_come_to_one_port_and_jobs_to_their_own(nodefile):
    def port(env, **changed):
        return find_place({**env, **nodefile, **changed}).master_port

    assert port(SRUN_NODES) == port(SRUN_NODES, SLURM_PROCID="0", SLURM_GTIDS="0,1")
    assert port(PALS) == port(PALS, PALS_RANKID="0", PALS_LOCAL_RANKID="0")
    assert port(INTEL) == port(INTEL, PMI_RANK="0", MPI_LOCALRANKID="0")
    assert port(MPICH) == port(MPICH, PMI_RANK="0", MPI_LOCALRANKID="0")
    others = [
        port(OPEN_MPI_5),
        port(OPEN_MPI_5, PMIX_NAMESPACE="prterun-node1-7424@1"),
        port(OPEN_MPI_4),
        port(SRUN_NODES),
        port(SRUN_NODES, SLURM_STEP_ID="4"),
        port(SRUN_NODES, SLURM_JOB_ID="78"),
        port(PALS),
        port(PALS, PALS_APID="other-app"),
        port(INTEL),
        port(MPICH),
    ]
    assert len(set(others)) == len(others)
    assert all(each in PORTS for each in others)


def test_a_script_around_a_worker_does_not_lead_it_elsewhere(tmp_path):
    """MPICH names no job: what all ranks of a host share is the process that started them, above any script."""
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.symlink_to(os.path.realpath("/bin/sh"))
    code = "from oktopk.train.dist_env import _launching_process as p; print(p())"
    inner = f"{sys.executable} -c '{code}'; exit 0"
    environment = {**os.environ, "PYTHONPATH": str(Path(place_module.__file__).parents[2])}
    process = subprocess.Popen(
        [proxy, "-c", f'/bin/sh -c "{inner}"; exit 0'], env=environment, stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=50)
    assert int(output) == process.pid


names = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z]", fullmatch=True)
numbers = st.integers(0, 9999).map(lambda number: f"{number:04d}")


@st.composite
def nodelists(draw):
    """SLURM's short forms, each with its first host."""
    name, first, last = draw(names), draw(numbers), draw(numbers)
    suffix = draw(st.one_of(st.just(""), names))
    form, host = draw(
        st.sampled_from(
            [
                (name, name),
                (f"{name}{first}", f"{name}{first}"),
                (f"{name}[{first}]{suffix}", f"{name}{first}{suffix}"),
                (f"{name}[{first}-{last}]{suffix}", f"{name}{first}{suffix}"),
                (f"{name}[{first},{last}]{suffix}", f"{name}{first}{suffix}"),
                (f"{name}[{first}-{last},{first}]{suffix}", f"{name}{first}{suffix}"),
                (f"{name}[{first}-{last}]x[{last}-{first}]", f"{name}{first}x{last}"),
            ]
        )
    )
    rest = draw(st.lists(st.one_of(names, st.just("b[1-2,7]")), max_size=3))
    return ",".join([form, *rest]), host


@given(nodelists())
def test_the_first_host_of_a_nodelist(case):
    nodes, host = case
    assert first_of_nodelist(nodes) == host


@pytest.mark.parametrize("nodes", ["", "[", "]", ",a", " ", "[]"])
def test_a_nodelist_that_is_none(nodes):
    with pytest.raises(PlaceError, match="set MASTER_ADDR"):
        first_of_nodelist(nodes)


@given(st.text(max_size=20))
def test_whatever_a_nodelist_says_the_host_is_part_of_it_or_it_is_refused(nodes):
    try:
        host = first_of_nodelist(nodes)
    except PlaceError:
        return
    assert host
    assert not re.search(r"[\[\],\s]", host)


def free_port():
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


def stores(size=2, address=HERE, job="one", timeout_s=5.0):
    """Return the places of a job that meets through TCP, and the timeout of its store."""
    port = free_port()
    places = [
        Place(launcher="mpirun (MPICH)", rank=rank, size=size, local_size=size, master_addr=address, master_port=port,
              job=job)
        for rank in range(size)
    ]  # fmt: skip
    return places, timedelta(seconds=timeout_s)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
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


def test_workers_hand_each_other_what_they_say():
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
    (first, _), timeout = stores(timeout_s=2)
    kept = first._store(timeout)
    intruder = Place(**{**vars(first), "rank": 1, "job": "another"})
    store = intruder._store(timeout)
    store.set("oktopk/told/1", "I am of another job")
    assert not kept.check(["oktopk/told/1"])
    with pytest.raises(PeerError, match=r"rank 0 cannot listen on .*MASTER_PORT"):
        Place(**{**vars(first), "job": "another"})._store(timeout)


def test_a_rank_that_does_not_come_is_named():
    (first, _), _ = stores()
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(PeerError, match=r"rank 1 of 2 did not come within 0\.2 s"):
        first._tell(store, None, 0.2)


def test_a_rank_0_that_has_left_is_named():
    """At once, and not when the time is over."""
    (first, second), timeout = stores(timeout_s=30)
    kept = [first._store(timeout)]
    store = second._store(timeout)
    threading.Timer(0.5, kept.clear).start()
    with pytest.raises(PeerError, match="rank 0, through which all ranks meet, has left"):
        second._tell(store, None, 30)


def test_a_rank_0_that_is_not_there_is_named():
    (_, second), timeout = stores(timeout_s=1)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=rf"rank 1 cannot reach rank 0 at 127\.0\.0\.1:{second.master_port} within 1 s"):
        second._store(timeout)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_nobody_knows_is_named_at_once(rank):
    places, timeout = stores(address="no-such-host.invalid")
    with pytest.raises(PlaceError, match=rf"no-such-host\.invalid.*rank {rank}.*set MASTER_ADDR"):
        places[rank]._store(timeout)


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_other_machines_on_a_loopback(rank):
    places, timeout = stores()
    with pytest.raises(PlaceError, match=rf"127\.0\.0\.1 on the host of rank {rank}.*: set MASTER_ADDR"):
        Place(**{**vars(places[rank]), "local_size": 1})._store(timeout)


def test_a_worker_ends_when_its_starter_is_gone(tmp_path):
    """Killed at once, the starter cannot end its workers; they look after it."""
    code = (
        "import os, subprocess, sys, time; os.environ['OKTOPK_STARTER'] = str(os.getpid());"
        "p = subprocess.Popen([sys.executable, '-c', 'import os, time; from oktopk.train import dist;"
        'dist._end_with(int(os.environ["OKTOPK_STARTER"]))\']); print(p.pid, flush=True); time.sleep(60)'
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(place_module.__file__).parents[2])}
    starter = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    worker = int(starter.stdout.readline())
    time.sleep(0.5)
    starter.send_signal(signal.SIGKILL)
    _, said = starter.communicate(timeout=40)  # the pipe closes when the worker has ended, too
    assert f"worker {worker}: oktopk train, which started it, is gone" in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[/src/gloo/tcp/pair.cc:537] Read error [127.0.0.1]:2: Connection reset by peer. This is typically Y",
         "another rank died, left or was cut off: Read error [127.0.0.1]:2: Connection reset by peer"),
        ("Got the following error when running the callback: PeerError: rank 1: ValueError: enough\n\nAt:\n  a.py",
         "rank 1: ValueError: enough"),
        ("NCCL error in: x.cpp:1, remote process exited",
         "another rank died, left or was cut off: NCCL error in: x.cpp:1"),
    ],
)  # fmt: skip
def test_a_lost_peer_is_told_in_a_line(text, told):
    with pytest.raises(PeerError) as caught, lost_peers_named():
        raise RuntimeError(text)
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), RuntimeError(), PlaceError("gloo/"), KeyError(1)])
def test_a_bug_is_not_taken_for_a_lost_peer(error):
    with pytest.raises(type(error)) as caught, lost_peers_named():
        raise error
    assert caught.value is error


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_a_worker_has_its_share_of_the_cores(mine, more, local_size):
    """Bound by its launcher to some of the launcher's cores it uses those, and never more than its share of all."""
    assume(mine <= more)
    place = Place(launcher="srun", size=64, local_size=local_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place_module, "_num_cores", lambda process: more if process else mine)
        bound = place.num_cores()
        ours = Place(launcher="oktopk", size=64, local_size=local_size).num_cores()
    assert 1 <= bound <= mine
    assert bound == max(1, min(mine, more // local_size))
    assert ours == max(1, mine // local_size)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        ([None, None], "gloo"),
        (["host a", "host b"], "cpu:gloo,cuda:nccl"),
        (["host a", "host a"], "gloo"),
        (["host a", None], "gloo"),
    ],
)
def test_nccl_is_taken_where_every_worker_has_a_gpu_of_its_own(monkeypatch, gpus, backend):
    """As each worker names its GPU, not as it counts them: under srun each may see one, which is another's first."""
    taken = []
    monkeypatch.setattr(Place, "_store", lambda *_: HashStore())
    monkeypatch.setattr(Place, "_tell", lambda *_: gpus)
    monkeypatch.setattr(place_module.dist, "init_process_group", lambda backend, **_: taken.append(backend))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth9")
    Place(launcher="srun", size=2, local_size=2).join(1, torch.device("cpu"))
    assert taken == [backend]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"


def test_on_one_host_gloo_and_nccl_stay_on_the_loopback(monkeypatch):
    monkeypatch.setattr(place_module.dist, "init_process_group", lambda *_, **__: None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(Place, "_store", lambda *_: HashStore())
    monkeypatch.setattr(Place, "_tell", lambda *_: [None, None])
    Place(launcher="srun", size=2, local_size=1).join(1, torch.device("cpu"))
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    Place(launcher="srun", size=2, local_size=2).join(1, torch.device("cpu"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == place_module.LOOPBACK


SCRIPTS = sorted((Path(__file__).parents[2] / "examples" / "launch").glob("*.sh"))


def test_there_are_scripts_for_slurm_and_pbs():
    assert [script.name for script in SCRIPTS] == ["pbs.sh", "slurm.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_flags_of_the_scripts_exist(script):
    code = "\n".join(line for line in script.read_text().splitlines() if not line.startswith("#"))
    _, _, arguments = code.replace("\\\n", " ").partition("oktopk train")
    flags = set(re.findall(r"--[a-z][a-z-]*", arguments.splitlines()[0]))
    command = typer.main.get_command(app)
    known = {flag for parameter in command.commands["train"].params for flag in parameter.opts}
    assert len(flags) > 5
    assert flags <= known


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_scripts_start_what_they_say(script, tmp_path):
    """Run with stand-ins for srun, mpiexec and oktopk: what would have been started, and with which master."""
    nodes = tmp_path / "nodes"
    nodes.write_text("x1\nx1\nx2\nx2\n")
    for name in ("srun", "mpiexec"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" from "$MASTER_ADDR:$MASTER_PORT"\n')
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA_DIR": "d", "SLURM_JOB_ID": "77", "PBS_JOBID": "123[4].pbs"}
    env |= {"PBS_NODEFILE": str(nodes), "PBS_O_WORKDIR": str(tmp_path)}
    bash = ["bash", str(script)]
    done = subprocess.run(bash, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    if script.name == "pbs.sh":
        assert done.stdout.startswith("mpiexec -n 8 --ppn 4 ")
        assert done.stdout.endswith("from x1:20123\n")
    else:
        assert done.stdout.startswith("srun --kill-on-bad-exit=1 oktopk train")
    without = {name: value for name, value in env.items() if name != "DATA_DIR"}
    done = subprocess.run(bash, env=without, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0
    assert "say where the data is" in done.stderr


@pytest.mark.parametrize(("size", "asked", "starts"), [("1", "2", 2), ("1", "1", None), ("1", None, None)])
def test_the_only_task_of_a_job_may_start_workers(monkeypatch, size, asked, starts):
    """As in the shell that `srun --pty bash` opens: that one place is no reason to refuse --nproc."""
    env = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": size, "SLURM_GTIDS": "0"}
    monkeypatch.setattr(cli, "os", SimpleNamespace(environ=env))
    started, worked = [], []
    monkeypatch.setattr(cli, "_start", lambda _, workers, __: started.append(workers))
    monkeypatch.setattr(cli, "work", lambda _, place: worked.append(place.size))
    ran = CliRunner().invoke(app, ["train", *(["--nproc", asked] if asked else [])])
    assert ran.exit_code == 0, ran.output
    assert (started, worked) == (([starts], []) if starts else ([], [1]))


def test_other_numbers_of_workers_are_refused_under_a_launcher(monkeypatch):
    monkeypatch.setattr(cli, "os", SimpleNamespace(environ=SRUN))
    ran = CliRunner().invoke(app, ["train", "--nproc", "2"])
    assert ran.exit_code == 2
    assert "srun started 3 workers: leave --nproc 2 out" in ran.output
