"""`DeviceSteps`: sparse steps that never wait for the host.

The gradients of a group are copied into one vector, which `CudaStep` reduces, and the means are copied back when all
groups of the step are done. By then only the device knows whether a NaN or Inf was met. If so, a kernel rolls every
group's residual back and fills the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.algorithms.base import StepStats
from oktopk.codec.values import round_to
from oktopk.comm import MeteredComm
from oktopk.cuda.graphs import Graphs
from oktopk.cuda.step import CudaStep, StepKind, step_kernels
from oktopk.errors import NonFiniteError
from oktopk.steps.context import StepContext
from oktopk.steps.group import ParamGroup
from oktopk.steps.made import NOTHING, MadeStep, Part
from oktopk.steps.readback import READBACK_DELAY, DeviceStats, Readback


class _CudaGroup:
    """The device's side of a group, for one algorithm; `scales`: the factors on gradients and means, if there are any.

    A group of one tensor is reduced where it lies, unless it is scaled. A scaled vector is float32, since a narrower
    dtype would lose what the loss scale keeps representable.
    """

    def __init__(self, group: ParamGroup, algorithm: OkTopk, comm: MeteredComm, scales: Tensor | None) -> None:
        group.prepare_(algorithm, comm)
        self.group, self.algorithm, self.scales = group, algorithm, scales
        self.grads: Sequence[Tensor] = ()
        self.outs: Sequence[Tensor] = ()
        self._graphs = Graphs()
        self._cuda_step = CudaStep.make(algorithm, group.state, comm, group.device, group.numel - group.num_sparse)
        self._vector: Tensor | None = None
        if len(group.spans) > 1 or scales is not None:
            dtype = group.dtype if scales is None else torch.float32
            self._vector = torch.empty(group.numel, dtype=dtype, device=group.device)

    @property
    def words(self) -> Tensor:
        """The stats of the last step, see `DeviceStats`."""
        return self._cuda_step.words

    @property
    def rolls_back(self) -> bool:
        """Whether `CudaStep` alone rolls back a step that is not finite, and delivers zeros."""
        return self.group.numel == self.group.num_sparse and self.scales is None

    @property
    def is_in_place(self) -> bool:
        """Whether gradients and means stay where the caller has them."""
        return self._vector is None

    @property
    def mean(self) -> Tensor:
        """The vector of the means."""
        return self.outs[0] if self._vector is None else self._vector

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the end of a step reads and writes."""
        residual = self.group.residual
        return [self.words, self.mean, residual.held, residual.acc, *self.outs]

    def start_(self, grads: Sequence[Tensor], outs: Sequence[Tensor], comm: MeteredComm) -> None:
        """Reduce these gradients, all but the end of the step."""
        self.grads, self.outs = grads, outs
        held, acc, kind = self.group.residual.held, self.group.residual.acc, self._cuda_step.kind
        with comm.phase("select"):
            self._graphs.run(partial(self._select_, kind), held, acc, self.mean, *grads, kind=kind)
        self._cuda_step.exchange_(held, acc, self.mean)

    def _select_(self, kind: StepKind, held: Tensor, acc: Tensor, mean: Tensor, *grads: Tensor) -> None:
        vector = grads[0] if self._vector is None else self._vector
        if self._vector is not None:
            torch._foreach_copy_(self._parts(self._vector), list(grads))
        if self.scales is not None:
            vector.mul_(self.scales[0])
        self._cuda_step.select_(kind, vector, held, acc, mean)

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Return the slots of the vector, in the order of backward."""
        return [vector[self.group.spans[name]] for name in self.group.names]

    def scale_back_(self) -> None:
        """Multiply the means by the loss scale; what the gradients' dtype rounds away stays in the residual."""
        if self.scales is None:
            return
        mean = self.mean.mul_(self.scales[1])
        if self.group.dtype != mean.dtype:
            rounded = round_to(mean, self.group.dtype).to(mean.dtype)
            self.group.residual.acc.add_((mean - rounded) / self.scales[1])
            mean.copy_(rounded)

    def hand_out_(self) -> None:
        """Copy the means into the gradients, unless they are there."""
        if self._vector is not None:
            torch._foreach_copy_(list(self.outs), self._parts(self._vector))

    def capture(self) -> None:
        """Let the next steps be replayed, see `Graphs`."""
        self._graphs.capture()

    def save_(self) -> None:
        """Bring the algorithm's state to the host, into the group."""
        self._cuda_step.save_(self.group.state)


