"""`DeviceLane`: the sparse steps of a lane that never wait for the host.

The gradients are copied into one vector, in the lane's order; its sparse part is reduced by `Resident`, the rest
summed; the means are copied back when all lanes of the step are done. Whether a NaN or Inf was met anywhere is known on
the device alone by then: if so, a kernel puts every lane's residual back, and the means become zeros, or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.algorithms.base import Reduced
from oktopk.algorithms.resident import Resident, Told, kernels_on
from oktopk.comm import Metered, Traffic
from oktopk.lanes import Lane
from oktopk.plan import Plan
from oktopk.sparse import Sparse
from oktopk.telemetry import StepRecord


class DeviceLane:
    """A lane whose steps stay on the device, for one algorithm."""

    def __init__(self, lane: Lane, algorithm: OkTopk, comm: Metered) -> None:
        held = lane.residual.held
        lane.prepare_(algorithm, comm)
        self.lane, self.algorithm = lane, algorithm
        self.words = torch.zeros(Told.NUM_WORDS, dtype=torch.int32, device=held.device)
        self.flat = torch.empty(held.numel(), dtype=lane.dtype, device=held.device)
        self._split = lane.num_sparse
        self._resident = Resident.make(algorithm, lane.state, comm, held.device) if self._split else None
        self._parts = [self.flat[span] for span in lane.spans.values()]
        self._grads: list[Tensor] = []

    def start_(self, grads: Mapping[str, Tensor], comm: Metered) -> Traffic:
        """Reduce these gradients; return what that sent. `words` tell what it did, on the device."""
        self.lane.made = True
        self._grads = [grads[name] for name in self.lane.spans]
        with comm.phase("accumulate"):
            torch._foreach_copy_(self._parts, self._grads)
        residual, split = self.lane.residual, self._split
        if self._resident is not None:
            part = self.flat[:split]
            self._resident.reduce_(part, residual.held[:split], residual.acc[:split], part)
            self.words.copy_(self._resident.words)
        self._reduce_side_(residual.held[split:], residual.acc[split:], self.flat[split:], comm)
        return comm.take()

    def _reduce_side_(self, held: Tensor, total: Tensor, part: Tensor, comm: Metered) -> None:
        """Sum what travels dense. All ranks see alike whether that sum is finite."""
        if not len(part):
            return
        with comm.phase("side"):
            torch.add(held, part, out=total)
            comm.all_reduce(total)
        with comm.phase("apply"):
            self.words[2:3] += (~total.isfinite()).any()
            self.lane.deliver_dense_(part, total, 1 / comm.size, loss_scale=1.0)

    def settle_(self, bad: Tensor, plan: Plan, delivers_nan: bool) -> None:
        """Hand the means out, and commit; if `bad`, on the device, is not zero, all is as if the step had not been."""
        residual = self.lane.residual
        kernels_on(self.flat.device).settle(
            bad, residual.acc, residual.held, self.flat, math.nan if delivers_nan else 0.0
        )
        torch._foreach_copy_(self._grads, self._parts)
        self._grads = []
        self.lane.commit_(plan)

    def record(self, told: Told, traffic: Traffic, plan: Plan, size: int) -> StepRecord:
        """Return what a step did, once the host has been told."""
        reduced = Reduced(
            Sparse.empty(self._split, self.lane.residual.held), slice(0), selected=told.selected,
            threshold=told.threshold, global_threshold=told.kept_threshold,
        )  # fmt: skip
        return self.lane.record(self._split, reduced, plan, traffic, size, pairs=told.nnz)

    def save_(self) -> None:
        """Bring the algorithm's state to the host, into the lane."""
        if self._resident is not None:
            self._resident.save_(self.lane.state)
