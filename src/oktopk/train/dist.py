"""`Place`: the rank of a worker, found in the environment that its launcher set, and the way it joins the others.

Rank 0 waits for the others at MASTER_ADDR and MASTER_PORT. Where they are not set, it waits on the first host of the
job (the loopback if all workers are on one host), at a port made from the job's name.
"""

import ipaddress
import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from oktopk.errors import OktopkError, PeerError

STORE, STARTER = "OKTOPK_STORE", "OKTOPK_STARTER"
"""Variables of the workers that `oktopk train` starts: the file of their store, and the process that started them."""

HERE = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PORTS = range(20_000, 32_000)
"""Ports of rank 0, below those that systems give to outgoing connections."""
NO_STEP = 0xFFFFFFFA
"""Lowest SLURM_STEP_ID that is not a step of srun, but the batch script or the shell of salloc."""

Env = Mapping[str, str]


class PlaceError(OktopkError, ValueError):
    """An environment with a wrong or incomplete place of this worker."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker among the others."""

    launcher: str  # name of the program that started it
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the workers on this machine
    local_size: int = 1
    master_addr: str = HERE
    master_port: int = 0
    job: str = ""  # a name that no other job has: two jobs at one port do not take each other's workers

    @property
    def on_one_host(self) -> bool:
        """Whether all workers are on this machine."""
        return self.local_size == self.size

    def num_cores(self) -> int:
        """Return the cores of this worker: its share of its launcher's, if it may use them all."""
        mine = _num_cores(0)
        launchers = mine if self.launcher.startswith("oktopk") else max(mine, _num_cores(os.getppid()))
        return max(1, min(mine, launchers // self.local_size))

    def join(self, timeout_s: float, device: torch.device) -> None:
        """Make the default process group with the other workers."""
        if self.on_one_host:  # nobody outside has to reach it
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, LOOPBACK)
        if self.launcher == "mpirun (Open MPI)":  # which shows its workers a terminal even where it writes to a file
            os.environ.setdefault("TTY_COMPATIBLE", "0")
        end_with_starter()
        timeout = timedelta(seconds=timeout_s)
        store = self._store(timeout)
        gpus = self._tell(store, _gpu(device), timeout_s)
        own_gpus = None not in gpus and len(set(gpus)) == self.size
        backend = "cpu:gloo,cuda:nccl" if own_gpus else "gloo"  # NCCL refuses two ranks on one GPU
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)

    def _store(self, timeout: timedelta) -> Store:
        if self.size == 1:
            return HashStore()
        if self.launcher == "oktopk":
            return FileStore(os.environ[STORE] + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), self.size)
        if self.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return next(rendezvous("env://", self.rank, self.size, timeout=timeout))[0]  # type: ignore[no-any-return]
        store = self._listen(timeout) if self.rank == 0 else self._reach(timeout)
        return PrefixStore(f"oktopk/{self.job}", store)

    def _listen(self, timeout: timedelta) -> Store:
        """Return the store of rank 0, which listens on `master_addr` only."""
        family, address = self._resolve()
        try:
            listening = socket.create_server((address, self.master_port), family=family)
        except OSError as error:
            raise PeerError(
                f"rank 0 cannot listen on {self.master_addr}:{self.master_port} ({error.strerror}): "
                "set MASTER_ADDR to an address of its host and MASTER_PORT to a free port, for all ranks alike"
            ) from error
        port, fd = listening.getsockname()[1], listening.detach()  # the store closes it
        return TCPStore(self.master_addr, port, self.size, True, timeout, wait_for_workers=False, master_listen_fd=fd)

    def _reach(self, timeout: timedelta) -> Store:
        self._resolve()  # the store itself would try until the timeout
        try:
            return TCPStore(self.master_addr, self.master_port, self.size, False, timeout, wait_for_workers=False)
        except RuntimeError as error:  # the base class of torch's DistError
            raise PeerError(
                f"rank {self.rank} cannot reach rank 0 at {self.master_addr}:{self.master_port} within "
                f"{timeout.total_seconds():g} s: is it running, is MASTER_ADDR its host, is the port open?"
            ) from error

    def _resolve(self) -> tuple[socket.AddressFamily, str]:
        """Return the address of rank 0's host. Every rank checks it, so that none waits for one that has failed."""
        where = f"{self.master_addr}, where rank 0 waits for the others,"
        try:
            family, *_, found = socket.getaddrinfo(self.master_addr, self.master_port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            known = f"is no host that rank {self.rank} knows ({error.strerror})"
            raise PlaceError(f"{where} {known}: set MASTER_ADDR, for all ranks alike") from error
        address = str(found[0])
        if not self.on_one_host and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise PlaceError(
                f"{where} is {address} on the host of rank {self.rank}, which no other machine can reach: "
                "set MASTER_ADDR, for all ranks alike, to an address that all can"
            )
        return family, address

    def _tell(self, store: Store, mine: str | None, timeout_s: float) -> list[str | None]:
        """Return the word of every rank, in rank order; a rank that does not come is named in the error."""
        store.set(f"oktopk/told/{self.rank}", mine or "")
        told = []
        for rank in range(self.size):
            try:
                told.append(store.get(f"oktopk/told/{rank}").decode() or None)
            except dist.DistNetworkError as error:
                raise PeerError("rank 0, through which all ranks meet, has left: its own message says why") from error
            except RuntimeError as error:  # the timeout
                raise PeerError(
                    f"rank {rank} of {self.size} did not come within {timeout_s:g} s: its own message says why, if "
                    f"{self.launcher} has started it at all"
                ) from error
        return told


def end_with_starter() -> None:
    """End this process when the one that started it is gone, if `oktopk train` did."""
    if STARTER in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[STARTER]),), daemon=True).start()


