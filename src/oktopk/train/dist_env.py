"""Find this worker's rank and the number of workers in the environment that its launcher set.

    launcher                 variables that are read
    oktopk train --nproc N   OKTOPK_STORE (a file), RANK, WORLD_SIZE, LOCAL_RANK: torch's elastic launcher, no server
    torchrun                 RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    mpirun (Open MPI)        OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    srun                     SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_GTIDS, SLURM_STEP_NODELIST
    mpiexec (PBS, PALS)      PALS_RANKID, PMI_SIZE, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE, PBS_NODEFILE
    mpirun (MPICH, Intel)    PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS

Rank 0 waits for the others at MASTER_ADDR and MASTER_PORT. Where they are not set, it waits on the first host of the
job (the loopback if all workers are on one host), at a port made from the job's name.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from oktopk.train.dist import HERE, STORE, Place, PlaceError

PORTS = range(20_000, 32_000)
"""Ports of rank 0, below those that systems give to outgoing connections."""

NO_STEP = 0xFFFFFFFA
"""Lowest SLURM_STEP_ID that is not a step of srun, but the batch script or the shell of salloc."""


class _Launcher(NamedTuple):
    """The variables of one launcher; of two names for one thing the first that is set is read.

    job    variables that name the job: the same on all its ranks, and different in every other job
    """

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...] = ()


_OPEN_MPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (
    _Launcher("oktopk", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher("mpirun (Open MPI)", f"{_OPEN_MPI}RANK", f"{_OPEN_MPI}SIZE",
              (f"{_OPEN_MPI}LOCAL_RANK",), (f"{_OPEN_MPI}LOCAL_SIZE",), ("PMIX_NAMESPACE",)),
    # before the next two, whose variables srun sets as well where it serves Cray's MPI or PMI-2
    _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS",
              ("SLURM_LOCALID",), ("SLURM_GTIDS",), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    _Launcher("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE",
              ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"), ("PALS_APID",)),
    _Launcher("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE",
              ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ("I_MPI_HYDRA_UUID",)),
)  # fmt: skip


def find_place(env: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher gave this process; None if no launcher started it."""
    for launcher in _LAUNCHERS:
        if _started_us(launcher, env):
            return _place(launcher, env)
    for launcher in reversed(_LAUNCHERS):
        parts = _set_ones((launcher.size, *launcher.local_rank), env)
        if parts and launcher.name != "srun":  # whose shells have all of them, and are no workers
            raise PlaceError(
                f"{', '.join(parts)} set, but not {launcher.rank}: start every worker with {launcher.name}, or unset "
                "them to run without it"
            )
    return None


def _started_us(launcher: _Launcher, env: Mapping[str, str]) -> bool:
    if launcher.name == "oktopk":
        return STORE in env
    if launcher.name == "srun":  # the batch script has a SLURM_PROCID, and MPICH may use srun for its own helpers
        step = env.get("SLURM_STEP_ID", "")
        is_step = step.isdecimal() and int(step) < NO_STEP
        return launcher.rank in env and is_step and "MPI_LOCALRANKID" not in env
    return launcher.rank in env


def _place(launcher: _Launcher, env: Mapping[str, str]) -> Place:
    rank, size = _number((launcher.rank,), env), _number((launcher.size,), env)
    local_rank, local_size = _number(launcher.local_rank, env), _local_size(launcher, env)
    if not (rank < size and local_rank < local_size <= size):
        names = ", ".join(_set_ones((launcher.rank, launcher.size, *launcher.local_rank, *launcher.local_size), env))
        raise PlaceError(
            f"{launcher.name} says rank {rank} of {size}, {local_rank} of {local_size} on this machine, which cannot "
            f"be ({names}): start every worker with it, and set none of them by hand"
        )
    place = Place(launcher=launcher.name, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
    return place if size == 1 or launcher.name == "oktopk" else _with_master(place, launcher, env)


def _number(names: tuple[str, ...], env: Mapping[str, str]) -> int:
    name = next(iter(_set_ones(names, env)), names[0])
    text = env.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        came = f"is {text!r}" if name in env else "is not set"
        raise PlaceError(f"{name} {came}, though other variables of its launcher are set: wanted a whole number")
    return int(text)


def _set_ones(names: tuple[str, ...], env: Mapping[str, str]) -> list[str]:
    return [name for name in names if name in env]


def _local_size(launcher: _Launcher, env: Mapping[str, str]) -> int:
    if launcher.name == "srun" and env.get("SLURM_GTIDS"):  # the ranks on this node, with commas between
        return env["SLURM_GTIDS"].count(",") + 1
    return _number(launcher.local_size, env)


def _with_master(place: Place, launcher: _Launcher, env: Mapping[str, str]) -> Place:
    """Return the place with the address of rank 0, which every rank derives alike from its own environment."""
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if launcher.name == "torchrun" and not (address and port):
        unset = "MASTER_PORT" if address else "MASTER_ADDR"
        raise PlaceError(f"{unset} is not set, though RANK is: torchrun sets both; by hand, set both for all ranks")
    job = _job(launcher, env, place.on_one_host)
    if not address:
        address = HERE if place.on_one_host else _first_host(launcher, env)
    if not (port or job):
        raise PlaceError(f"MASTER_PORT is not set, and {launcher.name} does not name its job: set it for all ranks")
    port = port or str(PORTS[zlib.crc32(job.encode()) % len(PORTS)])
    if not (re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        raise PlaceError(f"MASTER_PORT is {port!r}: wanted a port from 1 to 65535")
    return replace(place, master_addr=address, master_port=int(port), job=job)


def _job(launcher: _Launcher, env: Mapping[str, str], on_one_host: bool) -> str:
    """Return a name of this job that is the same on all its ranks and in no other job; "" if there is none."""
    named = [env[name] for name in launcher.job if env.get(name)]
    if named:
        return " ".join(named)
    if on_one_host:
        return f"process {_launching_process()}"
    return env.get("PBS_JOBID") or env.get("SLURM_JOB_ID") or ""


def _launching_process() -> int:
    """Return the process that started all workers of this host: the parent, or MPICH's proxy above any script."""
    process = parent = os.getppid()
    while process > 1:
        try:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # no /proc here, or it has ended
            break
        if name.startswith("hydra_pmi"):
            return process
        process = int(rest.split()[1])
    return parent


def _first_host(launcher: _Launcher, env: Mapping[str, str]) -> str:
    """Return the host of rank 0, which SLURM and PBS name."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if env.get(name) and (launcher.name == "srun" or name == "SLURM_JOB_NODELIST"):
            return first_of_nodelist(env[name])
    if not env.get("PBS_NODEFILE"):
        raise PlaceError(
            f"{launcher.name} started workers on several hosts and does not say where rank 0 is: set MASTER_ADDR and "
            "MASTER_PORT for all of them (Open MPI: mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
        )
    try:
        return Path(env["PBS_NODEFILE"]).read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise PlaceError(
            f"PBS_NODEFILE is {env['PBS_NODEFILE']}, which names no host on this machine: set MASTER_ADDR in the job "
            'script, export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")'
        ) from None


def first_of_nodelist(nodes: str) -> str:
    """Return the first host of SLURM's short form.

    >>> first_of_nodelist("gpu[007-012,015],login1")
    'gpu007'
    """
    match = re.match(r"(?:[^\[\],\s]|\[\w+[^\[\]]*\])+", nodes)
    if not match:
        raise PlaceError(f"cannot read the first host of SLURM's nodes {nodes!r}: set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])
