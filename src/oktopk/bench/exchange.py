"""`oktopk bench exchange`: one exchange of a flat gradient, by each method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.algorithms import Algorithm
from oktopk.bench.gradients import make_pool
from oktopk.bench.hooks import hook_powersgd, wrap
from oktopk.bench.methods import METHODS, AllReduce, Entry, Ours
from oktopk.bench.rounds import Candidate, Sample, Samples, take_turns
from oktopk.comm import MeteredComm, ProcessGroupComm
from oktopk.reducer import Reducer

MATRIX_SIDE = 2048
"""Largest side of the matrices that the gradient is cut into for PowerSGD."""


def time_exchange(numel: int, entries: Sequence[Entry], samples: Samples) -> list[list[Sample]]:
    """Return the samples of each entry on this rank."""
    pool, scratch = make_pool(numel), torch.zeros(numel)
    return take_turns([make_candidate(entry, pool, scratch) for entry in entries], samples)


def make_candidate(entry: Entry, pool: Sequence[Tensor], scratch: Tensor) -> Candidate:
    """Return the candidate that exchanges the gradients of `pool` in turn, into `scratch` unless it is PowerSGD."""
    method = METHODS[entry.method]
    if isinstance(method, Ours):
        assert entry.density is not None
        return _Reduction(method.make(entry.density), pool, scratch)
    return _Sum(method.dtype, pool, scratch) if isinstance(method, AllReduce) else _LowRank(method.rank, pool)


class _Reduction:
    """One `Reducer.all_reduce` into a result that is allocated."""

    def __init__(self, algorithm: Algorithm, pool: Sequence[Tensor], scratch: Tensor) -> None:
        self.pool, self.out = pool, scratch
        self.reducer = Reducer(algorithm, ProcessGroupComm())

    def prepare(self, number: int) -> None:
        pass

    def run(self, number: int) -> None:
        self.reducer.all_reduce(self.pool[number % len(self.pool)], out=self.out)

    def account(self) -> Sample:
        assert self.reducer.last is not None
        return {"record_bytes": self.reducer.last.sent_bytes, "parts": dict(self.reducer.last.seconds)}


class _Sum:
    """`all_reduce` in place, as DDP does it: float32 is in its bucket already, and nothing divides by P.

    Another dtype is cast into a buffer that is allocated, summed, and cast back.
    """

    def __init__(self, dtype: torch.dtype, pool: Sequence[Tensor], scratch: Tensor) -> None:
        self.pool, self.out, self.comm = pool, scratch, MeteredComm(ProcessGroupComm())
        self.narrow = None if dtype == scratch.dtype else torch.zeros(len(scratch), dtype=dtype)

    def prepare(self, number: int) -> None:
        if self.narrow is None:
            self.out.copy_(self.pool[number % len(self.pool)])

    def run(self, number: int) -> None:
        if self.narrow is None:
            self.comm.all_reduce(self.out)
            return
        self.narrow.copy_(self.pool[number % len(self.pool)])
        self.comm.all_reduce(self.narrow)
        self.out.copy_(self.narrow)

    def account(self) -> Sample:
        return {"record_bytes": self.comm.pop().sent_bytes, "parts": {}}


class _LowRank:
    """PowerSGD's hook under a DDP whose backward hands the gradient over, with one copy into DDP's bucket."""

    def __init__(self, rank: int, pool: Sequence[Tensor]) -> None:
        shapes = matrices_of(len(pool[0]))
        sizes = [rows * columns for rows, columns in shapes]
        self.grads = [
            [part.view(shape) for part, shape in zip(torch.split(grad, sizes), shapes, strict=True)] for grad in pool
        ]
        self.model = wrap(_Matrices(shapes), one_bucket=True)
        hook_powersgd(self.model, rank)

    def prepare(self, number: int) -> None:  # noqa: ARG002
        self.model.zero_grad()

    def run(self, number: int) -> None:
        self.model(self.grads[number % len(self.grads)]).backward()

    def account(self) -> Sample:
        return {"record_bytes": None, "parts": {}}


class _Matrices(nn.Module):
    """Parameters of these shapes, whose gradients are the arguments of the call."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, grads: Sequence[Tensor]) -> Tensor:
        handed_over: Tensor = _HandOver.apply(grads, *self.matrices)  # type: ignore[no-untyped-call]
        return handed_over


class _HandOver(torch.autograd.Function):
    """A scalar whose gradients by the parameters are given."""

    @staticmethod
    def forward(ctx: Any, grads: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.grads)


def matrices_of(numel: int) -> list[tuple[int, int]]:
    """Return shapes that add up to `numel` elements, as square as possible.

    >>> matrices_of(10)
    [(3, 3), (1, 1)]
    """
    side = min(MATRIX_SIDE, int(numel**0.5))
    rows, rest = divmod(numel, side)
    shapes = [(min(side, rows - first), side) for first in range(0, rows, side)]
    return shapes + ([(1, rest)] if rest else [])
