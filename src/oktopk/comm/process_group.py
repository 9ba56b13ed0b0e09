"""Ranks as processes: `torch.distributed`, whatever its backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.comm.base import Collectives
from oktopk.errors import PeerError

STORE_ANSWERS_S = 2.0
"""A store that answers does so at once; one whose host is frozen never does, whatever timeout it was given."""

LARGE_BYTES = 1 << 18
"""Rows from which it pays to send them one by one: at 1 Gbit/s and P = 4, 0.7 MB rows take 21 ms, not 28."""

_FAILED = "oktopk/failed"
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class ProcessGroupComm(Collectives):
    """The ranks of a process group (default: all). Every wait ends after the timeout that the group was made with."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise PeerError("torch.distributed is not set up: call init_process_group first, or use run_local")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Comm`."""
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> _UnderWay:
        """See `Comm`."""
        with self._naming_the_culprit():
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return _UnderWay(self, tensor, [] if work is None else [work])

    def all_gather(self, block: Tensor) -> Tensor:
        """See `Comm`."""
        out = block.new_empty(self.size * len(block))
        with self._naming_the_culprit():
            _all_gather(out, block.contiguous(), group=self.group)
        return out.view(self.size, len(block))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Comm`."""
        out = blocks.new_empty(sum(receive))
        with self._naming_the_culprit():
            dist.all_to_all_single(out, blocks.contiguous(), list(receive), list(send), group=self.group)
        return out

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """See `Comm`: large rows one by one, all at the same time, since gloo's collective uses half the link."""
        if not self._is_gloo() or blocks.is_cuda or blocks[0].nbytes < LARGE_BYTES:  # its send knows no GPU
            return super().all_to_all(blocks)
        arriving = torch.empty_like(blocks)
        arriving[self.rank] = blocks[self.rank]
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        with self._naming_the_culprit():
            receiving = [dist.irecv(arriving[peer], self._global(peer), self.group) for peer in reversed(others)]
            sending = [dist.isend(blocks[peer], self._global(peer), self.group) for peer in others]
            for work in (*receiving, *sending):
                if work is not None:
                    work.wait()
        return arriving

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> _UnderWay:
        """See `Comm`."""
        via = "cpu" if self._is_gloo() else device  # gloo's send and recv know no GPU
        block = None if block is None else block.to(via)
        arriving = torch.empty(size, dtype=torch.int32, device=via)
        ops = []
        if block is not None:
            ops.append(dist.P2POp(dist.isend, block.contiguous(), self._global(to), self.group))
        if size:
            ops.append(dist.P2POp(dist.irecv, arriving, self._global(source), self.group))
        with self._naming_the_culprit():
            works = dist.batch_isend_irecv(ops) if ops else []
        return _UnderWay(self, arriving, works, ops, device)

    def fail(self, error: BaseException) -> None:
        """See `Comm`: the message waits in the group's store until the others' collectives break."""
        message = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        telling = threading.Thread(target=self._tell, args=(message,), daemon=True)
        telling.start()
        telling.join(STORE_ANSWERS_S)

    def _tell(self, message: str) -> None:
        try:
            self.group.get_group_store().set(_FAILED, message)
        except RuntimeError:  # the store's own process is gone, and the others will notice that themselves
            return

    def _is_gloo(self) -> bool:
        return bool(dist.get_backend(self.group) == "gloo")

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def _naming_the_culprit(self) -> _NamingTheCulprit:
        return _NamingTheCulprit(self.group)


@dataclass
class _UnderWay:
    comm: ProcessGroupComm
    arriving: Tensor
    works: list[dist.Work]
    outgoing: list[dist.P2POp] = field(default_factory=list)  # alive until they have left
    device: torch.device | str | None = None

    def wait(self) -> Tensor:
        with self.comm._naming_the_culprit():
            for work in self.works:
                work.wait()
        return self.arriving if self.device is None else self.arriving.to(self.device)


@dataclass
class _NamingTheCulprit:
    """Turns a collective that broke into the error of the rank that broke it, where that rank could say so."""

    group: dist.ProcessGroup

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerError(self._cause() or f"another rank died, left or was cut off: {error}") from error

    def _cause(self) -> str | None:
        """Return what the rank that failed left in the store, if it answers: its host may be the one that is gone."""
        answers: list[str | None] = []
        asking = threading.Thread(target=self._ask, args=(answers,), daemon=True)
        asking.start()
        asking.join(STORE_ANSWERS_S)
        return answers[0] if answers else None

    def _ask(self, answers: list[str | None]) -> None:
        store = self.group.get_group_store()
        try:
            answers.append(store.get(_FAILED).decode() if store.check([_FAILED]) else None)
        except RuntimeError:  # the store's own process is gone: the broken collective is all we know
            answers.append(None)
