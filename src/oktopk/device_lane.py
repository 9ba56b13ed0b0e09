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
from oktopk.kernels.graphs import Graphs
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
        self._graphs = Graphs()
        self._resident = Resident.make(algorithm, lane.state, comm, held.device) if self._split else None
        nothing = torch.zeros(Told.NUM_WORDS, dtype=torch.int32, device=held.device)
        self.words = nothing if self._resident is None else self._resident.words

    def start_(self, grads: Mapping[str, Tensor], comm: Metered) -> None:
        """Reduce what is sparse of these gradients, and add up what is not."""
        self.lane.made = True
        self.grads = [grads[name] for name in self.lane.spans]
        residual, split, resident = self.lane.residual, self._split, self._resident
        with comm.phase("select"):
            measures = resident is not None and resident.measures
            self._graphs.run(self._select_, residual.held, residual.acc, *self.grads, kind=measures)
        if resident is not None:
            resident.exchange_(residual.held[:split], residual.acc[:split], self.flat[:split])

    def _select_(self, held: Tensor, acc: Tensor, *grads: Tensor) -> None:
        split = self._split
        torch._foreach_copy_(self.parts, list(grads))
        torch.add(held[split:], self.flat[split:], out=acc[split:])
        if self._resident is not None:
            self._resident.select_(self.flat[:split], held[:split], acc[:split], self.flat[:split])

    @property
    def side(self) -> tuple[Tensor, Tensor]:
        """What travels dense: what is to be summed, and where the mean goes."""
        return self.lane.residual.acc[self._split :], self.flat[self._split :]

    def record(self, told: Told, traffic: Traffic, plan: Plan, size: int) -> StepRecord:
        """Return what a step did, once the host has been told."""
        return self.lane.record(self._split, told.outcome, plan, traffic, size)

    def commit_(self, plan: Plan) -> None:
        """Make this step's residual the one that is held."""
        self.grads = []
        self.lane.commit_(plan)

    def save_(self) -> None:
        """Bring the algorithm's state to the host, into the lane."""
        if self._resident is not None:
            self._resident.save_(self.lane.state)


class Settlement:
    """How the lanes of an attachment end a step: all of them, or none.

    What travels dense is one sum for all lanes: they are small, and each would cost a message of its own. All ranks see
    alike what it is. Where a number was not finite, in any lane on any rank, no residual changes and all means become
    `filling`.
    """

    def __init__(self, filling: float) -> None:
        self._filling = filling
        self._graphs = Graphs()
        self._side = self._words = torch.empty(0)

    def settle_(self, lanes: Sequence[DeviceLane], plan: Plan, comm: Metered) -> Tensor:
        """Sum what travels dense, hand the means out, commit; return the words of all lanes."""
        accs = [lane.lane.residual.acc for lane in lanes]
        with comm.phase("side"):
            if not len(self._words):
                self._make_room(lanes)
            self._graphs.run(lambda *_: self._collect_(lanes), *accs, kind="collect")
            if len(self._side):
                comm.all_reduce(self._side)
        with comm.phase("apply"):
            grads = [grad for lane in lanes for grad in lane.grads]
            self._graphs.run(lambda *_: self._hand_out_(lanes, comm.size), *accs, *grads, kind="hand out")
            for lane in lanes:
                lane.commit_(plan)
        return self._words

    def _make_room(self, lanes: Sequence[DeviceLane]) -> None:
        self._words = torch.stack([lane.words for lane in lanes])
        self._side = torch.cat([total for total, _ in (lane.side for lane in lanes)])

    def _collect_(self, lanes: Sequence[DeviceLane]) -> None:
        torch.stack([lane.words for lane in lanes], out=self._words)
        torch.cat([lane.side[0] for lane in lanes], out=self._side)

    def _hand_out_(self, lanes: Sequence[DeviceLane], size: int) -> None:
        """Make means of what travels dense, and of it what their dtype cannot hold; then write all means."""
        whole = self._side.mul_(1 / size)
        totals, means = ([lane.side[i] for lane in lanes] for i in (0, 1))
        parts = torch.split(whole, [len(total) for total in totals])
        torch._foreach_copy_(means, [round_to(part, mean.dtype) for part, mean in zip(parts, means, strict=True)])
        torch._foreach_copy_(totals, parts)
        torch._foreach_sub_(totals, [mean.float() for mean in means])
        self._words[0, 2:3] += (~whole.isfinite()).any()
        bad = self._words[:, 2].sum()
        for lane in lanes:
            residual = lane.lane.residual
            kernels_on(lane.flat.device).settle(bad, residual.acc, residual.held, lane.flat, self._filling)
        torch._foreach_copy_([g for lane in lanes for g in lane.grads], [p for lane in lanes for p in lane.parts])
