import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from oktopk.errors import PeerError
from oktopk.train import dist
from oktopk.train.dist import HERE, PORTS, STORE, Place, PlaceError, find_place, first_of_nodelist

OUR_PATH = {**os.environ, "PYTHONPATH": str(Path(dist.__file__).parents[2])}


def variables(text, prefix=""):
    """Return {"A": "1", "B": "2"} for "A=1 B=2", each name behind the prefix."""
    return {prefix + name: value for name, value in (pair.split("=") for pair in text.split())}


ELASTIC = variables("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
SAID = variables("MASTER_ADDR=10.0.0.9 MASTER_PORT=4711")
TORCHRUN = ELASTIC | SAID
OPEN_MPI = variables("RANK=1 SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2", "OMPI_COMM_WORLD_")
OPEN_MPI_4 = OPEN_MPI | variables("PMIX_NAMESPACE=1978662913 PMIX_RANK=1 OMPI_MCA_ess_base_jobid=1978662913")
OPEN_MPI_5 = OPEN_MPI | variables("PMIX_NAMESPACE=prterun-node1-7423@1 PMIX_RANK=1 OMPI_VERSION=5.0.11")
MPICH = variables("PMI_RANK=1 PMI_SIZE=2 PMI_FD=11 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
INTEL = MPICH | variables("I_MPI_HYDRA_UUID=b81d0000-8f7f-0239-5660-06008cd00063 HYDRA_LAUNCH_TYPE=2")
BATCH = variables(  # a batch script that asked for three tasks on two nodes
    "PROCID=0 LOCALID=0 GTIDS=0 NTASKS=3 NODEID=0 JOB_ID=77 JOB_NODELIST=node[07-08] TASKS_PER_NODE=2,1", "SLURM_"
)
SRUN = BATCH | variables("PROCID=1 LOCALID=1 GTIDS=0,1,2 STEP_ID=0 JOB_NODELIST=node07 STEP_NODELIST=node07", "SLURM_")
SRUN_NODES = BATCH | variables("PROCID=2 GTIDS=2 STEP_ID=3 STEP_NODELIST=node[07-08]", "SLURM_")
PALS = variables("RANKID=5 LOCAL_RANKID=1 LOCAL_SIZE=4 NODEID=1 APID=5c1f-app", "PALS_")
PALS |= variables("PMI_RANK=5 PMI_SIZE=8 PBS_JOBID=12.server")
OLD_PALS = {name.replace("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"): value for name, value in PALS.items()}


@pytest.fixture
def nodefile(tmp_path):
    (tmp_path / "nodes").write_text("x3001\nx3001\nx3002\nx3002\n")
    return {"PBS_NODEFILE": str(tmp_path / "nodes")}


PLACES = {
    ("oktopk", 1, 4, 1, 2): [ELASTIC | {STORE: "x"}],
    ("torchrun", 1, 4, 1, 2): [TORCHRUN, SRUN_NODES | PALS | TORCHRUN],
    ("mpirun (Open MPI)", 1, 2, 1, 2): [OPEN_MPI_4, SRUN | OPEN_MPI_5],
    ("mpirun (MPICH)", 1, 2, 1, 2): [MPICH, INTEL, BATCH | {"SLURM_STEP_ID": "0"} | MPICH],
    ("srun", 1, 3, 1, 3): [SRUN, SRUN | variables("PMI_RANK=1 PMI_SIZE=3 PMI_FD=13"), SRUN | PALS],
    ("srun", 2, 3, 0, 1): [SRUN_NODES],
    ("mpiexec (PALS)", 5, 8, 1, 4): [PALS | SAID, OLD_PALS | SAID],
}


@pytest.mark.parametrize(("place", "env"), [(place, env) for place, envs in PLACES.items() for env in envs])
def test_a_worker_finds_its_place_and_rank_0_waits_where_the_user_says_or_on_the_loopback(place, env):
    found = find_place(env)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == place
    if found.launcher != "oktopk":
        said = find_place(env | SAID)
        assert (said.master_addr, said.master_port) == ("10.0.0.9", 4711)
        if found.on_one_host:
            assert (found.master_addr, found.master_port in PORTS) == (HERE, True)


def test_a_process_that_no_launcher_started_has_no_place():
    """The batch script is among these, and the shell that salloc opens: there, `--nproc` starts the workers."""
    shells = [BATCH | {"SLURM_STEP_ID": number} for number in ("4294967291", "4294967290")]
    for env in ({}, SAID, BATCH, *shells, {"PBS_JOBID": "12.server", "PBS_NODEFILE": "/nowhere"}):
        assert find_place(env) is None


PORT = "MASTER_PORT=http MASTER_PORT=65536 MASTER_PORT=0"
WRONG = [  # variables that are missing, or that have an impossible value
    (TORCHRUN, f"{' '.join(TORCHRUN)} RANK= RANK=4 RANK=-1 WORLD_SIZE=two WORLD_SIZE=0 LOCAL_WORLD_SIZE=5 {PORT}"),
    (OPEN_MPI, f"{' '.join(OPEN_MPI)} OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_SIZE=\u0663"),
    (MPICH, "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS MPI_LOCALNRANKS=0"),
    (SRUN, "SLURM_NTASKS SLURM_LOCALID SLURM_GTIDS SLURM_NTASKS=1"),
    (PALS, "PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE PMI_SIZE=5"),
]


@pytest.mark.parametrize(("env", "wrong"), [(env, wrong) for env, each in WRONG for wrong in each.split()])
def test_a_missing_or_impossible_variable_is_named(env, wrong):
    name, equals, value = wrong.partition("=")
    others = {key: env[key] for key in env if key != name}
    with pytest.raises(PlaceError, match=rf"\b{name}\b"):
        find_place({**others, name: value} if equals else others)


def test_on_several_hosts_rank_0_waits_on_the_first_and_one_that_is_unknown_is_asked_for(nodefile):
    several = OPEN_MPI_5 | variables("OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1")
    assert find_place(SRUN_NODES).master_addr == "node07"
    assert find_place(SRUN_NODES | {"SLURM_STEP_NODELIST": "node[08,11]"}).master_addr == "node08"
    assert find_place(several | {"SLURM_JOB_NODELIST": "gpu1,gpu2"}).master_addr == "gpu1"
    assert find_place(several | nodefile).master_addr == find_place(PALS | nodefile).master_addr == "x3001"
    for env, words in (
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "node1"}, "MASTER_PORT is not set"),
        ({"PBS_NODEFILE": "/gone"}, "PBS_NODEFILE is /gone.*export MASTER_ADDR"),
        *[({"SLURM_JOB_NODELIST": nodes}, "set MASTER_ADDR") for nodes in ("[", "]", ",a", " ", "[]")],
    ):
        with pytest.raises(PlaceError, match=words):
            find_place(MPICH | variables("MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1") | env)


