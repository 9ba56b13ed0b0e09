"""`CudaGroup`, `CudaGroups`: the sparse steps of groups that never wait for the host.

The gradients are copied into one vector, in the group's order, which `CudaStep` reduces; the means are copied back when
all groups of the step are done. Whether a NaN or Inf was met anywhere is known on the device alone by then: if so, a
kernel puts every group's residual back, and the means become zeros, or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.comm import MeteredComm, Traffic
from oktopk.cuda.graphs import Graphs
from oktopk.cuda.readback import DeviceStats
from oktopk.cuda.step import CudaStep, step_kernels
from oktopk.ddp.context import StepContext
from oktopk.ddp.group import NONE, ParamGroup
from oktopk.telemetry import StepRecord


class CudaGroup:
    """A group whose steps stay on the device, for one algorithm."""

    def __init__(self, group: ParamGroup, algorithm: OkTopk, comm: MeteredComm) -> None:
        held = group.residual.held
        group.prepare_(algorithm, comm)
        self.group, self.algorithm = group, algorithm
        self.flat = torch.empty(held.numel(), dtype=group.dtype, device=held.device)
        self.parts = [self.flat[span] for span in group.spans.values()]
        self.grads: list[Tensor] = []
        dense_tail = held.numel() - group.num_sparse
        self._cuda_step = CudaStep.make(algorithm, group.state, comm, held.device, dense_tail)
        self._graphs = Graphs()

    @property
    def words(self) -> Tensor:
        """What the last step did, see `DeviceStats`."""
        return self._cuda_step.words

    @property
    def tensors(self) -> list[Tensor]:
        """All that the end of a step reads and writes."""
        residual = self.group.residual
        return [self.words, self.flat, residual.held, residual.acc, *self.grads]

    def start_(self, grads: Mapping[str, Tensor], comm: MeteredComm) -> None:
        """Reduce these gradients."""
        self.group.made = True
        self.grads = [grads[name] for name in self.group.spans]
        held, acc = self.group.residual.held, self.group.residual.acc
        measures = self._cuda_step.measures
        with comm.phase("select"):
            self._graphs.run(partial(self._select_, measures), held, acc, *self.grads, kind=measures)
        self._cuda_step.exchange_(held, acc, self.flat)

    def _select_(self, measures: bool, held: Tensor, acc: Tensor, *grads: Tensor) -> None:
        torch._foreach_copy_(self.parts, list(grads))
        self._cuda_step.select_(measures, self.flat, held, acc, self.flat)

    def capture(self) -> None:
        """Let the next steps be replayed, see `Graphs`."""
        self._graphs.capture()

    def record(self, told: DeviceStats, traffic: Traffic, context: StepContext, size: int) -> StepRecord:
        """Return what a step did, once the host has been told."""
        outcome = told.outcome(size) if self.group.num_sparse else NONE
        return self.group.record(self.group.num_sparse, outcome, context, traffic, size)

    def end_(self, context: StepContext, commit: bool) -> None:
        """Make this step's residual the one that is held, or leave that as it was."""
        self.grads = []
        if commit:
            self.group.commit_(context)

    def save_(self) -> None:
        """Bring the algorithm's state to the host, into the group."""
        self._cuda_step.save_(self.group.state)


class CudaGroups:
    """All groups of an attachment whose steps stay on the device: they end a step together, or not at all.

    Where a number was not finite, in any group on any rank, no residual changes and all means become `filling`.
    """

    def __init__(self, comm: MeteredComm, filling: float) -> None:
        self._comm, self._filling = comm, filling
        self._groups: dict[int, CudaGroup] = {}  # by the group that they are of
        self._words, self._graphs = torch.empty(0), Graphs()

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, group: ParamGroup, context: StepContext) -> CudaGroup:
        """Return what makes the group's steps on the device, with the state that there is."""
        assert isinstance(context.algorithm, OkTopk)
        found = self._groups.get(id(group))
        if found is None or found.algorithm != context.algorithm:
            if found is not None:
                found.save_()
            self._graphs = Graphs()
            found = self._groups[id(group)] = CudaGroup(group, context.algorithm, self._comm)
        return found

    def save_(self) -> None:
        """Bring the algorithm's states to the host, into the groups."""
        for group in self._groups.values():
            group.save_()

    def forget(self) -> None:
        """Have none any more."""
        self._groups.clear()
        self._graphs = Graphs()

    def finish_step(self, groups: Sequence[CudaGroup], context: StepContext, commit: bool) -> Tensor:
        """Hand the means of a step out, and commit if nothing speaks against it here; return the groups' words."""
        if len(self._words) != len(groups):
            self._words = torch.stack([group.words for group in groups])
        with self._comm.phase("apply"):
            self._graphs.run(lambda *_: self._hand_out_(groups), *(each for group in groups for each in group.tensors))
            self._graphs.capture()  # backward has nothing left to do but to wait
            for group in groups:
                group.capture()
                group.end_(context, commit)
        return self._words

    def _hand_out_(self, groups: Sequence[CudaGroup]) -> None:
        torch.stack([group.words for group in groups], out=self._words)
        bad = self._words[:, 2].sum()
        for group in groups:
            residual = group.group.residual
            step_kernels(group.flat.device).rollback_if(bad, residual.acc, residual.held, group.flat, self._filling)
        torch._foreach_copy_([g for group in groups for g in group.grads], [p for group in groups for p in group.parts])
