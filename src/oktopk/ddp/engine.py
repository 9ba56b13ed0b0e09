"""`Engine`: the steps of an attachment: buckets in, means out, committed all or none.

Where a step can stay on the GPU (`CudaGroup`), nothing here waits for it: what it did, a NaN or Inf among it, is heard
of up to two steps later.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future

from oktopk.algorithms import OkTopk
from oktopk.comm import MeteredComm, Traffic
from oktopk.cuda.events import record_event
from oktopk.cuda.readback import READBACK_DELAY, DeferredErrors, PinnedBuffer, Readback
from oktopk.cuda.step import supports_device_step
from oktopk.ddp.config import DDPConfig
from oktopk.ddp.context import StepContext
from oktopk.ddp.cuda_group import CudaGroup, CudaGroups
from oktopk.ddp.group import ParamGroup
from oktopk.errors import MismatchError, NonFiniteError, PeerError, SettingError
from oktopk.telemetry import Sinks, StepRecord, Summary, total_of

_Begun = tuple[ParamGroup, dict[str, Tensor], Callable[[], StepRecord]]
"""A group whose reduction has begun, the gradients in it, and what ends it."""


@dataclass
class Bucket:
    """One of DDP's buckets on its way: the gradients of these parameters, and when its step is done."""

    index: int
    is_last: bool
    buffer: Tensor
    parameters: list[Tensor]
    done: Future[Exception | None]
    scaler: GradScaler | None = None  # which was seen to scale this backward pass's loss
    ready: torch.Event | None = None  # on a GPU: when the gradients are there
    over: torch.Event | None = None  # on a GPU: when the means are there
    came_s: float = field(default_factory=time.perf_counter)


@dataclass
class _Step:
    """A step being made."""

    context: StepContext
    buckets: list[Bucket] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    under_way: list[_Begun] = field(default_factory=list)
    cuda_groups: list[tuple[CudaGroup, Traffic]] = field(default_factory=list)
    nonfinite: NonFiniteError | None = None


@dataclass
class _PendingStats:
    """A step that was made on the device, and what it did on its way here."""

    step: _Step
    buffer: PinnedBuffer
    wait_seconds: float