def test_all_ranks_of_a_job_come_to_one_port_and_jobs_to_their_own(nodefile):
    def port(env, changed=""):
        return find_place(env | nodefile | variables(changed)).master_port

    assert port(SRUN_NODES) == port(SRUN_NODES, "SLURM_PROCID=0 SLURM_GTIDS=0,1")
    assert port(PALS) == port(PALS, "PALS_RANKID=0 PALS_LOCAL_RANKID=0")
    assert port(INTEL) == port(INTEL, "PMI_RANK=0 MPI_LOCALRANKID=0")
    assert port(MPICH) == port(MPICH, "PMI_RANK=0 MPI_LOCALRANKID=0")
    others = [port(env) for env in (OPEN_MPI_4, OPEN_MPI_5, SRUN_NODES, PALS, INTEL, MPICH)]
    others += [port(OPEN_MPI_5, "PMIX_NAMESPACE=prterun-node1-7424@1"), port(PALS, "PALS_APID=other-app")]
    others += [port(SRUN_NODES, "SLURM_STEP_ID=4"), port(SRUN_NODES, "SLURM_JOB_ID=78")]
    assert len(set(others)) == len(others)
    assert set(others) <= set(PORTS)


@pytest.mark.slow
def test_a_script_around_a_worker_does_not_lead_it_elsewhere(tmp_path):
    """MPICH names no job: all ranks of a host share the process that started them, above any script."""
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.symlink_to(os.path.realpath("/bin/sh"))
    code = "from oktopk.train.dist import _launching_process as p; print(p())"
    command = [proxy, "-c", f"/bin/sh -c \"{sys.executable} -c '{code}'; exit 0\"; exit 0"]
    process = subprocess.Popen(command, env=OUR_PATH, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=50)
    assert int(output) == process.pid


names = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z]", fullmatch=True)
numbers = st.integers(0, 9999).map(lambda number: f"{number:04d}")


@given(names, numbers, numbers, st.just("") | names, st.lists(names | st.just("b[1-2,7]"), max_size=3))
def test_the_first_host_of_a_nodelist(name, first, last, suffix, rest):
    ranges = (first, f"{first}-{last}", f"{first},{last}", f"{first}-{last},{first}")
    forms = {f"{name}[{each}]{suffix}": f"{name}{first}{suffix}" for each in ranges}
    forms |= {name: name, f"{name}{first}": f"{name}{first}"}
    forms[f"{name}[{first}-{last}]x[{last}-{first}]"] = f"{name}{first}x{last}"
    for form, host in forms.items():
        assert first_of_nodelist(",".join([form, *rest])) == host


@given(st.text("ab1-,[] \n") | st.text())
def test_any_other_nodelist_gives_a_name_or_is_refused(nodes):
    with suppress(PlaceError):
        assert re.fullmatch(r"[^\[\],\s]+", first_of_nodelist(nodes))


