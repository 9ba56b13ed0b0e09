"""One step of bounded Ok-Topk that never leaves the device: no count, threshold or verdict is asked for by the host.

The steps are those of `bounded.py`; only, what is kept is told by thresholds, so that ties of the last element are kept
with it as far as there is room. What does not fit waits in the residual, as it does there.

    0  aim        the threshold, from a sample of residual + gradient
    1  find       acc = residual + gradient; what reaches the threshold, tile by tile           one pass
    2  send       into a block for each owner: at most c = ceil(slack k/P) pairs
    3  exchange   all_to_all
    4  own        the owner sums in rank order and keeps its share of the largest, at most c
    5  gather     all_gather
    6  deliver    the mean into the result; what was delivered out of the residual
"""

from __future__ import annotations

import importlib
from collections import deque
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oktopk.algorithms.base import OkTopkState
from oktopk.algorithms.bounded import room
from oktopk.algorithms.oktopk import OkTopk
from oktopk.kernels import blocks
from oktopk.kernels.blocks import HEADER_WORDS, Found, room_for
from oktopk.select import SAMPLE_HITS, num_selected

if TYPE_CHECKING:
    from oktopk.comm.base import Comm

REBALANCE_EVERY = 16
MOST_NUMEL = 1 << 31
"""Elements of a region: indices in a block are counted from its start."""

LATE = 2
"""Steps after which the host looks at what a step did: it has long been done then, and nobody waits."""


@dataclass(frozen=True)
class Told:
    """What a step did, as the host learns of it."""

    selected: int
    nnz: int
    bad: int
    threshold: float
    kept_threshold: float


@dataclass
class _Telling:
    """The same on its way to the host."""

    size: int
    words: Tensor
    done: torch.cuda.Event | None

    def wait(self) -> Told:
        if self.done is not None:
            self.done.synchronize()
        heads = self.words[:-2].view(2, self.size, HEADER_WORDS)
        thresholds = self.words[-2:].view(torch.float32)
        return Told(
            selected=int(heads[0, :, 0].sum()),
            nnz=int(heads[1, :, 0].sum()),
            bad=int(heads[1, :, 1].sum()),
            threshold=float(thresholds[0]),
            kept_threshold=float(thresholds[1]),
        )


