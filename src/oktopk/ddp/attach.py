"""`attach`: Ok-Topk in a DDP script, in one line.

The hook hands each bucket to a worker thread with a process group of its own, so that the exchange overlaps backward.
The futures of all buckets are completed together, once every rank's whole gradient is known to be finite or refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.optim import Optimizer

from oktopk.algorithms import Algorithm
from oktopk.comm import MeteredComm, ProcessGroupComm
from oktopk.cuda.events import record_event, wait_event
from oktopk.ddp.engine import Bucket, DDPConfig, Engine
from oktopk.ddp.exclude import Exclusion, excluded, rules_for
from oktopk.ddp.fsdp import FSDPWrapper
from oktopk.ddp.handle import Handle, algorithm_of
from oktopk.ddp.hook import DDPWrapper, hook_of, is_fsdp2
from oktopk.ddp.loss_scale import forget_scalers, scaler_of_this_backward, watch_scalers
from oktopk.ddp.momentum import SparseMomentum, lr_factor, optimizers_of, warn_of_momentum
from oktopk.ddp.updates import Updates, can_exchange_updates
from oktopk.errors import SettingError, StateError, one_of, within
from oktopk.telemetry.format import count
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import SINK_PATIENCE_S, Sink, Sinks


def attach(
    model: nn.Module,
    algorithm: Algorithm | str = "oktopk",
    *,
    dense_steps: int = 128,
    exclude: Exclusion | Iterable[Exclusion] | None = None,
    clip: float | None = None,
    density_schedule: Sequence[tuple[int, float]] | None = None,
    on_nonfinite: str = "raise",
    scaler: Any = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    sparse_momentum: float | None = None,
    sinks: Sequence[Sink | Callable[[StepRecord], object]] = (),
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    timeout: float = 300.0,
) -> Attached:
    """Make DDP or FSDP exchange gradients with `algorithm`; return the handle to it. All ranks call this alike.

    model               a DistributedDataParallel model, or one of FSDP2: by `fully_shard` on a 2-D mesh or on the shard
                        dimension alone, or by `replicate`
    algorithm           an algorithm, the name of one, or any object with its `init` and `reduce`; default: OkTopk()
    dense_steps         steps before the first sparse one; they flush whatever residual there is
    exclude             what travels dense: glob patterns of names, predicates of (name, parameter), or several of both;
                        default: the smallest tensors, such as biases, up to a tenth of the elements that are sent
    clip                sparse steps: this rank's gradient is scaled to a norm of at most clip / sqrt(P) before the
                        exchange. The norm is known when backward is over, so that the two do not overlap then
    density_schedule    [(steps, density), ...] for the first sparse steps; then the algorithm's own density
    on_nonfinite        "raise": NaN or Inf on any rank is an error in backward() on all; "skip": the step delivers
                        zeros, or NaN under a GradScaler, which then skips its step. The residuals stay as they were
    scaler              your torch.amp.GradScaler: residuals are kept in unscaled units, whatever the scale does. If
                        none is given, `GradScaler.scale` is wrapped to find the one that scaled each loss. Anything
                        with is_enabled() and get_scale() will do
    optimizer           the model's optimizer, or several. With Adam, AdamW and Muon sparse steps exchange what each
                        rank's optimizers moved, not the gradients, from within their step(). SGD and Adam get a lower
                        momentum in sparse steps. If none is given, a momentum known to be harmful is warned of
    sparse_momentum     that momentum, where the optimizer's own is not less; default: 0.5
    sinks               where the records go: `JsonlSink`, `TensorBoardSink`, `MemorySink`, or any callable
    group               a process group for the exchange alone (default: a new one with the ranks of the model's)
    mesh                FSDP on the shard dimension alone: the replicate dimension, along which shards are exchanged
    timeout             seconds after which a rank that waits for another gives up
    """
    wrapper = _wrapper_of(model, group, mesh)
    used = algorithm_of(algorithm)
    config = DDPConfig(
        algorithm=used,
        dense_steps=int(within("dense_steps", dense_steps, 0)),
        exclude=rules_for(exclude, wrapper.parameters, used),
        clip=None if clip is None else within("clip", clip, 0, open_low=True),
        density_schedule=_schedule_of(density_schedule or (), used),
        on_nonfinite=one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip")),
        scaled=scaler is not None and bool(scaler.is_enabled()),
        sparse_momentum=None if sparse_momentum is None else within("sparse_momentum", sparse_momentum, 0, 1),
    )
    if sparse_momentum is not None and optimizer is None:
        raise SettingError("sparse_momentum is set in an optimizer: give attach optimizer=, too")
    optimizers = None if optimizer is None else optimizers_of(optimizer, model.parameters())
    config.optimizer = ", ".join(type(each).__name__ for each in optimizers or ()) or None
    config.exchanges_updates = _exchanges_updates(wrapper, optimizers)
    attached = Attached(model, wrapper, config, scaler, optimizers, sinks, timeout)
    _begin(attached, wrapper)
    return attached


def _exchanges_updates(wrapper: DDPWrapper | FSDPWrapper, optimizers: Sequence[Optimizer] | None) -> bool:
    return wrapper.keeps_gradients and can_exchange_updates(optimizers, wrapper.parameters.values())


def _begin(attached: Attached, wrapper: DDPWrapper | FSDPWrapper) -> None:
    """Register the hook, compile the kernels, and say what is active."""
    wrapper.register(attached)
    attached.compile_kernels()
    attached.announce()
    attached._engine.log_settings(wrapper.name)


def _schedule_of(given: Sequence[tuple[int, float]], algorithm: Algorithm) -> tuple[tuple[int, float], ...]:
    """Return the (steps, density) of a schedule; raise if one cannot be, or if the algorithm has no density."""
    schedule = []
    for steps, density in given:
        schedule.append(
            (int(within("steps of density_schedule", steps, 1)), within("density", density, 0, 1, open_low=True))
        )
        algorithm.with_density(density)  # raises if it has none
    return tuple(schedule)


class Attached(Handle):
    """The handle that `attach` returns. `rank` and `size` are those of `group`, the process group of the exchange.

    With FSDP these are the replicas of this rank's shard.
    """

    def __init__(
        self,
        model: nn.Module,
        wrapper: DDPWrapper | FSDPWrapper,
        config: DDPConfig,
        scaler: Any,
        optimizers: Sequence[Optimizer] | None,
        sinks: Sequence[Sink | Callable[[StepRecord], object]],
        timeout: float,
    ) -> None:
        parameters = wrapper.parameters
        excluded(config.exclude, parameters)  # raises for a pattern that matches nothing, before ranks meet
        self._model = weakref.ref(model)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.looks_for_scaler = not config.scaled
        if self.looks_for_scaler:
            watch_scalers()
        self._done: Future[Exception | None] = Future()  # of the step that is being made
        self.group, shards, own = wrapper.open_groups(timeout)
        comm = MeteredComm(ProcessGroupComm(self.group))
        self.place, groups = wrapper.place, wrapper.make_groups()
        self.device = groups[0].device
        writes = Sinks(sinks, min(SINK_PATIENCE_S, timeout / 2))  # a sink is dropped before the other ranks give up
        engine = Engine(parameters, groups, comm, config, writes, scaler, wrapper.may_be_unused, shards)
        self._updates = Updates(engine, optimizers) if config.exchanges_updates and optimizers else None
        self._momentum = None if optimizers is None else _lower_momentum(engine, optimizers, self._updates)
        leave = self._momentum.close if self._momentum is not None else _watch_momentum(engine)
        self._start(engine, own, timeout, partial(_leave, leave, self._updates))
        if self._momentum is not None:
            self.MORE = ("momentum",)
        if self._updates is not None:
            self.MORE = ("momentum", "updates")
            self._updates.begin(self._worker.jobs)

    @property
    def active(self) -> bool:
        """Whether gradients go through here: registered, the worker alive, nothing failed. A script can assert it."""
        hook = hook_of(self._model())
        return hook is not None and hook.target is self and self._worker.is_alive() and self._engine.failure is None

    @property
    def step(self) -> int:
        """The step that comes next, from 0."""
        return self._engine.next_step

    def detach(self) -> None:
        """Go back to plain DDP: finish the current step, join the worker, close the sinks. Residuals stay readable.

        Where updates were exchanged, all ranks call it: they get the mean of all optimizers' moments. A rank that is
        about to end by an error calls it alone.
        """
        is_ending = sys.exc_info()[0] is not None  # the others may be in a collective of another kind
        if self._updates is not None and self._updates.has_begun and self.active and not is_ending:
            self._updates.agree_()
        hook = hook_of(self._model())
        if hook is not None and hook.target is self:
            hook.target = None
        self._engine.is_detached = True
        self._finalizer()

    def _when(self) -> str:
        steps = self._engine.config.dense_steps
        when = f"{count(steps, 'dense step')}, then sparse" if steps else "sparse from the first step"
        return when + ", of the optimizer's updates" * self._engine.config.exchanges_updates

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP, on the autograd thread, and return at once."""
        model = self._model()
        if model is not None and not vars(model).get("_divide_by_initial_world_size", True):
            raise SettingError("Join(divide_by_initial_world_size=False) is not supported: the mean is over all ranks")
        in_backward = torch._C._current_graph_task_id() >= 0  # Join also calls hooks outside of it
        if bucket.index() == 0:  # the buckets of a step are done together
            self._done = Future(devices=[self.device] if self.device.type == "cuda" else None)
        if bucket.is_last() and in_backward:  # an earlier bucket may be of a backward pass before this one
            _raise_after_backward(self._done)
        buffer = bucket.buffer().detach()  # under create_graph it is part of a graph
        parameters = bucket.parameters()
        grads = torch.split(buffer, [parameter.numel() for parameter in parameters])
        taken = Bucket(
            index=bucket.index(),
            is_last=bucket.is_last(),
            buffer=buffer,
            grads=dict(zip((self._names[id(each)] for each in parameters), grads, strict=True)),
            done=self._done,
            scaler=scaler_of_this_backward() if self.looks_for_scaler else None,
            ready=record_event(buffer.device),
        )
        if not in_backward and self._updates is not None and self._updates.is_due:
            raise SettingError("Join is not supported with optimizer=: leave optimizer= out, or give all ranks data")
        self.take(taken)
        return self._done.then(partial(_outcome, taken, in_backward))

    def take(self, bucket: Bucket) -> None:
        """Take a bucket of gradients: for the exchange, or for this rank's optimizers, whose updates are exchanged."""
        if self._updates is not None and self._updates.is_due:
            self._updates.keep(bucket)
        else:
            self.submit(bucket)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which this rank resumes bit for bit; every rank saves its own."""
        momentum = {} if self._momentum is None else {"momentum": self._momentum.state_dict()}
        updates = {} if self._updates is None else {"updates": self._updates.state_dict()}
        return {**super().state_dict(), **momentum, **updates}

    def load_rest(self, saved: Mapping[str, Any], is_own: bool) -> None:
        """Go on with this rank's moments of its optimizers; those of another rank stay with it."""
        updates = saved.get("updates", {})
        if bool(updates) != (self._updates is not None) and any(
            bool(each.any()) for each in saved["residual"].values()
        ):
            kinds = {True: "updates, from attach(optimizer=)", False: "gradients"}
            raise StateError(f"wanted residuals of {kinds[not updates]}, and these are of {kinds[bool(updates)]}")
        if self._momentum is not None:
            self._momentum.load_state_dict(saved.get("momentum", {}))
        if self._updates is not None:
            self._updates.load_state_dict(
                updates if is_own else {key: updates[key] for key in updates if key == "begun"}
            )

    def submit(self, bucket: Bucket) -> None:
        """Have a bucket's gradients reduced, by the worker where that takes a thread of its own."""
        # gloo sums in threads of its own: a hop through ours would only delay it. With FSDP on a GPU two threads would
        # call NCCL in any order, which may deadlock.
        on_gpu = bucket.buffer.is_cuda
        if self._engine.shards is None if on_gpu else not self._engine.is_plain_allreduce:
            self._worker.jobs.put(partial(self._engine.take_and_flush, bucket))
        else:
            self._engine.take(bucket)
            if bucket.is_last:
                self._worker.jobs.put(self._engine.flush_records)


def _leave(restore: Callable[[], None], updates: Updates | None) -> None:
    """Leave the optimizers as they were before."""
    restore()
    if updates is not None:
        updates.close()


def _outcome(bucket: Bucket, in_backward: bool, done: Future[Exception | None]) -> Tensor:
    """Return the bucket's buffer to DDP. After an error it holds no mean, and backward() raises that error."""
    error = done.value()
    if error is None:
        wait_event(bucket.buffer.device, bucket.over)
    elif not in_backward:
        raise error
    return bucket.buffer


def _raise_after_backward(done: Future[Exception | None]) -> None:
    """Make this backward() raise the error of its step, once DDP is through: an error in a future loses its class."""
    autograd = torch.autograd.Variable._execution_engine

    def check() -> None:
        error = done.value()
        if error is not None:
            forget_scalers()
            raise error

    # DDP queues its own callback during backward. One that is queued by a callback comes after it.
    autograd.queue_callback(lambda: autograd.queue_callback(check))


def _wrapper_of(model: nn.Module, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> DDPWrapper | FSDPWrapper:
    if is_fsdp2(model):
        return FSDPWrapper(model, group, mesh)
    if mesh is not None:
        raise SettingError("mesh= is for models sharded by fully_shard: leave it out, and give subgroups as group=")
    return DDPWrapper(model, group)


def _lower_momentum(engine: Engine, optimizers: Sequence[Optimizer], updates: Updates | None) -> SparseMomentum:
    """Lower the momentum of these optimizers in sparse steps."""
    most, speaks = engine.config.sparse_momentum, engine.is_first
    if updates is None:
        return SparseMomentum(optimizers, most, engine.is_sparse, speaks)
    return SparseMomentum(optimizers, most, updates.is_update, speaks, lr_factor(engine.comm.size))


def _watch_momentum(engine: Engine) -> Callable[[], None]:
    """Warn of a momentum in sparse steps that is known to be harmful; return the way out."""
    return warn_of_momentum(engine.parameters.values(), engine.is_sparse, engine.is_first)