class Engine:
    """What an attachment does with the buckets that DDP hands it, on its worker or, where it only sums, at once."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        groups: list[ParamGroup],
        comm: MeteredComm,
        config: DDPConfig,
        sinks: Sinks,
        scaler: Any,
        may_be_unused: bool,
    ) -> None:
        self.parameters, self.groups, self.comm, self.sinks = parameters, groups, comm, sinks
        self.config = config
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._last: StepRecord | None = None
        self._summary = Summary()
        self.next_step = 0
        self.failure: BaseException | None = None
        self._scaler = scaler
        self._may_be_unused = may_be_unused
        self._arrived: dict[str, Tensor] = {}
        self._waiting: list[ParamGroup] = []
        self._now: _Step | None = None
        self._unwritten: deque[StepRecord] = deque()
        self._agreed = False
        self._stream: torch.cuda.Stream | None = None
        self._on_device_now = False  # whether this step, or the last one, stays on the device
        self._cuda_groups = CudaGroups(comm, filling=math.nan if self._delivers_nan else 0.0)
        self._readback = Readback()
        self._pending_stats: deque[_PendingStats] = deque()
        self._drain_lock = threading.RLock()
        self._deferred = DeferredErrors()
        self._lay_out()

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest step; waits for it, where steps stay on the device."""
        self.drain()
        return self._last

    @property
    def summary(self) -> Summary:
        """All steps so far."""
        self.drain()
        return self._summary

    def change(self, config: DDPConfig) -> None:
        """Use other settings from the next step on, once all ranks are seen to have the same; residuals stay."""
        self.state_to_host()
        before, self.config = self.config, config
        try:
            self._lay_out()
        except SettingError:
            self.config = before
            raise
        self._agreed = False

    def go_on_at(self, step: int) -> None:
        """Make `step` the next one, once all ranks are seen to be there; what went wrong before is over."""
        self.next_step, self._agreed = step, False
        self._deferred.clear()

    @property
    def is_plain_allreduce(self) -> bool:
        """Whether the step that is being made, or comes next, does no more than DDP would, and on the CPU."""
        context = StepContext(self.next_step, self.config.algorithm_at(self.next_step), momentum=self.config.momentum)
        return all(
            group.is_plain_allreduce(context) and group.residual.held.device.type == "cpu" for group in self.groups
        )

    def take_and_flush(self, bucket: Bucket) -> None:
        """Take a bucket on a thread of the exchange's own; there is time for the records after the last one.

        Where steps stay on the device, after the first: those of earlier steps, while the host waits for the next
        bucket, not while it makes the next forward.
        """
        self.take(bucket)
        if bucket.index == 0 if self._on_device_now else bucket.is_last:
            self.flush_records()

    def take(self, bucket: Bucket) -> None:
        """Sort a bucket's gradients into their groups, and reduce those that are complete."""
        try:
            if self.failure is not None:
                raise PeerError(f"oktopk stopped at an earlier error: {self.failure}")
            if bucket.ready is not None:
                self._follow(bucket.ready, bucket.buffer.device)
            self._take(bucket)
        except BaseException as error:  # whatever it is, backward() must hear of it, and the other ranks too
            self._give_up(error, bucket)

    def _follow(self, ready: torch.Event, device: torch.device) -> None:
        """Work on a stream of the exchange's own, behind what makes the gradients."""
        if self._stream is None:  # this thread works on it ever after: to choose it anew each time takes longer
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            torch.cuda.set_device(device)
            torch.cuda.set_stream(self._stream)
        ready.wait()

    def _take(self, bucket: Bucket) -> None:
        if self._now is None or bucket.index == 0:
            self._begin(bucket)
        assert self._now is not None
        self._now.buckets.append(bucket)
        grads = torch.split(bucket.buffer, [parameter.numel() for parameter in bucket.parameters])
        self._arrived.update(zip((self._names[id(each)] for each in bucket.parameters), grads, strict=True))
        self._reduce_complete_groups(self._now, bucket)
        if bucket.is_last:
            self._end(self._now)

    def _begin(self, bucket: Bucket) -> None:
        if not self._agreed:
            self.agree()
        context = StepContext(
            step=self.next_step,
            algorithm=self.config.algorithm_at(self.next_step),
            loss_scale=self._loss_scale(bucket.scaler),
            momentum=self.config.momentum,
            may_be_unused=self._may_be_unused,
        )
        self._on_device_now = self._runs_on_device(context)
        if not self._on_device_now:
            self.state_to_host()
        self._now, self._arrived, self._waiting = _Step(context), {}, list(self.groups)

    def _loss_scale(self, prefilter: GradScaler | None) -> float:
        """Return the scale of the scaler that was given, or else of the one that was seen."""
        if self._scaler is not None and self._scaler.is_enabled():
            return float(self._scaler.get_scale())
        if prefilter is None:
            return 1.0
        if not self.config.scaled:
            self.config = replace(self.config, scaled=True)
            if not self.comm.rank:
                sys.stderr.write(
                    "oktopk: a GradScaler scales the loss, and attach was not given it: its scale is used, as with "
                    "scaler=\n"
                )
        return float(prefilter.get_scale())

    @property
    def on_device(self) -> bool:
        """Whether sparse steps stay on the device."""
        return self._runs_on_device(StepContext(self.next_step, self.config.algorithm, momentum=self.config.momentum))

    def _runs_on_device(self, context: StepContext) -> bool:
        """Whether this step needs nothing that the host would have to ask the device for."""
        asks = context.momentum is not None or self.config.clip is not None or self.config.scaled
        if asks or self._may_be_unused or not isinstance(context.algorithm, OkTopk):
            return False
        held = [(group.residual.held, group.dtype) for group in self.groups]
        stay = [supports_device_step(context.algorithm, each.numel(), dtype, each.device) for each, dtype in held]
        return bool(stay) and all(stay)

    def _reduce_complete_groups(self, step: _Step, bucket: Bucket) -> None:
        clipping = self.config.clip is not None and step.context.algorithm is not None
        if clipping and not bucket.is_last:
            return  # the norm of the gradient is not known before all of it is here
        if clipping:
            step.context = replace(step.context, clip=self._clip_factor(step.context.loss_scale))
        complete = [group for group in self._waiting if all(name in self._arrived for name in group.names)]
        for group in complete:
            self._waiting.remove(group)
            grads = {name: self._arrived[name] for name in group.names}
            if self._on_device_now:
                cuda_groups = self._cuda_groups.of(group, step.context)
                cuda_groups.start_(grads, self.comm)
                step.cuda_groups.append((cuda_groups, self.comm.pop()))
                continue
            step.under_way.append((group, grads, group.start_(grads, step.context, self.comm)))
            if not group.is_plain_allreduce(step.context):
                self._finish(step, [step.under_way.pop()])
        if bucket.is_last:
            self._finish(step, step.under_way)

    def _finish(self, step: _Step, begun: Sequence[_Begun]) -> None:
        """End reductions that were started."""
        for group, grads, end in begun:
            try:
                step.records.append(end())
            except NonFiniteError as error:
                step.nonfinite = step.nonfinite or error
                step.records.append(group.refused(step.context, self.comm.pop(), self.comm.size))
                for grad in grads.values():
                    grad.fill_(math.nan)

    def _clip_factor(self, loss_scale: float) -> float:
        """Return what scales this rank's gradient to a norm of at most clip / sqrt(P)."""
        assert self.config.clip is not None
        # Not by dot(): that adds up in another order where DDP has put a gradient elsewhere, as after a restart.
        norms = [float(torch.linalg.vector_norm(grad, dtype=torch.float64)) for grad in self._arrived.values()]
        norm = math.sqrt(math.fsum(norm * norm for norm in norms)) / loss_scale
        limit = self.config.clip / math.sqrt(self.comm.size)
        return limit / norm if math.isfinite(norm) and norm > limit else 1.0

    def save_(self) -> None:
        """Hear of all steps, and bring all states to the host."""
        self.drain()
        self._cuda_groups.save_()

    def state_to_host(self) -> None:
        """Have all states on the host, and none on the device."""
        self.save_()
        self._cuda_groups.forget()

    def drain(self, but: int = 0) -> None:
        """Make the records of the steps on the device, but for the last few, once they are over."""
        with self._drain_lock:
            while len(self._pending_stats) > but:
                self._drain_one(self._pending_stats.popleft())

    def _drain_one(self, pending_stats: _PendingStats) -> None:
        step = pending_stats.step
        told, size = self._readback.read(pending_stats.buffer), self.comm.size
        if step.nonfinite is None and any(each.bad for each in told):
            step.nonfinite = NonFiniteError(
                f"step {step.context.step}: a rank's gradient, or their sum, was not finite; that step delivered "
                f"{'NaN' if self._delivers_nan else 'zeros'} on all ranks, and all residuals are as they were before it"
            )
            if not self._delivers_nan:
                self._deferred.add(step.context.step, step.nonfinite)
        for (cuda_groups, traffic), each in zip(step.cuda_groups, told, strict=True):
            if step.nonfinite is None:
                step.records.append(cuda_groups.record(each, traffic, step.context, size))
            else:
                step.records.append(cuda_groups.group.refused(step.context, traffic, size))
        self._note(step, pending_stats.wait_seconds)

    def _end(self, step: _Step) -> None:
        """Commit the step, or leave everything as it was; then let backward() go on."""
        assert not self._waiting, f"backward ended without a gradient for {self._waiting[0].names}"
        self._now, self.next_step = None, self.next_step + 1
        # A step in which an earlier one's error is raised is not committed: what backward() does not return must not be
        # missing in the residuals.
        step.nonfinite = self._deferred.take_due(step.context.step) or step.nonfinite
        if step.cuda_groups:
            self._settle(step)
            return
        if step.nonfinite is None:
            for group in self.groups:
                group.commit_(step.context)
        self._note(step, time.perf_counter() - step.buckets[-1].came_s)
        self._release_backward(step)

    def _release_backward(self, step: _Step) -> None:
        # The future itself would make DDP wait only for tensors in its result, and for this stream's work on them.
        over = record_event(step.buckets[0].buffer.device)
        for bucket in step.buckets:
            bucket.over = over
        error = None if self._delivers_nan else step.nonfinite
        if error is not None and over is not None:
            over.synchronize()  # backward() raises and waits for nothing: the next one is not to meet what still runs
        step.buckets[0].done.set_result(error)

    @property
    def _delivers_nan(self) -> bool:
        return self.config.on_nonfinite == "skip"

    def _settle(self, step: _Step) -> None:
        """Commit all groups, or none, as the device alone knows."""
        with self._drain_lock:  # who asks what this step did waits until that is on its way; backward() does not
            groups = [cuda_groups for cuda_groups, _ in step.cuda_groups]
            words = self._cuda_groups.finish_step(groups, step.context, commit=step.nonfinite is None)
            step.cuda_groups[0][1].add_(self.comm.pop())
            waited = time.perf_counter() - step.buckets[-1].came_s
            self._release_backward(step)
            self._pending_stats.append(_PendingStats(step, self._readback.send(words), waited))

    def _note(self, step: _Step, wait_seconds: float) -> None:
        """Make the record of a step that is over."""
        record = replace(
            total_of(
                step.records, step=step.context.step, phase="dense" if step.context.algorithm is None else "sparse"
            ),
            skipped=step.nonfinite is not None,
            reason=None if step.nonfinite is None else str(step.nonfinite),
            wait_seconds=wait_seconds,
        )
        self._last = record
        self._summary.add_(record)
        self._unwritten.append(record)

    def flush_records(self, delay: int = READBACK_DELAY - 1) -> None:
        """Write the records of the steps made since the last time to the sinks, but for those that may still run."""
        try:
            with self._drain_lock:
                self.drain(but=delay)
                self._write()
        except BaseException as error:  # whatever it is, the next backward() must hear of it, and the other ranks too
            self.comm.fail(error)
            self.failure = self.failure or error

    def _write(self) -> None:
        while self._unwritten:
            self.sinks.write(self._unwritten.popleft())

    def close(self) -> None:
        """Tell the sinks of the last steps, and close them."""
        self.drain()
        for error in self._deferred:  # there is no backward() left to raise it
            sys.stderr.write(f"oktopk: WARNING: {error}\n")
        self._write()
        self.sinks.close()

    def _give_up(self, error: BaseException, bucket: Bucket) -> None:
        """Tell backward() here, and the other ranks, why there will be no more exchanges."""
        if not isinstance(error, (PeerError, MismatchError)):
            self.comm.fail(error)
        self.failure = self.failure or error
        if not bucket.done.done():
            bucket.done.set_result(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def agree(self) -> None:
        """Make sure that all ranks are about to do the same."""
        # By the group's dtype: under DDP's mixed_precision a parameter's own is another one while backward runs.
        dtypes = {name: group.dtype for group in self.groups for name in group.names}
        shapes = [f"{name} {tuple(p.shape)} {dtypes[name]}" for name, p in self.parameters.items()]
        dense = [name for group in self.groups for name in group.dense_names]
        mine = [zlib.crc32(repr(shapes).encode()), self.config.fingerprint(dense), self.next_step, int(self.on_device)]
        device = self.groups[0].residual.held.device if self.groups else torch.device("cpu")
        every = self.comm.all_gather(torch.tensor(mine, device=device)).tolist()
        self.comm.pop()
        for what, column in zip(
            ("parameters", "settings", "step", "kind of device"), zip(*every, strict=True), strict=True
        ):
            if len(set(column)) > 1:
                differing = [rank for rank, value in enumerate(column) if value != column[0]]
                raise MismatchError(f"the ranks disagree on the {what}: {differing} differ from rank 0")
        self._agreed = True

    def _lay_out(self) -> None:
        """Decide for every parameter whether it travels dense."""
        dense = self.config.travel_dense(self.parameters)
        for group in self.groups:
            group.lay_out_(dense.__contains__)
