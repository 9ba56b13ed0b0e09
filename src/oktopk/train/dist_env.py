"""Who am I, and how many are we? A worker's place, from whatever started it.

    started by               what is read
    oktopk train --nproc N   OKTOPK_STORE (a file), RANK, WORLD_SIZE, LOCAL_RANK: torch's elastic launcher, no server
    torchrun                 RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    mpirun (Open MPI)        OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    srun                     SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_GTIDS, SLURM_STEP_NODELIST
    mpiexec (PBS, PALS)      PALS_RANKID, PMI_SIZE, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE, PBS_NODEFILE
    mpirun (MPICH, Intel)    PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS

MASTER_ADDR and MASTER_PORT, if set, say where rank 0 waits for the others; else it is the first host of the job, or
this one where all are on it, and a port made from the job's name.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oktopk.train.dist import HERE, STORE, Place, PlaceError

PORTS = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections."""

NO_STEP = 0xFFFFFFFA
"""From here on a SLURM_STEP_ID is no step of srun, but the batch script or the shell of salloc."""


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; where there are two for one thing the first that is set is taken."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...] = ()  # what names the job: the same for all its ranks, and for no other job


_LAUNCHERS = (
    _Launcher("oktopk", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
    ),
    # before the next two, whose variables srun sets as well where it serves Cray's MPI or PMI-2
    _Launcher(
        "srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), ("SLURM_GTIDS",), ("SLURM_JOB_ID", "SLURM_STEP_ID")
    ),
    _Launcher(
        "mpiexec (PALS)",
        "PALS_RANKID",
        "PMI_SIZE",
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        ("PALS_APID",),
    ),
    _Launcher(
        "mpirun (MPICH)",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("I_MPI_HYDRA_UUID",),
    ),
)


def find_place(env: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher gave this process; None if none did."""
    for launcher in _LAUNCHERS:
        if _started_us(launcher, env):
            return _place(launcher, env)
    _refuse_parts(env)
    return None


def _refuse_parts(env: Mapping[str, str]) -> None:
    """Raise if something of a launcher is there without the rank; SLURM's shells have all of it, and are no workers."""
    for launcher in reversed(_LAUNCHERS):
        parts = _set_ones((launcher.size, *launcher.local_rank), env)
        if parts and launcher.name != "srun":
            raise PlaceError(
                f"{', '.join(parts)} set, but not {launcher.rank}: start every worker with {launcher.name}, or unset "
                "what is left of it to run without"
            )


def _started_us(launcher: _Launcher, env: Mapping[str, str]) -> bool:
    if launcher.name == "oktopk":
        return STORE in env
    if launcher.name == "srun":  # MPICH's mpirun may use srun for its own helpers, one a node
        return launcher.rank in env and _is_step(env.get("SLURM_STEP_ID", "")) and "MPI_LOCALRANKID" not in env
    return launcher.rank in env


def _is_step(step: str) -> bool:
    """Whether srun started this process: the batch script has a SLURM_PROCID, too."""
    return step.isdecimal() and int(step) < NO_STEP


def _place(launcher: _Launcher, env: Mapping[str, str]) -> Place:
    rank, size = _number(launcher.rank, env), _number(launcher.size, env)
    local_size = _local_size(launcher, env)
    local_rank = _number(_first_set(launcher.local_rank, env), env)
    for count, total in ((rank, size), (local_rank, local_size), (local_size - 1, size)):
        if not 0 <= count < total:
            names = ", ".join(
                _set_ones((launcher.rank, launcher.size, *launcher.local_rank, *launcher.local_size), env)
            )
            raise PlaceError(
                f"{launcher.name} says rank {rank} of {size}, {local_rank} of {local_size} on this machine, which "
                f"cannot be ({names}): start every worker with it, and set none of them by hand"
            )
    place = Place(launcher=launcher.name, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
    return place if size == 1 or launcher.name == "oktopk" else _with_master(place, launcher, env)


def _number(name: str, env: Mapping[str, str]) -> int:
    text = env.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        came = f"is {text!r}" if name in env else "is not set"
        raise PlaceError(f"{name} {came}, though other variables of its launcher are set: wanted a whole number")
    return int(text)


def _first_set(names: tuple[str, ...], env: Mapping[str, str]) -> str:
    return next(iter(_set_ones(names, env)), names[0])


def _set_ones(names: tuple[str, ...], env: Mapping[str, str]) -> list[str]:
    return [name for name in names if name in env]


def _local_size(launcher: _Launcher, env: Mapping[str, str]) -> int:
    name = _first_set(launcher.local_size, env)
    if launcher.name == "srun" and name in env:  # the ranks on this node, with commas between
        return env[name].count(",") + 1
    return _number(name, env)


def _with_master(place: Place, launcher: _Launcher, env: Mapping[str, str]) -> Place:
    """Return the place with where rank 0 waits: all ranks must come to the same, each from its own environment."""
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if launcher.name == "torchrun" and not (address and port):
        unset = "MASTER_ADDR" if not address else "MASTER_PORT"
        raise PlaceError(f"{unset} is not set, though RANK is: torchrun sets both; by hand, set both for all ranks")
    job = _job(launcher, env, place.on_one_host)
    if not address:
        address = HERE if place.on_one_host else _first_host(launcher, env)
    number = _port("MASTER_PORT", port) if port else _port_of(job, launcher)
    return Place(**{**vars(place), "master_addr": address, "master_port": number, "job": job})


def _port(name: str, text: str) -> int:
    if not (re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 2**16):
        raise PlaceError(f"{name} is {text!r}: wanted a port from 1 to 65535")
    return int(text)


def _job(launcher: _Launcher, env: Mapping[str, str], on_one_host: bool) -> str:
    """Return what this job is called and no other, the same on all its ranks; "" if nothing says it."""
    named = [env[name] for name in launcher.job if env.get(name)]
    if named:
        return " ".join(named)
    if on_one_host:
        return f"process {_launching_process()}"
    return env.get("PBS_JOBID") or env.get("SLURM_JOB_ID") or ""


def _launching_process() -> int:
    """Return the process that started all workers of this host, though each may be in a script of its own."""
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


def _port_of(job: str, launcher: _Launcher) -> int:
    """Return a port that all ranks of this job come to, and another job hardly ever does."""
    if not job:
        raise PlaceError(f"MASTER_PORT is not set, and {launcher.name} does not name its job: set it for all ranks")
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def _first_host(launcher: _Launcher, env: Mapping[str, str]) -> str:
    """Return the host of rank 0, where the environment names it."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if env.get(name) and (launcher.name == "srun" or name == "SLURM_JOB_NODELIST"):
            return first_of_nodelist(env[name])
    if env.get("PBS_NODEFILE"):
        return _first_line(Path(env["PBS_NODEFILE"]))
    raise PlaceError(
        f"{launcher.name} started workers on several hosts and does not say where rank 0 is: set MASTER_ADDR and "
        "MASTER_PORT for all of them (Open MPI: mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
    )


def _first_line(nodes: Path) -> str:
    try:
        return nodes.read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise PlaceError(
            f"PBS_NODEFILE is {nodes}, which names no host on this machine: set MASTER_ADDR in the job script, "
            'export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")'
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
