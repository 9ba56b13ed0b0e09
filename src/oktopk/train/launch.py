"""Who am I, and how many are we? A worker's place, from whatever started it; and our own way to start workers.

    started by               what is read
    oktopk train --nproc N   OKTOPK_STORE (a file), RANK, WORLD_SIZE, LOCAL_RANK: torch's elastic launcher, no server
    torchrun                 RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    mpirun (Open MPI)        OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    mpirun (MPICH, Intel)    PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    srun                     SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_NODELIST
    mpiexec (PBS, PALS)      PALS_RANKID, PALS_LOCAL_RANKID, PMI_SIZE, PBS_NODEFILE

MASTER_ADDR and MASTER_PORT, if set, say where rank 0 waits for the others; else it is the first host of the job, or
this one where all are on it, and a port made from the job's name.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from oktopk.errors import OktopkError, PeerError

STORE = "OKTOPK_STORE"
HERE = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections."""


class PlaceError(OktopkError, ValueError):
    """An environment that says a worker's place wrongly, or only in part."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker among the others.

    launcher       what started it, as people call it
    local_rank     its number on this machine
    local_size     workers on this machine
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = HERE
    master_port: int = 0

    def join(self, timeout_s: float, device: torch.device) -> None:
        """Meet the others: make the default process group."""
        timeout = timedelta(seconds=timeout_s)
        shared_gpu = device.type == "cuda" and self.local_size > torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and not shared_gpu else "gloo"
        if self.launcher == "torchrun":
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = self._store(timeout)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    def _store(self, timeout: timedelta) -> Store:
        if self.size == 1:
            return HashStore()
        if self.launcher == "oktopk":
            return FileStore(os.environ[STORE] + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), self.size)
        return self._tcp_store(timeout)

    def _tcp_store(self, timeout: timedelta) -> Store:
        """Return the store of rank 0, which listens on the address that was named, and on no other."""
        if self.rank:
            return TCPStore(self.master_addr, self.master_port, self.size, False, timeout)
        try:
            listening = socket.create_server((self.master_addr, self.master_port))
        except OSError as error:
            raise PeerError(
                f"rank 0 cannot listen on {self.master_addr}:{self.master_port} ({error.strerror}): "
                "set MASTER_ADDR to an address of its host and MASTER_PORT to a free port, for all ranks alike"
            ) from error
        port, fd = listening.getsockname()[1], listening.detach()  # the store closes it
        return TCPStore(self.master_addr, port, self.size, True, timeout, master_listen_fd=fd)


@dataclass(frozen=True)
class _Names:
    """The variables of one launcher."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    job: tuple[str, ...] = ()  # what names the job, the same for all its ranks and no other job


