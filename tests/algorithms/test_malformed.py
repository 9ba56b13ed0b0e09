"""A rank whose messages are spoilt on their way: who receives one says so, and nobody waits for long."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import oktopk
from oktopk.codec import HEADER_WORDS
from tests.cases import algorithms

LIAR, HONEST = 1, 0
MORE_THAN_THERE_ARE = 2**40


class Spoilt:
    """A comm in which rank 0 receives something else from rank 1."""

    def __init__(self, comm: Any, spoil_: Callable[[Tensor], None]) -> None:
        self._comm, self._spoil_ = comm, spoil_

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather(self, block: Tensor) -> Tensor:
        return self._spoilt(self._comm.all_gather(block))

    def all_to_all(self, blocks: Tensor) -> Tensor:
        return self._spoilt(self._comm.all_to_all(blocks))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        came = self._comm.all_to_all_single(blocks, send, receive)
        return torch.cat(list(self._spoilt(list(torch.split(came, list(receive))))))

    def all_to_all_v(self, blocks: Sequence[Tensor], most: int | None = None) -> list[Tensor]:
        return oktopk.comm.base.Collectives.all_to_all_v(self, blocks, most)

    def sendrecv(self, block: Any, to: int, source: int, size: int, device: Any = "cpu") -> Any:
        pending = self._comm.sendrecv(block, to, source, size, device)
        return oktopk.comm.base.Arrived(self._spoilt({LIAR: pending.wait()})[LIAR]) if source == LIAR else pending

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


def check(name: str, spoil_: Callable[[Tensor], None]) -> None:
    """Make one step on two ranks: the one that receives from the other says what is wrong, and with whom."""

    def work(comm: Any) -> None:
        reducer = oktopk.Reducer(algorithms(0.02)[name], Spoilt(comm, spoil_))
        reducer.all_reduce(torch.randn(60_000, generator=torch.Generator().manual_seed(comm.rank)))

    with pytest.raises(oktopk.MalformedError, match="malformed message from rank 1: ") as caught:
        oktopk.run_local(2, work)
    assert caught.value.rank == LIAR


@pytest.mark.parametrize("count", [-1, 2**31 - 1])
@pytest.mark.parametrize(
    "name",
    ["oktopk-bounded-as-is", "oktopk-paper-scaled-bf16", "topka-fp32", "topkdsa-int8", "gtopk-bf16", "gaussiank-fp32"],
)
def test_a_header_that_cannot_be(name: str, count: int) -> None:
    check(name, functools.partial(spoil_pairs_, 0, count))


@pytest.mark.parametrize("size", [-1, MORE_THAN_THERE_ARE])
@pytest.mark.parametrize("name", ["oktopk-paper-magnitude-fp32", "topkdsa-fp32", "gaussiank-bf16"])
def test_a_size_that_cannot_be(name: str, size: int) -> None:
    """Nothing of it is made room for."""
    check(name, functools.partial(spoil_sizes_, size))


def test_a_demand_that_cannot_be() -> None:
    """2^62 pairs wanted of one region would overflow what cuts the regions anew."""
    check("oktopk-bounded-as-is", functools.partial(spoil_pairs_, 3, 2**31 - 1))
