"""`GroupComm`: a torchft process group as a `Comm`. torchft reconfigures it, so that torch.distributed has none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from oktopk.comm import Comm, Pending
from oktopk.errors import PeerError


class GroupComm(Comm):
    """The members of one quorum. Every wait ends after the timeout that the group was made with."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        with _Refusing():
            work = self.group.allreduce([tensor], AllreduceOptions())

        def wait() -> Tensor:
            _wait_for(work)
            return tensor

        return Pending(wait)

    def all_gather(self, block: Tensor) -> Tensor:
        out = block.new_empty(self.size, len(block))
        with _Refusing():
            work = self.group.allgather([list(out)], [block.contiguous()], AllgatherOptions())
        _wait_for(work)
        return out

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = blocks.new_empty(sum(receive))
        with _Refusing():
            work = self.group.alltoall_base(out, blocks.contiguous(), list(receive), list(send), AllToAllOptions())
        _wait_for(work)
        return out

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        block = None if block is None else block.to("cpu").contiguous()
        arriving = torch.empty(size, dtype=torch.int32)
        with _Refusing():
            works = [] if block is None else [self.group.send([block], to, 0)]
            works += [self.group.recv([arriving], source, 0)] if size else []

        def wait() -> Tensor:
            for work in works:
                _wait_for(work)
            assert block is None or block.numel() >= 0  # alive until it has left
            return arriving.to(device)

        return Pending(wait)

    def fail(self, error: BaseException) -> None:  # noqa: ARG002
        """Close the connections, so that nobody waits for this member: the next quorum makes new ones."""
        self.group.abort()


class _Refusing:
    """Turn the errors of a broken group into a `PeerError`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, AssertionError)):  # torchft asserts that a group is there
            raise PeerError(f"a member died, left or was cut off: {error}") from error


def _wait_for(work: Any) -> None:
    with _Refusing():
        work.wait()
