"""`attach`: Ok-Topk in a DDP script, in one line.

The hook hands each bucket to a worker thread with a process group of its own, so that the exchange overlaps backward.
The futures of all buckets are completed together, once every rank's whole gradient is known to be finite or refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.algorithms import Algorithm
from oktopk.comm import MeteredComm, ProcessGroupComm
from oktopk.cuda.events import record_event, wait_event
from oktopk.ddp.engine import Bucket, DDPConfig, Engine
from oktopk.ddp.exclude import Exclusion, excluded, rules_for
from oktopk.ddp.handle import Handle, algorithm_of
from oktopk.ddp.hook import check_alone_in_backward, check_model, hook_of, register
from oktopk.ddp.loss_scale import forget_scalers, scaler_of_this_backward, watch_scalers
from oktopk.ddp.mixed_precision import gradient_dtype
from oktopk.ddp.momentum import SparseMomentum, optimizers_of, warn_of_momentum
from oktopk.errors import SettingError, one_of, within
from oktopk.steps import make_groups
from oktopk.telemetry.format import count
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import SINK_PATIENCE_S, Sink, Sinks


def attach(
    ddp_model: DistributedDataParallel,
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
    timeout: float = 300.0,
) -> Attached:
    """Make DDP exchange its gradients with `algorithm`; return the handle to it. All ranks call this alike.

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
    optimizer           the model's optimizer, or several: in sparse steps they get a lower momentum (SGD, Adam, AdamW;
                        Muon and others keep theirs). If none is given, a momentum known to be harmful is warned of
    sparse_momentum     that momentum, where the optimizer's own is not less; default: 0.5 for SGD, 0.7 for Adam
    sinks               where the records go: `JsonlSink`, `TensorBoardSink`, `MemorySink`, or any callable
    group               a process group for the exchange alone (default: a new one with the ranks of the model's)
    timeout             seconds after which a rank that waits for another gives up
    """
    check_model(ddp_model)
    used = algorithm_of(algorithm)
    config = DDPConfig(
        algorithm=used,
        dense_steps=int(within("dense_steps", dense_steps, 0)),
        exclude=rules_for(exclude, _parameters_of(ddp_model), used),
        clip=None if clip is None else within("clip", clip, 0, open_low=True),
        density_schedule=tuple(
            (int(within("steps of density_schedule", steps, 1)), within("density", density, 0, 1, open_low=True))
            for steps, density in density_schedule or ()
        ),
        on_nonfinite=one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip")),
        scaled=scaler is not None and bool(scaler.is_enabled()),
        sparse_momentum=None if sparse_momentum is None else within("sparse_momentum", sparse_momentum, 0, 1),
    )
    if sparse_momentum is not None and optimizer is None:
        raise SettingError("sparse_momentum is set in an optimizer: give attach optimizer=, too")
    optimizers = None if optimizer is None else optimizers_of(optimizer, ddp_model.parameters())
    for _, density in config.density_schedule:
        config.algorithm.with_density(density)  # raises if the algorithm has none
    if not config.scaled:
        watch_scalers()
    attached = Attached(ddp_model, config, scaler, optimizers, sinks, group, timeout)
    register(ddp_model, attached)
    attached.compile_kernels()
    attached.announce()
    attached._engine.log_settings(type(ddp_model.module).__name__)
    return attached


class Attached(Handle):
    """The handle that `attach` returns. `rank` and `size` are those of `group`, the process group of the exchange."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        config: DDPConfig,
        scaler: Any,
        optimizers: Sequence[Optimizer] | None,
        sinks: Sequence[Sink | Callable[[StepRecord], object]],
        group: dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        parameters = _parameters_of(ddp_model)
        excluded(config.exclude, parameters)  # raises for a pattern that matches nothing, before ranks meet
        self._model = weakref.ref(ddp_model)
        devices = {parameter.device for parameter in parameters.values() if parameter.is_cuda}
        if len(devices) > 1:
            raise SettingError(f"attach wants a model whose parameters are on one GPU; these are on {len(devices)}")
        if group is not None:
            _check_ranks(group, ddp_model)
        if devices:
            check_alone_in_backward(str(dist.get_backend_config(group)), ddp_model.module)
        self._devices: list[int | str | torch.device] | None = list(devices) or None
        self._looks_for_scaler = not config.scaled
        self._done: Future[Exception | None] = Future()  # of the step that is being made
        self.group = group or _new_group(ddp_model, timeout)
        comm = MeteredComm(ProcessGroupComm(self.group))
        groups = make_groups(list(parameters.items()), int(ddp_model.bucket_bytes_cap), gradient_dtype(ddp_model))
        writes = Sinks(sinks, min(SINK_PATIENCE_S, timeout / 2))  # a sink is dropped before the other ranks give up
        may_be_unused = bool(ddp_model.find_unused_parameters or ddp_model.static_graph)
        engine = Engine(parameters, groups, comm, config, writes, scaler, may_be_unused)
        self._start(engine, group is None, timeout, _lower_momentum(engine, optimizers))

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
        """Go back to plain DDP: finish the current step, join the worker, close the sinks. Residuals stay readable."""
        hook = hook_of(self._model())
        if hook is not None and hook.target is self:
            hook.target = None
        self._engine.is_detached = True
        self._finalizer()

    def _when(self) -> str:
        steps = self._engine.config.dense_steps
        return f"{count(steps, 'dense step')}, then sparse" if steps else "sparse from the first step"

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP, on the autograd thread, and return at once."""
        model = self._model()
        if model is not None and not vars(model).get("_divide_by_initial_world_size", True):
            raise SettingError("Join(divide_by_initial_world_size=False) is not supported: the mean is over all ranks")
        in_backward = torch._C._current_graph_task_id() >= 0  # Join also calls hooks outside of it
        if bucket.index() == 0:  # the buckets of a step are done together
            self._done = Future(devices=self._devices)
        if bucket.is_last() and in_backward:  # an earlier bucket may be of a backward pass before this one
            _raise_after_backward(self._done)
        buffer = bucket.buffer().detach()  # under create_graph it is part of a graph
        taken = Bucket(
            index=bucket.index(),
            is_last=bucket.is_last(),
            buffer=buffer,
            parameters=bucket.parameters(),
            done=self._done,
            scaler=scaler_of_this_backward() if self._looks_for_scaler else None,
            ready=record_event(buffer.device),
        )
        if buffer.is_cuda or not self._engine.is_plain_allreduce:
            self._worker.jobs.put(partial(self._engine.take_and_flush, taken))
        else:
            self._engine.take(taken)  # gloo sums in threads of its own: a hop through ours would only delay it
            if taken.is_last:
                self._worker.jobs.put(self._engine.flush_records)
        return self._done.then(partial(_outcome, taken, in_backward))


def _parameters_of(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters in DDP's buckets, by name: those that required gradients when DDP was made."""
    buckets = model.reducer._get_zeros_like_grad_buckets()
    reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return {name: parameter for name, parameter in model.module.named_parameters() if id(parameter) in reduced}


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


def _check_ranks(group: dist.ProcessGroup, model: DistributedDataParallel) -> None:
    """Refuse a group of other ranks than the model's: the mean over those would be another mean, and nobody told."""
    wanted = sorted(dist.get_process_group_ranks(model.process_group))
    # On ranks that are not in it, new_group returns a mere number.
    came = sorted(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else None
    if came != wanted:
        has = "does not have this rank" if came is None else f"has ranks {came}"
        raise SettingError(
            f"group= wants a process group of ranks {wanted}, on which the model trains; this one {has}. Make it with "
            f"dist.new_group({wanted}) on every rank of the world"
        )


def _new_group(model: DistributedDataParallel, timeout: float) -> dist.ProcessGroup:
    """Return a group of the same ranks for the exchange alone, so that it cannot mix with DDP's own collectives."""
    ranks = dist.get_process_group_ranks(model.process_group)
    if len(ranks) < dist.get_world_size():
        # new_group wants all ranks of the world, who do not come here. Its use_local_synchronization names the group
        # by how many groups a rank has, which need not be the same on all.
        raise SettingError(
            f"the model trains on ranks {ranks} of {dist.get_world_size()}: make a second group for the exchange, "
            f"with dist.new_group({ranks}) on every rank of the world, and give it as group="
        )
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _lower_momentum(engine: Engine, optimizers: Sequence[Optimizer] | None) -> Callable[[], None]:
    """Lower the momentum of these optimizers in sparse steps, or warn of it; return the way back."""
    speaks = not engine.comm.rank
    if optimizers is None:
        return warn_of_momentum(engine.parameters.values(), engine.is_sparse, speaks)
    return SparseMomentum(optimizers, engine.config.sparse_momentum, engine.is_sparse, speaks).close