@dataclass
class Resident:
    """The buffers and the state of a vector's steps, all on its device, made once."""

    numel: int
    comm: Comm
    wanted: int
    capacity: int
    kernels: Any
    found: Found
    kept: Found | None
    region: Tensor
    blocks: Tensor
    mine: Tensor
    cuts: Tensor
    threshold: Tensor
    kept_threshold: Tensor
    step: int
    told: deque[_Telling] = field(default_factory=deque)

    @staticmethod
    def make(algorithm: OkTopk, state: OkTopkState, comm: Comm, device: torch.device) -> Resident:
        """Return what goes on from `state`."""
        numel, size = state.numel, comm.size
        wanted = num_selected(numel, algorithm.density)
        capacity = room(wanted, algorithm.slack, size)
        words, slots = HEADER_WORDS + 2 * capacity, room_for(algorithm.density)
        alone = size == 1
        return Resident(
            numel=numel,
            comm=comm,
            wanted=wanted,
            capacity=capacity,
            kernels=_kernels_on(device),
            found=Found.make(numel, slots, device),
            kept=None if alone else Found.make(numel, slots, device),
            region=torch.zeros(0 if alone else numel, device=device),
            blocks=torch.zeros(size, words, dtype=torch.int32, device=device),
            mine=torch.zeros(1, words, dtype=torch.int32, device=device),
            cuts=state.cuts.to(device),
            threshold=torch.tensor([state.threshold], device=device),
            kept_threshold=torch.tensor([state.global_threshold], device=device),
            step=state.step,
        )

    def reduce_(self, grad: Tensor, held: Tensor, acc: Tensor, out: Tensor) -> None:
        """Make `out` the mean over ranks of what this step delivers, and `acc` what remains of held + grad."""
        comm, kernels = self.comm, self.kernels
        with comm.phase("select"):
            self._aim_(grad, held)
            kernels.find(grad, held, acc, self.threshold, self.found)
        with comm.phase("pack"):
            kernels.send(self.found, self.cuts, self.step, self.blocks, self.capacity)
        with comm.phase("exchange"):
            arrived = comm.all_to_all_even(self.blocks)
        with comm.phase("reduce"):
            block = arrived if self.kept is None else self._own(arrived, self.kept)
        with comm.phase("gather"):
            gathered = comm.all_gather(block.view(-1))
        with comm.phase("apply"):
            kernels.deliver(gathered, self.blocks, self.cuts, self.capacity, out, acc, held)
            self._tell(gathered)
            if self.step % REBALANCE_EVERY == 0 and self.wanted < self.numel and self.comm.size > 1:
                self._rebalance_(gathered)
        self.step += 1

    def _aim_(self, grad: Tensor, held: Tensor) -> None:
        """Measure the threshold on a sample, which begins elsewhere at every step; its stride is odd, unlike most rows.

        A threshold that is moved by what it let through has a loop, and swings where gradients resemble each other.
        """
        if self.wanted == self.numel:
            self.threshold.zero_()
            return
        stride = max(self.wanted // SAMPLE_HITS, 1) | 1
        start = self.step % stride
        sample = (held[start::stride] + grad[start::stride]).abs()
        k = min(max(round(self.wanted * len(sample) / self.numel), 1), len(sample))
        self.threshold.copy_(sample.topk(k).values[-1:])

    def _own(self, arrived: Tensor, kept: Found) -> Tensor:
        """Return the block of what this rank, as an owner, keeps of what arrived."""
        kernels, rank = self.kernels, self.comm.rank
        slots = torch.arange(self.capacity, device=arrived.device)
        there = slots < arrived[:, :1]
        index = torch.where(there, arrived[:, HEADER_WORDS : HEADER_WORDS + self.capacity], 0).long()
        first = []  # whether a pair is the first of its index
        for block, here, at in zip(arrived, there, index, strict=True):
            first.append(here & (self.region[at] == 0))
            kernels.add(block, self.capacity, self.region)
        demand = _demands(arrived).sum()
        self._aim_at_share_(torch.where(torch.stack(first), self.region[index].abs(), 0), demand)
        ends = self.cuts[rank : rank + 2] - self.cuts[rank]
        kernels.find_in(self.region, self.kept_threshold, kept, ends[1:])
        kept.bad[0] += arrived[:, 1].sum()
        kernels.send(kept, ends, self.step, self.mine, self.capacity)
        self.mine[0, 2:4] = torch.stack([demand & blocks.LOW, demand >> 31])  # for all to cut fairer regions by
        for block in arrived:
            kernels.add(block, self.capacity, self.region, 0)
        return self.mine

    def _aim_at_share_(self, size: Tensor, demand: Tensor) -> None:
        """Make the owner's threshold the one that lets its share of these pass: what the ranks wanted of it, over P."""
        if self.wanted == self.numel:
            self.kept_threshold.zero_()
            return
        share = ((demand + self.comm.size - 1) // self.comm.size).clamp(1, self.capacity)
        largest = size.view(-1).topk(self.capacity).values
        self.kept_threshold.copy_(largest.gather(0, (share - 1).view(1)))  # by [], the host would ask for it

    def _rebalance_(self, gathered: Tensor) -> None:
        """Cut fairer regions if one was asked for more than fits: all ranks have the same `gathered`, and agree."""
        size, capacity = self.comm.size, self.capacity
        there = torch.arange(capacity, device=gathered.device) < gathered[:, :1]
        index = gathered[:, HEADER_WORDS : HEADER_WORDS + capacity] + self.cuts[:-1, None]
        demand = _demands(gathered)
        weight = (demand << 16) // gathered[:, 0].clamp(min=1)
        mass = torch.where(there, weight[:, None], 0).view(-1).cumsum(0)
        goals = mass[-1] * torch.arange(1, size, device=mass.device) // size
        fairer = index.view(-1)[torch.searchsorted(mass, goals, right=True).clamp(max=len(mass) - 1)]
        unfair = (demand.max() > capacity * size) & (mass[-1] > 0)
        self.cuts[1:-1] = torch.where(unfair, fairer, self.cuts[1:-1])

    def _tell(self, gathered: Tensor) -> None:
        """Start to tell the host what this step did."""
        heads = [self.blocks[:, :HEADER_WORDS].reshape(-1), gathered[:, :HEADER_WORDS].reshape(-1)]
        words = torch.cat([*heads, self.threshold.view(torch.int32), self.kept_threshold.view(torch.int32)])
        if words.is_cuda:
            here = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            here.copy_(words, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self.told.append(_Telling(self.comm.size, here, done))
        else:
            self.told.append(_Telling(self.comm.size, words, None))

    def save_(self, state: OkTopkState) -> None:
        """Bring the state to the host: for a checkpoint."""
        state.step, state.cuts = self.step, self.cuts.cpu()
        state.threshold, state.global_threshold = float(self.threshold), float(self.kept_threshold)


def can_stay(algorithm: OkTopk, numel: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is such a step for this algorithm and vector: bounded, float32 on the wire, by magnitude."""
    if device.type != "cuda" or dtype == torch.float64 or numel >= MOST_NUMEL or not _has_triton():
        return False
    return algorithm.mode == "bounded" and algorithm.wire == "fp32" and algorithm.ranking == "magnitude"


def _demands(heads: Tensor) -> Tensor:
    """Return how many pairs each block's sender wanted to send."""
    return heads[:, 2].long() + (heads[:, 3].long() << 31)


def _kernels_on(device: torch.device) -> Any:
    return blocks if device.type == "cpu" else importlib.import_module("oktopk.kernels.triton")


def _has_triton() -> bool:
    return find_spec("triton") is not None
