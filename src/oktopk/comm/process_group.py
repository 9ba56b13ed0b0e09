"""Ranks as processes: `torch.distributed`, whatever its backend."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.comm.base import Comm, Pending
from oktopk.comm.grid import gather_in_two_levels, has_two_levels
from oktopk.errors import PeerError
from oktopk.words import WORD_BYTES

STORE_ANSWERS_S = 2.0
"""Seconds to wait for the store, because one whose host is frozen never answers, whatever its own timeout."""

LARGE_BYTES = 1 << 18
"""Bytes of a row from which rows are sent one by one, because 0.7 MB rows then take 21 ms, not 28 (1 Gbit/s, P = 4)."""

_FAILED = "oktopk/failed"
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class ProcessGroupComm(Comm):
    """The ranks of a process group (default: all). Every wait ends after the timeout that the group was made with."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise PeerError("torch.distributed is not set up: call init_process_group first, or use run_local")
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        with _NamingTheCulprit(self.group):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def wait() -> Tensor:
            self._wait_for([work])
            return tensor

        return Pending(wait)

    def all_gather(self, block: Tensor) -> Tensor:
        """Send a small block to all others at once, because gloo's ring takes P - 1 times the latency.

        Many ranks gather in two levels, because a message takes a host's time, too. Gloo sends empty ones as well.
        """
        if self.size > 2 and block.nbytes < LARGE_BYTES and self._is_gloo():
            if has_two_levels(self.size) and block.element_size() >= WORD_BYTES:
                return gather_in_two_levels(self, block.contiguous().view(torch.int32)).view(block.dtype)
            sizes = [len(block)] * self.size
            return self.all_to_all_single(block.repeat(self.size), sizes, sizes).view(self.size, len(block))
        out = block.new_empty(self.size * len(block))
        with _NamingTheCulprit(self.group):
            _all_gather(out, block.contiguous(), group=self.group)
        return out.view(self.size, len(block))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = blocks.new_empty(sum(receive))
        with _NamingTheCulprit(self.group):
            dist.all_to_all_single(out, blocks.contiguous(), list(receive), list(send), group=self.group)
        return out

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """Send large rows one by one, all at the same time, because gloo's collective uses half the link."""
        if not self._is_gloo() or blocks.is_cuda or blocks[0].nbytes < LARGE_BYTES:  # its send knows no GPU
            return super().all_to_all(blocks)
        arriving = torch.empty_like(blocks)
        arriving[self.rank] = blocks[self.rank]
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        with _NamingTheCulprit(self.group):
            receiving = [dist.irecv(arriving[peer], self._global(peer), self.group) for peer in reversed(others)]
            sending = [dist.isend(blocks[peer], self._global(peer), self.group) for peer in others]
        self._wait_for([*receiving, *sending])
        return arriving

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        via = "cpu" if self._is_gloo() else device  # gloo's send and recv know no GPU
        block = None if block is None else block.to(via)
        arriving = torch.empty(size, dtype=torch.int32, device=via)
        ops = []
        if block is not None:
            ops.append(dist.P2POp(dist.isend, block.contiguous(), self._global(to), self.group))
        if size:
            ops.append(dist.P2POp(dist.irecv, arriving, self._global(source), self.group))
        with _NamingTheCulprit(self.group):
            works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> Tensor:
            self._wait_for(works)
            ops.clear()  # alive until they have left
            return arriving.to(device)

        return Pending(wait)

    def fail(self, error: BaseException) -> None:
        """Leave the message in the group's store, where the others find it when their collectives break."""
        message = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        _ask_store(self.group, lambda store: store.set(_FAILED, message))

    def _wait_for(self, works: Sequence[dist.Work | None]) -> None:
        with _NamingTheCulprit(self.group):
            for work in works:
                if work is not None:
                    work.wait()

    def _is_gloo(self) -> bool:
        return bool(dist.get_backend(self.group) == "gloo")

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


@dataclass
class _NamingTheCulprit:
    """Turn the error of a broken collective into that of the rank that broke it, where that rank left one."""

    group: dist.ProcessGroup

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            left = _ask_store(self.group, lambda store: store.get(_FAILED).decode() if store.check([_FAILED]) else None)
            raise PeerError(left or f"another rank died, left or was cut off: {error}") from error


def _ask_store(group: dist.ProcessGroup, ask: Callable[[Any], Any]) -> Any:
    """Return the store's answer; None if its process is gone or frozen."""
    answers: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):  # its process is gone
            answers.append(ask(group.get_group_store()))

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(STORE_ANSWERS_S)
    return answers[0] if answers else None