class DeviceSteps:
    """The steps of all groups on the device, committed all or none."""

    delay = READBACK_DELAY

    def __init__(self, comm: MeteredComm) -> None:
        self._comm, self._readback = comm, Readback()
        self._made: dict[int, _CudaGroup] = {}  # by the id of the group
        self._started: list[tuple[_CudaGroup, Part]] = []
        self._words, self._graphs = torch.empty(0), Graphs()
        self._scales: Tensor | None = None

    def start(self, group: ParamGroup, grads: Sequence[Tensor], outs: Sequence[Tensor], context: StepContext) -> None:
        """Start to write the mean over ranks of what this step delivers into `outs`, which may be `grads`."""
        self._set_scales(context, group.device)
        cuda_group = self._of(group, context)
        cuda_group.start_(grads, outs, self._comm)
        self._started.append((cuda_group, Part(group, self._comm.pop())))

    def finish(self, context: StepContext, error: NonFiniteError | None = None) -> MadeStep:
        """Write the means, or roll back where the device met a NaN or Inf; commit, unless there is an error."""
        groups = [cuda_group for cuda_group, _ in self._started]
        parts = [part for _, part in self._started]
        with self._comm.phase("apply"):
            filling = context.filling
            self._words = self._room_for_words(groups, filling)
            tensors = [tensor for group in groups for tensor in group.tensors]
            if len(groups) > 1 or self._words is not groups[0].words or not groups[0].is_in_place:  # else all is done
                self._graphs.run(lambda *_: self._end_(groups, filling), *tensors, kind=filling)
            self._graphs.capture()  # backward has nothing left to do but to wait
            for group in groups:
                group.capture()
                group.grads = group.outs = ()  # which are the caller's
                if error is None:
                    group.group.commit_(context)
        parts[0].traffic.add_(self._comm.pop())
        read, self._started = self._readback.send(self._words), []
        return MadeStep(context, parts, partial(self._stats, parts, read), error)

    def _stats(self, parts: Sequence[Part], read: Callable[[], Sequence[DeviceStats]]) -> list[StepStats | None]:
        rows = read()
        if any(row.bad for row in rows):
            return [None] * len(rows)
        size = self._comm.size
        return [row.stats(size) if part.group.num_sparse else NOTHING for row, part in zip(rows, parts, strict=True)]

    def abandon(self) -> None:
        """Forget the step that is being made."""
        self._started = []

    def save_(self) -> None:
        """Copy the algorithm's states to the host, into the groups."""
        for group in self._made.values():
            group.save_()

    def to_host(self) -> None:
        """Bring the algorithm's states to the host, and keep none on the device."""
        self.save_()
        self._made.clear()
        self._graphs = Graphs()

    def _of(self, group: ParamGroup, context: StepContext) -> _CudaGroup:
        """Return the device's side of the group, made anew if the algorithm has changed."""
        assert isinstance(context.algorithm, OkTopk)
        found = self._made.get(id(group))
        if found is None or found.algorithm != context.algorithm or found.scales is not self._scales:
            if found is not None:
                found.save_()
            self._graphs = Graphs()
            found = self._made[id(group)] = _CudaGroup(group, context.algorithm, self._comm, self._scales)
        return found

    def _set_scales(self, context: StepContext, device: torch.device) -> None:
        """Write the step's factors into the tensor that the graphs read."""
        if self._started or (self._scales is None and not context.is_scaled):
            return
        if self._scales is None:  # for good: a model may scale its loss in some backward passes only
            self._scales = torch.ones(2, device=device)
        for place, scale in enumerate((context.grad_scale, context.loss_scale)):
            self._scales[place] = scale

    def _end_(self, groups: Sequence[_CudaGroup], filling: float | None) -> None:
        """Write the words of all groups and the means, or roll all groups back."""
        if self._words is not groups[0].words:
            torch.stack([group.words for group in groups], out=self._words)
            bad = self._words[:, 2].sum()
            for group in groups:
                group.scale_back_()
                residual, mean = group.group.residual, group.mean
                step_kernels(mean.device).rollback_if(bad, residual.acc, residual.held, mean, filling or 0.0)
        for group in groups:
            group.hand_out_()

    def _room_for_words(self, groups: Sequence[_CudaGroup], filling: float | None) -> Tensor:
        """Return the tensor for the words of all groups: its own, if there is one group that rolls back by itself."""
        if len(groups) == 1 and groups[0].rolls_back and not filling:
            return groups[0].words
        if self._words.shape[:-1] == (len(groups),):
            return self._words
        return torch.stack([group.words for group in groups])