def stores(size=2, address=HERE, timeout_s=5.0):
    """Return the places of a job that meets through TCP, and the timeout of its store."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        port = probe.getsockname()[1]
    first = Place(launcher="mpirun (MPICH)", size=size, local_size=size, master_addr=address, master_port=port, job="a")
    return [replace(first, rank=rank) for rank in range(size)], timedelta(seconds=timeout_s)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")
@pytest.mark.parametrize("address", ["127.0.0.2", "localhost"])
def test_rank_0_listens_on_the_address_that_was_named_and_on_no_other(address):
    (first, _), timeout = stores(address=address)
    store = first._store(timeout)
    socket.create_connection((address, first.master_port), timeout=5).close()
    for other in {"127.0.0.1", "127.0.0.2", "127.0.0.3"} - {socket.gethostbyname(address)}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, first.master_port), timeout=5)
    del store


def test_workers_hand_each_other_their_words():
    places, timeout = stores(size=3)

    def meet(place):
        store = place._store(timeout)
        return store, place._tell(store, f"gpu {place.rank}" if place.rank else None, 5)

    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(meet, places))  # with the stores: rank 0's has to stay until all have heard
    assert [said for _, said in met] == [[None, "gpu 1", "gpu 2"]] * 3


def test_jobs_that_come_to_one_port_do_not_meet():
    (first, second), timeout = stores(timeout_s=2)
    kept = first._store(timeout)
    store = replace(second, job="another")._store(timeout)
    store.set("oktopk/told/1", "I am of another job")
    assert not kept.check(["oktopk/told/1"])
    with pytest.raises(PeerError, match=r"rank 0 cannot listen on .*MASTER_PORT"):
        replace(first, job="another")._store(timeout)


@pytest.mark.slow
def test_a_rank_that_does_not_come_or_has_left_is_named():
    (first, second), timeout = stores(timeout_s=30)
    alone = HashStore()
    alone.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(PeerError, match=r"rank 1 of 2 did not come within 0\.2 s"):
        first._tell(alone, None, 0.2)
    kept = [first._store(timeout)]
    store = second._store(timeout)
    threading.Timer(0.2, kept.clear).start()
    begin = time.monotonic()
    with pytest.raises(PeerError, match="rank 0, through which all ranks meet, has left"):
        second._tell(store, None, 30)
    with pytest.raises(PeerError, match=rf"rank 1 cannot reach rank 0 at 127\.0\.0\.1:{second.master_port} within 1 s"):
        second._store(timedelta(seconds=1))
    assert time.monotonic() - begin < 25  # and not after the timeout


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
    worker = "import sys; from oktopk.train import dist; dist._end_with(int(sys.argv[1]))"
    command = ["/bin/sh", "-c", f"{sys.executable} -c '{worker}' $$ & echo $!; wait"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    starter = subprocess.Popen(command, env=OUR_PATH, **pipes)
    process = int(starter.stdout.readline())
    starter.kill()
    _, said = starter.communicate(timeout=40)  # the pipe closes when the worker has ended, too
    assert f"worker {process}: oktopk train, which started it, is gone" in said


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_a_worker_has_its_share_of_the_cores(mine, more, local_size):
    """Bound by its launcher to some of the launcher's cores it uses those, and never more than its share of all."""
    assume(mine <= more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_num_cores", lambda process: more if process else mine)
        bound, ours = (Place(launcher=by, size=64, local_size=local_size).num_cores() for by in ("srun", "oktopk"))
    assert bound == max(1, min(mine, more // local_size))
    assert ours == max(1, mine // local_size)


def test_nccl_is_for_workers_with_a_gpu_of_their_own_and_one_host_stays_on_its_loopback(monkeypatch):
    """As each worker names its GPU, not as it counts them: under srun each may see one, which is another's first."""
    joined = Mock()
    monkeypatch.setattr(dist, "LOOPBACK", "lo")
    monkeypatch.setattr(dist.dist, "init_process_group", joined)
    monkeypatch.setattr(Place, "_store", lambda *_: HashStore())
    for gpus, backend, local_size, gloo, nccl in (
        ([None, None], "gloo", 2, "lo", "lo"),
        (["host a", "host a"], "gloo", 2, "lo", "eth9"),
        (["host a", None], "gloo", 2, "eth9", "lo"),
        (["host a", "host b"], "cpu:gloo,cuda:nccl", 1, None, None),
    ):
        wanted = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
        env = {name: value for name, value in wanted.items() if value == "eth9"}  # the user's own stays
        monkeypatch.setattr(dist, "os", SimpleNamespace(environ=env))
        monkeypatch.setattr(Place, "_tell", lambda *_, gpus=gpus: gpus)
        Place(launcher="srun", size=2, local_size=local_size).join(1, torch.device("cpu"))
        assert (joined.call_args.args, {name: env.get(name) for name in wanted}) == ((backend,), wanted)
