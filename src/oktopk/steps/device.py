"""`DeviceSteps`: sparse steps that never wait for the host.

The gradients of a group are copied into one vector, which `CudaStep` reduces, and the means are copied back when all
groups of the step are done. By then only the device knows whether a NaN or Inf was met. If so, a kernel rolls every
group's residual back and fills the gradients.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.algorithms import OkTopk
from oktopk.algorithms.base import StepStats
from oktopk.codec.values import round_to
from oktopk.comm import MeteredComm
from oktopk.cuda.events import record_event
from oktopk.cuda.graphs import Graphs
from oktopk.cuda.step import CudaStep, StepKind, step_kernels
from oktopk.errors import NonFiniteError
from oktopk.steps.group import ParamGroup, StepContext
from oktopk.steps.made import NOTHING, MadeStep, Part

READBACK_DELAY = 2
"""Steps after which the host reads a step's stats: it is long over then, so that nobody waits."""


class DeviceSteps:
    """The steps of all groups on the device, committed all or none."""

    delay = READBACK_DELAY

    def __init__(self, comm: MeteredComm) -> None:
        self._comm, self._readback = comm, Readback()
        self._made: dict[int, _CudaGroup] = {}  # by the id of the group
        self._started: list[tuple[_CudaGroup, Part]] = []
        self._words, self._graphs = torch.empty(0), Graphs()
        self._stacks: dict[int, Tensor] = {}  # words by the number of groups: graphs write where they first did
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
            if self._words is not groups[0].step.words or groups[0].vector is not None:  # else all is done
                self._graphs.run(lambda *_: self._end_(groups, filling), *tensors, kind=filling)
            self._graphs.capture()  # backward has nothing left to do but to wait
            for group in groups:
                group.graphs.capture()
                group.outs = ()  # which are the caller's
                if error is None:
                    group.group.commit_(context)
        parts[0].traffic.add_(self._comm.pop())
        read, size, self._started = self._readback.send(self._words), self._comm.size, []

        def stats() -> list[StepStats | None]:
            rows = read()
            if any(row.bad for row in rows):
                return [None] * len(rows)
            groups = [part.group for part in parts]
            return [row.stats(size) if group.num_sparse else NOTHING for row, group in zip(rows, groups, strict=True)]

        return MadeStep(context, parts, stats, error)

    def abandon(self) -> None:
        """Forget the step that is being made."""
        self._started = []

    def save_(self) -> None:
        """Copy the algorithm's states to the host, into the groups."""
        for group in self._made.values():
            group.step.save_(group.group.state)

    def to_host(self) -> None:
        """Bring the algorithm's states to the host, and keep none on the device."""
        self.save_()
        self._made, self._graphs = {}, Graphs()

    def _of(self, group: ParamGroup, context: StepContext) -> _CudaGroup:
        """Return the device's side of the group, made anew if the algorithm has changed."""
        assert isinstance(context.algorithm, OkTopk)
        found = self._made.get(id(group))
        if found is None or found.algorithm != context.algorithm or found.scales is not self._scales:
            if found is not None:
                found.step.save_(group.state)
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
        if self._words is not groups[0].step.words:
            torch.stack([group.step.words for group in groups], out=self._words)
            bad = self._words[:, 2].sum()
            for group in groups:
                group.scale_back_()
                residual, mean = group.group.residual, group.mean
                step_kernels(mean.device).rollback_if(bad, residual.acc, residual.held, mean, filling or 0.0)
        for group in groups:
            group.hand_out_()

    def _room_for_words(self, groups: Sequence[_CudaGroup], filling: float | None) -> Tensor:
        """Return the tensor for the words of all groups: its own, if there is one group that rolls back by itself.

        `CudaStep` does so, and delivers zeros, unless there is a dense tail or a scale.
        """
        first = groups[0]
        if len(groups) == 1 and not first.step.dense_tail and first.scales is None and not filling:
            return first.step.words
        if len(groups) not in self._stacks:
            self._stacks[len(groups)] = torch.stack([group.step.words for group in groups])
        return self._stacks[len(groups)]


