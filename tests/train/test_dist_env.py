"""Does a worker find its place, whatever started it, and is a wrong environment named?"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train import dist_env
from oktopk.train.dist import HERE, STORE, Place, PlaceError
from oktopk.train.dist_env import PORTS, find_place, first_of_nodelist


def variables(text, prefix=""):
    """Return {"A": "1", "B": "2"} for "A=1 B=2", each name behind the prefix."""
    return {prefix + name: value for name, value in (pair.split("=") for pair in text.split())}


ELASTIC = variables("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
TORCHRUN = {**ELASTIC, "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
OPEN_MPI = variables("RANK=1 SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2", "OMPI_COMM_WORLD_")
OPEN_MPI_4 = {**OPEN_MPI, **variables("PMIX_NAMESPACE=1978662913 PMIX_RANK=1 OMPI_MCA_ess_base_jobid=1978662913")}
OPEN_MPI_5 = {**OPEN_MPI, **variables("PMIX_NAMESPACE=prterun-node1-7423@1 PMIX_RANK=1 OMPI_VERSION=5.0.11")}
MPICH = variables("PMI_RANK=1 PMI_SIZE=2 PMI_FD=11 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
INTEL = {**MPICH, "I_MPI_HYDRA_UUID": "b81d0000-8f7f-0239-5660-06008cd00063", "HYDRA_LAUNCH_TYPE": "2"}
BATCH = variables(  # a batch script that asked for three tasks on two nodes
    "PROCID=0 LOCALID=0 GTIDS=0 NTASKS=3 NODEID=0 JOB_ID=77 JOB_NODELIST=node[07-08] TASKS_PER_NODE=2,1", "SLURM_"
)
SRUN = BATCH | variables("PROCID=1 LOCALID=1 GTIDS=0,1,2 STEP_ID=0 JOB_NODELIST=node07 STEP_NODELIST=node07", "SLURM_")
SRUN_NODES = BATCH | variables("PROCID=2 GTIDS=2 STEP_ID=3 STEP_NODELIST=node[07-08]", "SLURM_")
PALS = variables("RANKID=5 LOCAL_RANKID=1 LOCAL_SIZE=4 NODEID=1 APID=5c1f-app", "PALS_") | variables(
    "PMI_RANK=5 PMI_SIZE=8 PBS_JOBID=12.server"
)
ONE_HOST = [OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL, SRUN]


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
        ({**SRUN, **OPEN_MPI_5}, "mpirun (Open MPI)", (1, 2, 1, 2)),
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
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (launcher, *place)


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
def test_a_process_that_no_launcher_started_has_no_place(env):
    """The batch script is among these, and the shell that salloc opens: there, `--nproc` starts the workers."""
    assert find_place(env) is None


@pytest.mark.parametrize(
    ("env", "named"),
    [
        *[(TORCHRUN, name) for name in TORCHRUN],
        *[(OPEN_MPI_5, name) for name in OPEN_MPI],
        *[(MPICH, name) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")],
        *[(SRUN, name) for name in ("SLURM_NTASKS", "SLURM_LOCALID", "SLURM_GTIDS")],
        *[(PALS, name) for name in ("PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")],
    ],
)
def test_a_missing_variable_is_named(env, named):
    with pytest.raises(PlaceError, match=rf"\b{named}\b"):
        find_place({name: value for name, value in env.items() if name != named})


@pytest.mark.parametrize(
    ("env", "wrong"),
    [
        *[(TORCHRUN, f"RANK={value}") for value in ("4", "-1", "")],
        *[(TORCHRUN, f"WORLD_SIZE={value}") for value in ("two", "0")],
        *[(TORCHRUN, f"MASTER_PORT={value}") for value in ("http", "65536", "0")],
        (TORCHRUN, "LOCAL_WORLD_SIZE=5"),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_RANK=2"),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE=\u0663"),
        (MPICH, "MPI_LOCALNRANKS=0"),
        (SRUN, "SLURM_NTASKS=1"),
        (PALS, "PMI_SIZE=5"),
    ],
)
def test_an_impossible_variable_is_named(env, wrong):
    name, _, value = wrong.partition("=")
    with pytest.raises(PlaceError, match=rf"\b{name}\b"):
        find_place({**env, name: value})


@pytest.mark.parametrize("env", [*ONE_HOST, SRUN_NODES, PALS])
def test_rank_0_waits_on_the_loopback_of_one_host_and_where_the_user_says(env):
    said = find_place({**env, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711"})
    assert (said.master_addr, said.master_port) == ("10.0.0.9", 4711)
    if env in ONE_HOST:
        place = find_place(env)
        assert place.on_one_host
        assert place.master_addr == HERE
        assert place.master_port in PORTS


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


def test_all_ranks_of_a_job_come_to_one_port_and_jobs_to_their_own(nodefile):
    def port(env, **changed):
        return find_place({**env, **nodefile, **changed}).master_port

    assert port(SRUN_NODES) == port(SRUN_NODES, SLURM_PROCID="0", SLURM_GTIDS="0,1")
    assert port(PALS) == port(PALS, PALS_RANKID="0", PALS_LOCAL_RANKID="0")
    assert port(INTEL) == port(INTEL, PMI_RANK="0", MPI_LOCALRANKID="0")
    assert port(MPICH) == port(MPICH, PMI_RANK="0", MPI_LOCALRANKID="0")
    others = [port(env) for env in (OPEN_MPI_4, OPEN_MPI_5, SRUN_NODES, PALS, INTEL, MPICH)]
    others += [port(OPEN_MPI_5, PMIX_NAMESPACE="prterun-node1-7424@1"), port(PALS, PALS_APID="other-app")]
    others += [port(SRUN_NODES, SLURM_STEP_ID="4"), port(SRUN_NODES, SLURM_JOB_ID="78")]
    assert len(set(others)) == len(others)
    assert set(others) <= set(PORTS)


def test_a_script_around_a_worker_does_not_lead_it_elsewhere(tmp_path):
    """MPICH names no job: all ranks of a host share the process that started them, above any script."""
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.symlink_to(os.path.realpath("/bin/sh"))
    code = "from oktopk.train.dist_env import _launching_process as p; print(p())"
    inner = f"{sys.executable} -c '{code}'; exit 0"
    environment = {**os.environ, "PYTHONPATH": str(Path(dist_env.__file__).parents[2])}
    process = subprocess.Popen(
        [proxy, "-c", f'/bin/sh -c "{inner}"; exit 0'], env=environment, stdout=subprocess.PIPE, text=True
    )
    output, _ = process.communicate(timeout=50)
    assert int(output) == process.pid


names = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z]", fullmatch=True)
numbers = st.integers(0, 9999).map(lambda number: f"{number:04d}")


@given(names, numbers, numbers, st.just("") | names, st.lists(names | st.just("b[1-2,7]"), max_size=3))
def test_the_first_host_of_a_nodelist(name, first, last, suffix, rest):
    """In each of SLURM's short forms."""
    forms = {
        name: name,
        f"{name}{first}": f"{name}{first}",
        f"{name}[{first}]{suffix}": f"{name}{first}{suffix}",
        f"{name}[{first}-{last}]{suffix}": f"{name}{first}{suffix}",
        f"{name}[{first},{last}]{suffix}": f"{name}{first}{suffix}",
        f"{name}[{first}-{last},{first}]{suffix}": f"{name}{first}{suffix}",
        f"{name}[{first}-{last}]x[{last}-{first}]": f"{name}{first}x{last}",
    }
    for form, host in forms.items():
        assert first_of_nodelist(",".join([form, *rest])) == host


@pytest.mark.parametrize("nodes", ["", "[", "]", ",a", " ", "[]"])
def test_a_nodelist_without_a_host(nodes):
    with pytest.raises(PlaceError, match="set MASTER_ADDR"):
        first_of_nodelist(nodes)


@given(st.text(max_size=20))
def test_a_first_host_is_a_name_or_refused(nodes):
    try:
        host = first_of_nodelist(nodes)
    except PlaceError:
        return
    assert re.fullmatch(r"[^\[\],\s]+", host)
