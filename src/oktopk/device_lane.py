"""`DeviceLane`, `DeviceLanes`: the sparse steps of lanes that never wait for the host.

The gradients are copied into one vector, in the lane's order, which `Resident` reduces; the means are copied back when
all lanes of the step are done. Whether a NaN or Inf was met anywhere is known on the device alone by then: if so, a
kernel puts every lane's residual back, and the means become zeros, or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.algorithms.resident import Resident, Told, kernels_on
from oktopk.comm import Metered, Traffic
from oktopk.kernels.graphs import Graphs
from oktopk.lanes import NONE, Lane
from oktopk.plan import Plan
from oktopk.telemetry import StepRecord


class DeviceLane:
    """A lane whose steps stay on the device, for one algorithm."""

    def __init__(self, lane: Lane, algorithm: OkTopk, comm: Metered) -> None:
        held = lane.residual.held
        lane.prepare_(algorithm, comm)
        self.lane, self.algorithm = lane, algorithm
        self.flat = torch.empty(held.numel(), dtype=lane.dtype, device=held.device)
        self.parts = [self.flat[span] for span in lane.spans.values()]
        self.grads: list[Tensor] = []
        side = held.numel() - lane.num_sparse
        self._resident = Resident.make(algorithm, lane.state, comm, held.device, side)
        self._graphs = Graphs()

    @property
    def words(self) -> Tensor:
        """What the last step did, see `Told`."""
        return self._resident.words

    @property
    def tensors(self) -> list[Tensor]:
        """All that the end of a step reads and writes."""
        residual = self.lane.residual
        return [self.words, self.flat, residual.held, residual.acc, *self.grads]

    def start_(self, grads: Mapping[str, Tensor], comm: Metered) -> None:
        """Reduce these gradients."""
        self.lane.made = True
        self.grads = [grads[name] for name in self.lane.spans]
        held, acc = self.lane.residual.held, self.lane.residual.acc
        measures = self._resident.measures
        with comm.phase("select"):
            self._graphs.run(partial(self._select_, measures), held, acc, *self.grads, kind=measures)
        self._resident.exchange_(held, acc, self.flat)

    def _select_(self, measures: bool, held: Tensor, acc: Tensor, *grads: Tensor) -> None:
        torch._foreach_copy_(self.parts, list(grads))
        self._resident.select_(measures, self.flat, held, acc, self.flat)

    def capture(self) -> None:
        """Let the next steps be replayed, see `Graphs`."""
        self._graphs.capture()

    def record(self, told: Told, traffic: Traffic, plan: Plan, size: int) -> StepRecord:
        """Return what a step did, once the host has been told."""
        outcome = told.outcome(size) if self.lane.num_sparse else NONE
        return self.lane.record(self.lane.num_sparse, outcome, plan, traffic, size)

    def end_(self, plan: Plan, commit: bool) -> None:
        """Make this step's residual the one that is held, or leave that as it was."""
        self.grads = []
        if commit:
            self.lane.commit_(plan)

    def save_(self) -> None:
        """Bring the algorithm's state to the host, into the lane."""
        self._resident.save_(self.lane.state)


class DeviceLanes:
    """All lanes of an attachment whose steps stay on the device: they end a step together, or not at all.

    Where a number was not finite, in any lane on any rank, no residual changes and all means become `filling`.
    """

    def __init__(self, comm: Metered, filling: float) -> None:
        self._comm, self._filling = comm, filling
        self._lanes: dict[int, DeviceLane] = {}  # by the lane that they are of
        self._words, self._graphs = torch.empty(0), Graphs()

    def __len__(self) -> int:
        return len(self._lanes)

    def of(self, lane: Lane, plan: Plan) -> DeviceLane:
        """Return what makes the lane's steps on the device, with the state that there is."""
        assert isinstance(plan.algorithm, OkTopk)
        found = self._lanes.get(id(lane))
        if found is None or found.algorithm != plan.algorithm:
            if found is not None:
                found.save_()
            self._graphs = Graphs()
            found = self._lanes[id(lane)] = DeviceLane(lane, plan.algorithm, self._comm)
        return found

    def save_(self) -> None:
        """Bring the algorithm's states to the host, into the lanes."""
        for lane in self._lanes.values():
            lane.save_()

    def forget(self) -> None:
        """Have none any more."""
        self._lanes.clear()
        self._graphs = Graphs()

    def settle_(self, lanes: Sequence[DeviceLane], plan: Plan, commit: bool) -> Tensor:
        """Hand the means of a step out, and commit if nothing speaks against it here; return the lanes' words."""
        if len(self._words) != len(lanes):
            self._words = torch.stack([lane.words for lane in lanes])
        with self._comm.phase("apply"):
            self._graphs.run(lambda *_: self._hand_out_(lanes), *(each for lane in lanes for each in lane.tensors))
            self._graphs.capture()  # backward has nothing left to do but to wait
            for lane in lanes:
                lane.capture()
                lane.end_(plan, commit)
        return self._words

    def _hand_out_(self, lanes: Sequence[DeviceLane]) -> None:
        torch.stack([lane.words for lane in lanes], out=self._words)
        bad = self._words[:, 2].sum()
        for lane in lanes:
            residual = lane.lane.residual
            kernels_on(lane.flat.device).settle(bad, residual.acc, residual.held, lane.flat, self._filling)
        torch._foreach_copy_([g for lane in lanes for g in lane.grads], [p for lane in lanes for p in lane.parts])
