"""`Comm`: the collectives that an algorithm may call, on threads or on processes."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oktopk.errors import MalformedError


@dataclass(frozen=True)
class Pending:
    """A message under way: `wait` returns the tensor that arrives."""

    wait: Callable[[], Tensor]


class Comm(Protocol):
    """P ranks that call the same collectives in the same order. All tensors are 1-D; a collective has one dtype.

    The methods with a body follow from the abstract ones, for every comm that inherits them.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, in place, with the same bits on all of them."""

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Start an `all_reduce`; several may be under way."""
        total = self.all_reduce(tensor)
        return Pending(lambda: total)

    @abstractmethod
    def all_gather(self, block: Tensor) -> Tensor:
        """Return all ranks' blocks, of one size, in rank order: shape (P, len(block))."""

    @abstractmethod
    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the first `send[0]` elements to rank 0, and so on; return `receive[0]` elements of rank 0, and so on."""

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """Send row i to rank i; return one row from each rank. Rows are of one size, on all ranks."""
        sizes = [blocks.shape[1]] * self.size
        return self.all_to_all_single(blocks.view(-1), sizes, sizes).view_as(blocks)

    def all_to_all_v(self, blocks: Sequence[Tensor], most: int | None = None) -> list[Tensor]:
        """Send `blocks[i]` to rank i, of any size: sizes travel first. Return one block from each rank.

        A rank that announces a block of more than `most` elements, or of fewer than none, is refused.
        """
        send, ones = [len(block) for block in blocks], [1] * self.size
        sizes = torch.tensor(send, dtype=torch.int64, device=blocks[0].device)
        receive = self.all_to_all_single(sizes, ones, ones).tolist()
        for source, size in enumerate(receive):  # room is made for them
            if size < 0 or (most is not None and size > most):
                limit = "more" if most is None else f"to {most}"
                raise MalformedError(f"it announces a block of {size} elements, where it can be 0 {limit}", source)
        return list(torch.split(self.all_to_all_single(torch.cat(list(blocks)), send, receive), receive))

    @abstractmethod
    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        """Start sending `block` to `to` (None: nothing) and receiving `size` int32 words on `device` from `source`."""

    def phase(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """Name the part of a step that runs inside, for measurements."""
        return nullcontext()

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one will not be there any more."""
