"""`Engine`: the steps of an attachment. DDP's buckets come in, and means go out, committed all or none.

On the device path nothing here waits for the GPU: the stats of a step, a NaN or Inf among them, are read later.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.futures import Future

from oktopk.algorithms import Algorithm, Dense
from oktopk.algorithms.base import StepStats, describe
from oktopk.comm import Comm, MeteredComm
from oktopk.comm.agree import check_same, gather_settings
from oktopk.cuda.events import record_event
from oktopk.ddp.audit import Audit
from oktopk.ddp.exclude import Exclusion, excluded
from oktopk.ddp.loss_scale import loss_scale_of
from oktopk.errors import MismatchError, NonFiniteError, PeerError, SettingError
from oktopk.steps import READBACK_DELAY, MadeStep, ParamGroup, StepContext, StepLog, Steps
from oktopk.telemetry.record import total_of
from oktopk.telemetry.schema import VERSION, StepRecord
from oktopk.telemetry.sinks import Sinks
from oktopk.telemetry.summary import Summary


@dataclass
class DDPConfig:
    """The settings of `attach`; `Attached` changes those that may change between steps."""

    algorithm: Algorithm
    dense_steps: int
    exclude: tuple[Exclusion, ...]
    clip: float | None
    density_schedule: tuple[tuple[int, float], ...]
    on_nonfinite: str
    scaled: bool = False  # a GradScaler scales the loss
    sparse_momentum: float | None = None  # of the optimizers; None: of each kind its own
    optimizer: str | None = None  # the classes of the optimizers that were given
    exchanges_updates: bool = False  # sparse steps exchange what the optimizers moved

    def algorithm_at(self, step: int) -> Algorithm | None:
        """Return the algorithm of a step, with the density that the schedule gives it; None for a dense step."""
        sparse_step = step - self.dense_steps
        if sparse_step < 0:
            return None
        for steps, density in self.density_schedule:
            if sparse_step < steps:
                return self.algorithm.with_density(density)
            sparse_step -= steps
        return self.algorithm

    def settings(self) -> dict[str, Any]:
        """Return the settings that all ranks must share; each knows its own `exclude` only as the names it chooses."""
        rest = ("dense_steps", "clip", "density_schedule", "on_nonfinite", "optimizer", "sparse_momentum")
        return {
            "algorithm": describe(self.algorithm.given),
            **{name: getattr(self, name) for name in rest},
            "scaler": "one" if self.scaled else None,
            "the exchange of updates": self.exchanges_updates,
        }


@dataclass
class Bucket:
    """Gradients that arrive together, in the buffer of DDP's bucket or FSDP's unit, and the future of their step."""

    index: int
    is_last: bool
    buffer: Tensor
    grads: Mapping[str, Tensor]
    done: Future[Exception | None]
    scaler: GradScaler | None = None  # the one that scaled the loss of this backward pass
    ready: torch.Event | None = None  # on a GPU: when the gradients are there
    over: torch.Event | None = None  # on a GPU: when the means are there
    is_update: bool = False  # what the optimizers moved, which has no loss scale and is not clipped
    came_s: float = field(default_factory=time.perf_counter)


@dataclass
class _Records:
    """The records of finished steps: the latest, the totals, and those that no sink has yet."""

    size: int
    speaks: bool  # this rank tells the user how good the prediction was
    audit: Audit = field(default_factory=Audit)
    last: StepRecord | None = None
    summary: Summary = field(default_factory=Summary)
    unwritten: deque[StepRecord] = field(default_factory=deque)

    def add(self, made: MadeStep, stats: Sequence[StepStats | None]) -> None:
        phase = made.context.phase
        record = replace(
            total_of(made.records(stats, self.size, phase), step=made.context.step, phase=phase),
            skipped=made.error is not None,
            reason=None if made.error is None else str(made.error),
            wait_seconds=made.wait_seconds,
            step_seconds=made.step_seconds,
        )
        self.last = self._audited(record, made)
        self.summary.add_(self.last)
        self.unwritten.append(self.last)

    def _audited(self, record: StepRecord, made: MadeStep) -> StepRecord:
        """Return the record with its predicted time, and tell the user once how good that was."""
        groups = [part.group for part in made.parts]
        if any(group.device.type != "cpu" for group in groups):  # the phases there are times of launches
            return record
        was_told = self.audit.sentence is not None
        sizes = [(group.num_sparse, group.numel - group.num_sparse) for group in groups]
        record = self.audit.look(record, made.context.algorithm, sizes)
        if self.audit.sentence is not None and not was_told and self.speaks:
            sys.stderr.write(f"oktopk: {self.audit.sentence}\n")
        return record


class Engine:
    """Reduces the buckets that DDP hands over: on the worker thread, or at once where a step only sums."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        groups: list[ParamGroup],
        comm: MeteredComm,
        config: DDPConfig,
        sinks: Sinks,
        scaler: Any,
        may_be_unused: bool,
        shards: Comm | None = None,
    ) -> None:
        self.parameters, self.groups, self.comm, self.shards, self.sinks = parameters, groups, comm, shards, sinks
        self.numel = sum(parameter.numel() for parameter in parameters.values())
        self.config = config
        self.next_step = 0
        self.failure: BaseException | None = None
        self.is_detached = False
        self.refusal: NonFiniteError | None = None  # of gradients that ranks kept: their update is not committed
        self._records = _Records(comm.size, self.is_first)
        self._scaler = scaler
        self._may_be_unused = may_be_unused
        self._buckets: list[Bucket] = []  # of the step that is being made
        self._arrived: dict[str, Tensor] = {}
        self._waiting: list[ParamGroup] = []
        self._ended_s: float | None = None  # when the last step was over
        self._write_lock = threading.Lock()
        self._agreed = False
        self._stream: torch.cuda.Stream | None = None
        self._steps = Steps(groups, comm, shards)
        # A method of self would make a cycle, and a process group that is collected late aborts the process.
        self._log = StepLog(self._records.add, config.on_nonfinite == "raise", READBACK_DELAY)
        self._lay_out()

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest step; on the device path this waits for it."""
        self._log.drain()
        return self._records.last

    @property
    def summary(self) -> Summary:
        """All steps so far."""
        self._log.drain()
        return self._records.summary

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
        self.note("change", str(config.algorithm.given))

    def log_settings(self, model: str) -> None:
        """Tell the sinks what will be done, as the first record of a run."""
        config = self.config
        dense = sum(self.parameters[name].numel() for group in self.groups for name in group.dense_names)
        settings: dict[str, Any] = {
            "model": model,
            "algorithm": describe(config.algorithm.given),
            "compressor": config.algorithm.name,
        }
        settings |= {"density": config.algorithm.density} if config.algorithm.has_density else {}
        settings |= {name: each for name, each in config.settings().items() if name not in settings}
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        header = {"kind": "run", "version": VERSION, "started": started, "step": self.next_step}
        self.sinks.log({**header, "workers": self.comm.size, "rank": self.comm.rank, "numel": self.numel,
                        "sparse_numel": self.numel - dense, "config": settings})  # fmt: skip

    def log(self, figures: Mapping[str, float | None]) -> None:
        """Hand figures of a script to the sinks, as those of the step that backward() made last."""
        self.sinks.log({"kind": "log", "step": max(self.next_step - 1, 0), "figures": dict(figures)})

    def note(self, event: str, message: str) -> None:
        """Tell the sinks what happened."""
        self.sinks.log({"kind": "event", "event": event, "step": self.next_step, "message": message})

    def go_on_at(self, step: int) -> None:
        """Make `step` the next one, once all ranks are seen to be there; earlier errors are forgotten."""
        self.next_step, self._agreed = step, False
        self._log.clear()

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: the first one, and of the first shard."""
        return self.comm.rank == 0 and (self.shards is None or self.shards.rank == 0)

    @property
    def is_plain_allreduce(self) -> bool:
        """Whether the current or next step does no more than DDP would, and on the CPU."""
        context = StepContext(self.next_step, self.config.algorithm_at(self.next_step))
        return all(group.is_plain_allreduce(context) and group.device.type == "cpu" for group in self.groups)

    def is_sparse(self, coming: bool) -> bool:
        """Return whether the latest step, whose means an optimizer has at hand, was sparse; or if the next will be."""
        algorithm = self.config.algorithm_at(self.next_step if coming else self.next_step - 1)
        return algorithm is not None and not isinstance(algorithm, Dense)

    @property
    def on_device(self) -> bool:
        """Whether sparse steps stay on the device."""
        return self._steps.on_device(self.config.algorithm, self._may_be_unused)

    def take_and_flush(self, bucket: Bucket) -> None:
        """Take a bucket on the worker thread, and write records after the last one."""
        self.take(bucket)
        # On the device path after the first one: the host then waits for the next bucket, not in the next forward.
        if bucket.index == 0 if self._steps.delay else bucket.is_last:
            self.flush_records()

    def take(self, bucket: Bucket) -> None:
        """Sort a bucket's gradients into their groups, and reduce those that are complete."""
        try:
            if self.failure is not None:
                raise PeerError(f"oktopk stopped at an earlier error: {self.failure}")
            if bucket.ready is not None:
                self.follow(bucket.ready, bucket.buffer.device)
            self._take(bucket)
        except BaseException as error:  # whatever it is, backward() must hear of it, and the other ranks too
            self.give_up(error, bucket)

    def follow(self, ready: torch.Event, device: torch.device) -> None:
        """Work on a stream of the exchange's own, behind what makes the gradients."""
        if self._stream is None:  # this thread keeps it: to choose it anew each time takes longer
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            torch.cuda.set_device(device)
            torch.cuda.set_stream(self._stream)
        ready.wait()

    def _take(self, bucket: Bucket) -> None:
        if not self._buckets or bucket.index == 0:
            self._begin(bucket)
        self._buckets.append(bucket)
        self._arrived.update(bucket.grads)
        clips = self.config.clip is not None and self._steps.context.algorithm is not None and not bucket.is_update
        if clips and bucket.is_last:
            self._clip()
        if bucket.is_last or not clips:  # the norm of the gradient is not known before all of it is here
            self._start_complete_groups()
        if bucket.is_last:
            self._finish()

    def _begin(self, bucket: Bucket) -> None:
        self.go_on()
        algorithm, may_be_unused = (
            self.config.algorithm_at(self.next_step),
            self._may_be_unused and not bucket.is_update,
        )
        on_device = self._steps.on_device(algorithm, may_be_unused)
        if not on_device:
            self._log.drain()
        scaler = None if bucket.is_update else self.scaler_of(bucket)
        loss_scale = 1.0 if scaler is None else self._loss_scale(scaler, on_device)
        context = StepContext(
            step=self.next_step,
            algorithm=algorithm,
            grad_scale=1.0 / loss_scale,
            loss_scale=loss_scale,
            may_be_unused=may_be_unused,
            filling=0.0 if scaler is None else math.nan,
            divides_last=self.shards is not None,
        )
        self._steps.begin(context)
        self._buckets, self._arrived, self._waiting = [], {}, self._groups_of_step()

    def go_on(self) -> None:
        """Go on with the exchange, unless it has failed, once all ranks are seen to be about to do the same."""
        if self.failure is not None:
            raise PeerError(f"oktopk stopped at an earlier error: {self.failure}")
        if not self._agreed:
            self.agree()

    def scaler_of(self, bucket: Bucket) -> Any:
        """Return the GradScaler that scaled the loss of a bucket's gradients; None if there was none."""
        return self._scaler if self._scaler is not None and self._scaler.is_enabled() else bucket.scaler

    def _groups_of_step(self) -> list[ParamGroup]:
        """Return the groups whose gradients a step brings."""
        return list(self.groups)

    def _loss_scale(self, scaler: Any, on_device: bool) -> float | Tensor:
        """Return the scale of the scaler of this backward pass; say once if `attach` was not given it."""
        if not self.config.scaled:
            self.config = replace(self.config, scaled=True)
            if self.is_first:
                sys.stderr.write("oktopk: a GradScaler scales the loss: its scale is used, as with attach(scaler=)\n")
        return loss_scale_of(scaler, on_device)

    def _clip(self) -> None:
        assert self.config.clip is not None
        context, limit = self._steps.context, self.config.clip / math.sqrt(self.comm.size)
        on_device, grads = bool(self._steps.delay), self._arrived.values()
        factor = clip_factor(grads, limit, context.loss_scale, on_device, self.shards)
        self._steps.context = replace(context, grad_scale=factor / context.loss_scale)

    def _start_complete_groups(self) -> None:
        for group in [group for group in self._waiting if all(name in self._arrived for name in group.names)]:
            self._waiting.remove(group)
            grads = [self._arrived[name] for name in group.names]
            self._steps.start(group, grads, grads)

    def _finish(self) -> None:
        """Commit the step, or leave everything as it was; then let backward() go on."""
        unused = self._waiting and self.shards is None  # DDP brings every gradient, FSDP none of an unused unit
        assert not unused, f"backward ended without a gradient for {self._waiting[0].names}"
        buckets, self._buckets, self.next_step = self._buckets, [], self.next_step + 1
        # A step in which an earlier one's error is raised is not committed: what backward() does not return must not be
        # missing in the residuals.
        made = self._steps.finish(self._log.take_due(self._steps.context.step) or self.refusal)
        now_s = time.perf_counter()
        made.wait_seconds = now_s - buckets[-1].came_s
        made.step_seconds = None if self._ended_s is None else now_s - self._ended_s
        self._ended_s = now_s
        self._log.add(made)
        if not self._steps.delay:
            self._log.drain()
        self._release_backward(buckets, made.error)

    def _release_backward(self, buckets: Sequence[Bucket], error: NonFiniteError | None) -> None:
        # The future itself would make DDP wait only for tensors in its result, and for this stream's work on them.
        over = record_event(buckets[0].buffer.device)
        for bucket in buckets:
            bucket.over = over
        raised = error if self.config.on_nonfinite == "raise" else None
        if raised is not None and over is not None:
            over.synchronize()  # backward() raises and waits for nothing: the next one must not meet running work
        buckets[0].done.set_result(raised)

    def save_(self) -> None:
        """Read the stats of all steps, and copy all states to the host."""
        self._log.drain()
        self._steps.save_()

    def state_to_host(self) -> None:
        """Have all states on the host, and none on the device."""
        self._log.drain()
        self._steps.to_host()

    def flush_records(self, delay: int | None = None) -> None:
        """Write the records of finished steps to the sinks, but for the last `delay` ones, which may still run."""
        try:
            self._log.drain(but=max(self._steps.delay - 1, 0) if delay is None else delay)
            self._write()
        except BaseException as error:  # whatever it is, the next backward() must hear of it, and the other ranks too
            self._tell_others(error)
            self.failure = self.failure or error

    def _write(self) -> None:
        with self._write_lock:  # not the log's: a sink may ask for `last`
            while self._records.unwritten:
                self.sinks.write(self._records.unwritten.popleft())

    def close(self) -> None:
        """Write the last records to the sinks, and close them."""
        self._log.drain()
        for error in self._log.errors:  # there is no backward() left to raise it
            sys.stderr.write(f"oktopk: WARNING: {error}\n")
        self._write()
        # Python keeps the error that ends a script there. A notebook keeps earlier ones, and goes on.
        ended_by = self.failure or (None if self.is_detached else getattr(sys, "last_value", None))
        self.note(*(("end", "detached") if ended_by is None else ("failed", repr(ended_by))))
        self.sinks.close()

    def give_up(self, error: BaseException, bucket: Bucket) -> None:
        """Tell backward() here, and the other ranks, why there will be no more exchanges."""
        self._tell_others(error)
        self.failure = self.failure or error
        if not bucket.done.done():
            bucket.done.set_result(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _tell_others(self, error: BaseException) -> None:
        """Leave this rank's own error where the others find it; another's is there already."""
        if isinstance(error, (PeerError, MismatchError)):
            return
        self.comm.fail(error)
        if self.shards is not None:
            self.shards.fail(error)

    def agree(self) -> None:
        """Make sure that all ranks are about to do the same."""
        every = gather_settings(self._shared(), self.comm, self.groups[0].device)
        self.comm.pop()
        check_same(every)
        if self.shards is not None:
            common = {**self.config.settings(), "the step": self.next_step}
            check_same(gather_settings(common, self.shards, torch.device("cpu")))
        self._agreed = True

    def _shared(self) -> dict[str, Any]:
        """Return the settings and the state that all ranks must share, by the names that an error gives them."""
        # By the group's dtype: under DDP's mixed_precision a parameter's own is another one while backward runs.
        dtypes = {name: group.dtype for group in self.groups for name in group.names}
        return {
            "the parameters": [f"{name} {tuple(p.shape)} {dtypes[name]}" for name, p in self.parameters.items()],
            **self.config.settings(),
            "what units deliver": ["sums" if group.sums else "means" for group in self.groups],
            "the parameters that travel dense": [name for group in self.groups for name in group.dense_names],
            "the step": self.next_step,
            "the device path": self.on_device,
        }

    def _lay_out(self) -> None:
        dense = excluded(self.config.exclude, self.parameters)
        for group in self.groups:
            group.lay_out_(dense.__contains__)


def clip_factor(
    grads: Iterable[Tensor], clip: float, loss_scale: float | Tensor, on_device: bool, shards: Comm | None
) -> float | Tensor:
    """Return the factor that scales gradients to a norm of at most `clip`, once `loss_scale` is divided out."""
    # Not by dot(): that adds up in another order where DDP has put a gradient elsewhere, as after a restart.
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    if on_device:
        norm = torch.linalg.vector_norm(torch.stack(norms)) / loss_scale
        return torch.where(norm.isfinite() & (norm > clip), clip / norm, 1.0)
    square = math.fsum(each * each for each in map(float, norms))
    if shards is not None:  # in the order of the ranks, so that all have the same bits
        square = math.fsum(shards.all_gather(torch.tensor([square], dtype=torch.float64)).flatten().tolist())
    total = math.sqrt(square) / loss_scale
    return clip / total if math.isfinite(total) and total > clip else 1.0