class _CudaGroup:
    """The device's side of a group, for one algorithm; `scales`: the factors on gradients and means, if there are any.

    A group of one tensor is reduced where it lies, unless it is scaled; any other in `vector`. A scaled vector is
    float32, since a narrower dtype would lose what the loss scale keeps representable.
    """

    def __init__(self, group: ParamGroup, algorithm: OkTopk, comm: MeteredComm, scales: Tensor | None) -> None:
        group.prepare_(algorithm, comm)
        self.group, self.algorithm, self.scales = group, algorithm, scales
        self.outs: Sequence[Tensor] = ()
        self.graphs = Graphs()
        self.step = CudaStep(algorithm, group.state, comm, group.device, group.numel - group.num_sparse)
        self.vector: Tensor | None = None
        if len(group.spans) > 1 or scales is not None:
            dtype = group.dtype if scales is None else torch.float32
            self.vector = torch.empty(group.numel, dtype=dtype, device=group.device)

    @property
    def mean(self) -> Tensor:
        """The vector of the means."""
        return self.outs[0] if self.vector is None else self.vector

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the end of a step reads and writes."""
        residual = self.group.residual
        return [self.step.words, self.mean, residual.held, residual.acc, *self.outs]

    def start_(self, grads: Sequence[Tensor], outs: Sequence[Tensor], comm: MeteredComm) -> None:
        """Reduce these gradients, all but the end of the step."""
        self.outs = outs
        held, acc, kind = self.group.residual.held, self.group.residual.acc, self.step.kind
        with comm.phase("select"):
            self.graphs.run(partial(self._select_, kind), held, acc, self.mean, *grads, kind=kind)
        self.step.exchange_(held, acc, self.mean)

    def _select_(self, kind: StepKind, held: Tensor, acc: Tensor, mean: Tensor, *grads: Tensor) -> None:
        vector = grads[0] if self.vector is None else self.vector
        if self.vector is not None:
            torch._foreach_copy_(self._parts(self.vector), list(grads))
        if self.scales is not None:
            vector.mul_(self.scales[0])
        self.step.select_(kind, vector, held, acc, mean)

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
        if self.vector is not None:
            torch._foreach_copy_(list(self.outs), self._parts(self.vector))


class DeviceStats(NamedTuple):
    """The words that a step writes, see `CudaStep`; thresholds by their bits."""

    selected: int
    nnz: int
    bad: int
    threshold: int
    kept_threshold: int
    step: int

    def stats(self, size: int) -> StepStats:
        """Return the stats for a record; a rank that is alone keeps everything that it sends."""
        kept_threshold = self.kept_threshold if size > 1 else self.threshold
        thresholds = struct.unpack("2f", struct.pack("2i", self.threshold, kept_threshold))
        return StepStats(self.selected, self.nnz, (), *thresholds)


class Readback:
    """Copies the words of steps to the host, which goes on meanwhile, into pinned buffers, which are used again."""

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, torch.Event | None]] = []

    def send(self, words: Tensor) -> Callable[[], Sequence[DeviceStats]]:
        """Start to copy the words of one step; return the function that waits for them and reads them."""
        words = words.view(-1, len(DeviceStats._fields))
        self._free = [free for free in self._free if free[0].shape == words.shape]
        if not self._free:
            self._free.append((torch.empty(words.shape, dtype=words.dtype, pin_memory=words.is_cuda), None))
        buffer, event = self._free.pop()
        buffer.copy_(words, non_blocking=True)
        done = record_event(words.device, event)
        return lambda: self.read(buffer, done)

    def read(self, buffer: Tensor, done: torch.Event | None) -> Sequence[DeviceStats]:
        """Return the stats of each group, once the words are there."""
        if done is not None:
            done.synchronize()
        rows = [DeviceStats(*row) for row in buffer.tolist()]
        self._free.append((buffer, done))
        return rows