def _end_with(starter: int) -> None:
    """End this process when its starter is gone: a starter that is killed cannot end its workers."""
    while os.getppid() == starter:
        time.sleep(1)
    print(f"error worker {os.getpid()}: oktopk train, which started it, is gone", file=sys.stderr, flush=True)
    os._exit(1)


def _num_cores(process: int) -> int:
    return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu(device: torch.device) -> str | None:
    """Return a name of this GPU that does not depend on the numbers by which a process knows its GPUs."""
    if device.type != "cuda":
        return None
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


class _Launcher(NamedTuple):
    """The variables of one launcher; of two names for one thing the first that is set is read."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str = ""  # variables that name the job: the same on all its ranks, and different in every other job


_LAUNCHERS = (
    _Launcher("oktopk", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
              "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    # before the next two, whose variables srun sets as well where it serves Cray's MPI or PMI-2
    _Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_JOB_ID SLURM_STEP_ID"),
    _Launcher("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE",
              "PALS_LOCAL_RANKID PMI_LOCAL_RANK", "PALS_LOCAL_SIZE PMI_LOCAL_SIZE", "PALS_APID"),
    _Launcher("mpirun (MPICH)", "PMI_RANK", "PMI_SIZE",
              "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE", "I_MPI_HYDRA_UUID"),
)  # fmt: skip


def find_place(env: Env) -> Place | None:
    """Return the place that a launcher gave this process; None if no launcher started it."""
    for launcher in _LAUNCHERS:
        if _started_us(launcher, env):
            return _place(launcher, env)
    for launcher in reversed(_LAUNCHERS):
        parts = [name for name in (launcher.size, *launcher.local_rank.split()) if name in env]
        if parts and launcher.name != "srun":  # whose shells have all of them, and are no workers
            hint = f"start every worker with {launcher.name}, or unset them to run without it"
            raise PlaceError(f"{', '.join(parts)} set, but not {launcher.rank}: {hint}")
    return None


def _started_us(launcher: _Launcher, env: Env) -> bool:
    if launcher.name == "oktopk":
        return STORE in env
    if launcher.name == "srun":  # the batch script has a SLURM_PROCID, and MPICH may use srun for its own helpers
        step = env.get("SLURM_STEP_ID", "")
        is_step = step.isdecimal() and int(step) < NO_STEP
        return launcher.rank in env and is_step and "MPI_LOCALRANKID" not in env
    return launcher.rank in env


def _place(launcher: _Launcher, env: Env) -> Place:
    ranks = env.get("SLURM_GTIDS") if launcher.name == "srun" else None  # those on this node, with commas between
    rank, size, local_rank = (_number(names, env) for names in (launcher.rank, launcher.size, launcher.local_rank))
    local_size = ranks.count(",") + 1 if ranks else _number(launcher.local_size, env)
    if not (rank < size and local_rank < local_size <= size):
        names = " ".join(launcher[1:5]).split()
        raise PlaceError(
            f"{launcher.name} says rank {rank} of {size}, {local_rank} of {local_size} on this machine, which cannot "
            f"be ({', '.join(name for name in names if name in env)}): start every worker with it, and set none of "
            "them by hand"
        )
    place = Place(launcher=launcher.name, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
    return place if size == 1 or launcher.name == "oktopk" else _with_master(place, launcher, env)


def _number(names: str, env: Env) -> int:
    name = next((name for name in names.split() if name in env), names.split()[0])
    if not re.fullmatch(r"[0-9]{1,9}", env.get(name, "")):
        came = f"is {env[name]!r}" if name in env else "is not set"
        raise PlaceError(f"{name} {came}, though other variables of its launcher are set: wanted a whole number")
    return int(env[name])


def _with_master(place: Place, launcher: _Launcher, env: Env) -> Place:
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


def _job(launcher: _Launcher, env: Env, on_one_host: bool) -> str:
    """Return a name of this job that is the same on all its ranks and in no other job; "" if there is none."""
    named = " ".join(env[name] for name in launcher.job.split() if env.get(name))
    if on_one_host:
        return named or f"process {_launching_process()}"
    return named or env.get("PBS_JOBID") or env.get("SLURM_JOB_ID") or ""


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


def _first_host(launcher: _Launcher, env: Env) -> str:
    """Return the host of rank 0, which SLURM and PBS name."""
    nodes = env.get("SLURM_STEP_NODELIST") if launcher.name == "srun" else None
    nodes = nodes or env.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_of_nodelist(nodes)
    nodefile = env.get("PBS_NODEFILE")
    if not nodefile:
        raise PlaceError(
            f"{launcher.name} started workers on several hosts and does not say where rank 0 is: set MASTER_ADDR and "
            "MASTER_PORT for all of them (Open MPI: mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
        )
    try:
        return Path(nodefile).read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        raise PlaceError(
            f"PBS_NODEFILE is {nodefile}, which names no host on this machine: set MASTER_ADDR in the job script, "
            'export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")'
        ) from None


def first_of_nodelist(nodes: str) -> str:
    """Return the first host of SLURM's short form: gpu007 of gpu[007-012,015],login1."""
    match = re.match(r"(?:[^\[\],\s]|\[\w+[^\[\]]*\])+", nodes)
    if not match:
        raise PlaceError(f"cannot read the first host of SLURM's nodes {nodes!r}: set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])