_LAUNCHERS = (
    _Names("oktopk", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Names(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Names("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", ("PBS_JOBID",)),
    _Names("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PBS_JOBID",)),
    _Names("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


def find_place(env: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher gave this process; None if none did."""
    for names in _LAUNCHERS:
        if names.rank in env and (names.launcher == "oktopk") == (STORE in env) and not _is_batch_script(names, env):
            return _place(names, env)
    left = sorted({names.size for names in _LAUNCHERS[1:4] if names.size in env} - {"SLURM_NTASKS"})
    if left and not any(names.rank in env for names in _LAUNCHERS):
        raise PlaceError(f"{', '.join(left)} is set, but no rank: start every worker with the launcher, or unset it")
    return None


def _is_batch_script(names: _Names, env: Mapping[str, str]) -> bool:
    """Whether this is SLURM's batch script itself: it has a SLURM_PROCID, though srun did not start it."""
    return names.launcher == "srun" and env.get("SLURM_STEP_ID", "") in ("", "4294967291")


def _place(names: _Names, env: Mapping[str, str]) -> Place:
    rank, size = _number(names.rank, env), _number(names.size, env)
    if not rank < size:
        raise PlaceError(f"{names.launcher} says rank {rank} ({names.rank}) of {size} ({names.size}) workers")
    local_size = _local_size(names, env, size)
    local_rank = _number(names.local_rank, env, rank if local_size == size else None)
    if names.launcher in ("oktopk", "torchrun"):
        return Place(
            launcher=names.launcher, rank=rank, size=size, local_rank=local_rank, local_size=local_size,
            master_addr=env.get("MASTER_ADDR", HERE), master_port=_number("MASTER_PORT", env, 0),
        )  # fmt: skip
    address = env.get("MASTER_ADDR") or (HERE if local_size == size else _first_host(names, env))
    port = _number("MASTER_PORT", env, _job_port(names, env))
    return Place(
        launcher=names.launcher, rank=rank, size=size, local_rank=local_rank, local_size=local_size,
        master_addr=address, master_port=port,
    )  # fmt: skip


def _number(name: str, env: Mapping[str, str], default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"\d+", text):
        came = f"is {text!r}" if text else "is not set"
        raise PlaceError(f"{name} {came}, though other variables of its launcher are: wanted a whole number")
    return int(text)


def _local_size(names: _Names, env: Mapping[str, str], size: int) -> int:
    if env.get(names.local_size):
        return _number(names.local_size, env)
    if names.launcher == "srun":
        tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
        return min(int(tasks[0]), size) if tasks else size
    if names.launcher == "mpiexec (PALS)" and env.get("PBS_NODEFILE"):
        hosts = Path(env["PBS_NODEFILE"]).read_text().split()
        return -(-size // len(set(hosts))) if hosts else size
    return size


def _first_host(names: _Names, env: Mapping[str, str]) -> str:
    """Return the host of rank 0, where the environment names it."""
    if env.get("SLURM_JOB_NODELIST"):
        return first_of_nodelist(env["SLURM_JOB_NODELIST"])
    if env.get("PBS_NODEFILE"):
        return Path(env["PBS_NODEFILE"]).read_text().split()[0]
    raise PlaceError(
        f"{names.launcher} started workers on several hosts and does not say where rank 0 is: "
        "set MASTER_ADDR and MASTER_PORT for all of them (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
    )


def first_of_nodelist(nodes: str) -> str:
    """Return the first host of SLURM's short form.

    >>> first_of_nodelist("gpu[007-012,015],login1")
    'gpu007'
    """
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    if not match:
        raise PlaceError(f"cannot read the first host of SLURM_JOB_NODELIST={nodes!r}: set MASTER_ADDR")
    return match[1] + (match[2] or "")


def _job_port(names: _Names, env: Mapping[str, str]) -> int:
    """Return a port that all ranks of this job come to, and another job hardly ever does."""
    job = [env[name] for name in names.job if name in env] or [str(os.getppid())]
    return PORTS[zlib.crc32(" ".join([str(os.getuid()), *job]).encode()) % len(PORTS)]


def start_workers(command: Sequence[str], nproc: int, folder: Path, max_restarts: int, threads: int) -> None:
    """Run `nproc` workers of this program until all are done; one that fails ends all, or restarts all.

    They meet through files in `folder` and talk through this machine's loopback: nothing listens to the outside.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = folder / f".meeting-{os.getpid()}"
    meeting.mkdir()
    os.environ.update(_worker_environment(meeting, threads))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(meeting / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr=HERE,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(meeting)),
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        raise PeerError(f"worker {rank} {how}, and all others were ended; its last words are above") from None
    finally:
        _clear(meeting)


def _worker_environment(meeting: Path, threads: int) -> dict[str, str]:
    return {
        STORE: str(meeting / "store-"),
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or the launcher would listen on all addresses
    }


def _clear(meeting: Path) -> None:
    shutil.rmtree(meeting, ignore_errors=True)
    for name in (STORE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        os.environ.pop(name, None)


def share(key: str, value: str | None) -> str:
    """Return on every rank what rank 0 gave as `value`."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        assert value is not None
        store.set(f"oktopk/{key}", value)
        return value
    return str(store.get(f"oktopk/{key}").decode())
