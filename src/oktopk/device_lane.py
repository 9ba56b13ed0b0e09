"""`DeviceLane`: the sparse steps of a lane that never wait for the host.

The gradients are copied into one vector, in the lane's order; its sparse part is reduced by `Resident`, the rest
summed; the means are copied back when all lanes of the step are done. Whether a NaN or Inf was met anywhere is known on
the device alone by then: if so, a kernel puts every lane's residual back, and the means become zeros, or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.algorithms.resident import Resident, Told, kernels_on
from oktopk.comm import Metered, Traffic
from oktopk.lanes import Lane
from oktopk.plan import Plan
from oktopk.telemetry import StepRecord
from oktopk.values import round_to


class DeviceLane:
    """A lane whose steps stay on the device, for one algorithm. `words` tell what the last one did, see `Told`."""

    def __init__(self, lane: Lane, algorithm: OkTopk, comm: Metered) -> None:
        held = lane.residual.held
        lane.prepare_(algorithm, comm)
        self.lane, self.algorithm = lane, algorithm
        self.flat = torch.empty(held.numel(), dtype=lane.dtype, device=held.device)
        self.parts = [self.flat[span] for span in lane.spans.values()]
        self.grads: list[Tensor] = []
        self._split = lane.num_sparse
        self._resident = Resident.make(algorithm, lane.state, comm, held.device) if self._split else None
        nothing = torch.zeros(Told.NUM_WORDS, dtype=torch.int32, device=held.device)
        self.words = nothing if self._resident is None else self._resident.words

    def start_(self, grads: Mapping[str, Tensor], comm: Metered) -> None:
        """Reduce what is sparse of these gradients, and add up what is not."""
        self.lane.made = True
        self.grads = [grads[name] for name in self.lane.spans]
        residual, split = self.lane.residual, self._split
        with comm.phase("accumulate"):
            torch._foreach_copy_(self.parts, self.grads)
            torch.add(residual.held[split:], self.flat[split:], out=residual.acc[split:])
        if self._resident is not None:
            part = self.flat[:split]
            self._resident.reduce_(part, residual.held[:split], residual.acc[:split], part)

    @property
    def side(self) -> tuple[Tensor, Tensor]:
        """What travels dense: what is to be summed, and where the mean goes."""
        return self.lane.residual.acc[self._split :], self.flat[self._split :]

    def settle_(self, bad: Tensor, filling: float) -> None:
        """If `bad`, on the device, is not zero, make all as if the step had not been, and this of the means."""
        residual = self.lane.residual
        kernels_on(self.flat.device).settle(bad, residual.acc, residual.held, self.flat, filling)

    def record(self, told: Told, traffic: Traffic, plan: Plan, size: int) -> StepRecord:
        """Return what a step did, once the host has been told."""
        return self.lane.record(self._split, told.reduced(self._split), plan, traffic, size, told_pairs=told.nnz)

    def commit_(self, plan: Plan) -> None:
        """Make this step's residual the one that is held."""
        self.grads = []
        self.lane.commit_(plan)

    def save_(self) -> None:
        """Bring the algorithm's state to the host, into the lane."""
        if self._resident is not None:
            self._resident.save_(self.lane.state)


def settle_(lanes: Sequence[DeviceLane], plan: Plan, comm: Metered, filling: float) -> Tensor:
    """End a step of these lanes: sum what travels dense, hand the means out, commit; return the words of all of them.

    All or none: where a number was not finite, in any lane on any rank, no residual changes and all means become
    `filling`.
    """
    words = torch.stack([lane.words for lane in lanes])
    with comm.phase("side"):
        words[0, 2:3] += _sum_sides_([lane.side for lane in lanes], comm)
    with comm.phase("apply"):
        bad = words[:, 2].sum()
        for lane in lanes:
            lane.settle_(bad, filling)
        torch._foreach_copy_([g for lane in lanes for g in lane.grads], [p for lane in lanes for p in lane.parts])
        for lane in lanes:
            lane.commit_(plan)
    return words


def _sum_sides_(sides: Sequence[tuple[Tensor, Tensor]], comm: Metered) -> Tensor:
    """Make means of what travels dense, and of it what their dtype cannot hold; return whether any is not finite.

    One sum for all lanes: they are small, and each would cost a message of its own. All ranks see it alike.
    """
    totals, means = [total for total, _ in sides], [mean for _, mean in sides]
    summed = comm.all_reduce(torch.cat(totals)) if any(map(len, totals)) else torch.cat(totals)
    whole = summed * (1 / comm.size)
    parts = torch.split(whole, [len(total) for total in totals])
    torch._foreach_copy_(means, [round_to(part, mean.dtype) for part, mean in zip(parts, means, strict=True)])
    torch._foreach_copy_(totals, parts)
    torch._foreach_sub_(totals, [mean.float() for mean in means])
    return (~whole.isfinite()).any()
