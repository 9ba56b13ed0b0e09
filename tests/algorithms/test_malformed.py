"""A rank whose messages are spoilt on their way: who receives one says so, and nobody waits for long."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.words import HEADER_WORDS
from tests.cases import algorithms

LIAR, HONEST = 1, 0


class Spoilt(oktopk.Comm):
    """A comm in which rank 0 receives something else from rank 1."""

    def __init__(self, comm: Any, spoil_: Callable[[Tensor], None]) -> None:
        self._comm, self._spoil_, self.rank, self.size = comm, spoil_, comm.rank, comm.size

    def fail(self, error: BaseException) -> None:
        self._comm.fail(error)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._comm.all_reduce(tensor)

    def all_gather(self, block: Tensor) -> Tensor:
        return self._spoilt(self._comm.all_gather(block))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        came = self._comm.all_to_all_single(blocks, send, receive)
        return torch.cat(list(self._spoilt(list(torch.split(came, list(receive))))))

    def sendrecv(self, block: Any, to: int, source: int, size: int, device: Any = "cpu") -> Any:
        pending = self._comm.sendrecv(block, to, source, size, device)
        return oktopk.comm.Pending(lambda: self._spoilt({LIAR: pending.wait()})[LIAR]) if source == LIAR else pending

    def _spoilt(self, blocks: Any) -> Any:
        if self._comm.rank == HONEST and len(blocks[LIAR]):
            self._spoil_(blocks[LIAR])
        return blocks


def spoil_pairs_(word: int, written: int, block: Tensor) -> None:
    if block.dtype == torch.int32 and len(block) > HEADER_WORDS:
        block[word] = written


def spoil_sizes_(written: int, block: Tensor) -> None:
    if block.dtype == torch.int64 and len(block) == 1 and block[0] != 0:  # not the verdict, which is 0
        block[0] = written


HEADERS = ("oktopk-bounded-as-is", "oktopk-paper-scaled-bf16", "topka-fp32", "topkdsa-int8", "gtopk-bf16")
HEADERS += ("gaussiank-fp32",)
SIZES = ("oktopk-paper-magnitude-fp32", "topkdsa-fp32", "gaussiank-bf16")


@pytest.mark.parametrize(("name", "spoil_"), [
    *((name, partial(spoil_pairs_, 0, count)) for name in HEADERS for count in (-1, 2**31 - 1)),
    *((name, partial(spoil_sizes_, size)) for name in SIZES for size in (-1, 2**40)),  # no room is made for them
    ("oktopk-bounded-as-is", partial(spoil_pairs_, 3, 2**31 - 1)),  # a demand of 2^62 pairs would overflow the cuts
])  # fmt: skip
def test_a_header_size_or_demand_that_cannot_be(name: str, spoil_: Callable[[Tensor], None]) -> None:
    """In a step of two ranks, the one that receives from the other says what is wrong, and with whom."""

    def work(comm: Any) -> None:
        reducer = oktopk.Reducer(algorithms(0.02)[name], Spoilt(comm, spoil_))
        reducer.all_reduce(torch.randn(60_000, generator=torch.Generator().manual_seed(comm.rank)))

    with pytest.raises(oktopk.MalformedError, match="malformed message from rank 1: ") as caught:
        oktopk.run_local(2, work)
    assert caught.value.rank == LIAR
