"""`Place`: the rank of a worker, and the way it joins the process group."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from oktopk.errors import OktopkError, PeerError

STORE, STARTER = "OKTOPK_STORE", "OKTOPK_STARTER"
"""Variables of the workers that `oktopk train` starts: the file of their store, and the process that started them."""

HERE = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class PlaceError(OktopkError, ValueError):
    """An environment with a wrong or incomplete place of this worker."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker among the others.

    launcher       name of the program that started it
    local_rank     its number on this machine
    local_size     workers on this machine
    job            a name that no other job has, if known: two jobs at one port do not take each other's workers
    """

    launcher: str
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_addr: str = HERE
    master_port: int = 0
    job: str = ""

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
        if STARTER in os.environ:
            threading.Thread(target=_end_with, args=(int(os.environ[STARTER]),), daemon=True).start()
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

    def _resolve(self) -> tuple[socket.AddressFamily, str]:
        """Return the address of rank 0's host. Every rank checks it, so that none waits for one that has failed."""
        try:
            family, *_, found = socket.getaddrinfo(self.master_addr, self.master_port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise PlaceError(
                f"{self.master_addr}, where rank 0 waits for the others, is no host that rank {self.rank} knows "
                f"({error.strerror}): set MASTER_ADDR, for all ranks alike"
            ) from error
        address = str(found[0])
        if not self.on_one_host and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            raise PlaceError(
                f"{self.master_addr}, where rank 0 waits for the others, is {address} on the host of rank {self.rank}, "
                "which no other machine can reach: set MASTER_ADDR, for all ranks alike, to an address that all can"
            )
        return family, address

    def _reach(self, timeout: timedelta) -> Store:
        self._resolve()  # the store itself would try until the timeout
        try:
            return TCPStore(self.master_addr, self.master_port, self.size, False, timeout, wait_for_workers=False)
        except RuntimeError as error:  # the base class of torch's DistError
            raise PeerError(
                f"rank {self.rank} cannot reach rank 0 at {self.master_addr}:{self.master_port} within "
                f"{timeout.total_seconds():g} s: is it running, is MASTER_ADDR its host, is the port open?"
            ) from error

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
