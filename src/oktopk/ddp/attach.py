"""`attach`: Ok-Topk in a DDP script, in one line.

The hook hands each bucket to a worker thread with a process group of its own, so that the exchange overlaps backward.
The futures of all buckets are completed together, once every rank's whole gradient is known to be finite or refused.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from html import escape
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.algorithms import Algorithm, as_algorithm, make_algorithm
from oktopk.comm import MeteredComm, ProcessGroupComm
from oktopk.cuda.events import record_event, wait_event
from oktopk.ddp.engine import Bucket, DDPConfig, Engine
from oktopk.ddp.exclude import Exclusion, excluded, rules_of, smallest
from oktopk.ddp.hook import check_alone_in_backward, check_model, hook_of, register
from oktopk.ddp.loss_scale import forget_scalers, scaler_of_this_backward, watch_scalers
from oktopk.ddp.mixed_precision import gradient_dtype
from oktopk.ddp.momentum import SparseMomentum, optimizers_of, warn_of_momentum
from oktopk.errors import MismatchError, SettingError, StateError, one_of, within
from oktopk.kernels import kernels_for
from oktopk.steps import make_groups
from oktopk.telemetry.format import count
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import SINK_PATIENCE_S, Sink, Sinks
from oktopk.telemetry.summary import Summary

VERSION = 3


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
    used = _algorithm_of(algorithm)
    config = DDPConfig(
        algorithm=used,
        dense_steps=int(within("dense_steps", dense_steps, 0)),
        exclude=_rules_of(exclude, ddp_model, used),
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
    attached.announce()
    attached._engine.log_settings(type(ddp_model.module).__name__)
    return attached


class Attached:
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
        self.rank, self.size = comm.rank, comm.size
        groups = make_groups(list(parameters.items()), int(ddp_model.bucket_bytes_cap), gradient_dtype(ddp_model))
        writes = Sinks(sinks, min(SINK_PATIENCE_S, timeout / 2))  # a sink is dropped before the other ranks give up
        may_be_unused = bool(ddp_model.find_unused_parameters or ddp_model.static_graph)
        self._engine = Engine(parameters, groups, comm, config, writes, scaler, may_be_unused)
        self._worker = WorkerThread()
        leave = _lower_momentum(self._engine, optimizers)
        self._finalizer = weakref.finalize(
            self, _shut_down, os.getpid(), leave, self._worker, self._engine, self.group, group is None, timeout
        )
        try:
            self._engine.agree()
        except MismatchError:
            self._finalizer()
            raise

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest step; None before the first."""
        return self._engine.last

    @property
    def active(self) -> bool:
        """Whether gradients go through here: registered, the worker alive, nothing failed. A script can assert it."""
        hook = hook_of(self._model())
        return hook is not None and hook.target is self and self._worker.is_alive() and self._engine.failure is None

    @property
    def step(self) -> int:
        """The step that comes next, from 0."""
        return self._engine.next_step

    @property
    def residual(self) -> dict[str, Tensor]:
        """A copy of what this rank has not delivered yet, by parameter, flat."""
        return {name: tensor for group in self._engine.groups for name, tensor in group.by_name().items()}

    def residual_norm(self) -> float:
        """Return the norm of this rank's residual. It takes a pass over all elements, so do not call it every step."""
        return float(self.residual_norm_tensor())

    def residual_norm_tensor(self) -> Tensor:
        """Return the same norm on the residual's device; the host does not wait for it."""
        norms = [torch.linalg.vector_norm(group.residual.held).double() for group in self._engine.groups]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    @property
    def algorithm(self) -> Any:
        """The algorithm of the sparse steps. May be set between steps, on all ranks alike; residuals stay."""
        return self._engine.config.algorithm.given

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm | str) -> None:
        self._engine.change(replace(self._engine.config, algorithm=_algorithm_of(algorithm)))

    @property
    def density(self) -> float | None:
        """The density of the sparse steps, past any schedule. May be set between steps, on all ranks alike."""
        algorithm = self._engine.config.algorithm
        return algorithm.density if algorithm.has_density else None

    @density.setter
    def density(self, density: float) -> None:
        self.algorithm = self._engine.config.algorithm.with_density(density)

    def exclude(self, exclude: Exclusion | Iterable[Exclusion]) -> None:
        """Make other parameters travel dense from the next step on, which also delivers their residuals."""
        self._engine.change(replace(self._engine.config, exclude=rules_of(exclude)))

    def summary(self) -> Summary:
        """Return the totals of all steps so far; `print` shows them as a table."""
        return self._engine.summary

    def log(self, **figures: Any) -> None:
        """Add figures of yours, such as a loss, to the record of the latest step, for the report and the sinks.

        Numbers and tensors of one element are taken; for one on a GPU the host waits. A NaN or Inf is kept as unknown.
        """
        self._engine.log({name: _number_of(name, value) for name, value in figures.items()})

    def flush(self) -> None:
        """Write the records of all steps so far to the sinks; on the device path this waits for the steps."""
        self._engine.flush_records(delay=0)

    def detach(self) -> None:
        """Go back to plain DDP: finish the current step, join the worker, close the sinks. Residuals stay readable."""
        hook = hook_of(self._model())
        if hook is not None and hook.target is self:
            hook.target = None
        self._engine.is_detached = True
        self._finalizer()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which this rank resumes bit for bit; every rank saves its own."""
        self._engine.save_()
        return {
            "version": VERSION,
            "algorithm": type(self.algorithm).__name__,
            "rank": self.rank,
            "size": self.size,
            "step": self.step,
            "residual": self.residual,
            "groups": [group.state_dict() for group in self._engine.groups],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict`; one that does not fit is refused and changes nothing.

        Mode, ranking and all other settings are those of this attachment, not the saved ones.
        """
        version = saved.get("version") if isinstance(saved, Mapping) else None
        if version != VERSION:
            raise StateError(f"wanted an attachment's state dict of version {VERSION}, not of version {version!r}")
        self.check_parameters({name: tensor.numel() for name, tensor in saved["residual"].items()})
        mine = {"algorithm": type(self.algorithm).__name__, "size": self.size, "rank": self.rank}
        for what, ours in mine.items():
            if saved[what] != ours:
                advice = "; save_distributed and load_distributed change the world size" if what == "size" else ""
                raise StateError(f"the state dict is of {what} {saved[what]!r}, here it is {ours!r}{advice}")
        self.load_residual(saved["residual"], saved["step"])
        self.load_groups(saved["groups"])

    def load_residual(self, residual: Mapping[str, Tensor], step: int) -> None:
        """Hold these residuals, by parameter, and go on at `step`."""
        self._engine.state_to_host()
        for group in self._engine.groups:
            group.load_by_name_(residual)
            group.state = None
        self._engine.go_on_at(int(step))

    def load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Resume with these algorithm states; where they do not fit the current settings, the algorithm starts anew."""
        groups, comm, algorithm = self._engine.groups, self._engine.comm, self._engine.config.algorithm
        if [int(group["group"]) for group in saved] != [group.fingerprint for group in groups]:
            why = "for other groups of parameters than here"
        else:
            fits = [group.load_state_dict_(each, algorithm, comm) for group, each in zip(groups, saved, strict=True)]
            if all(fits):
                return
            why = f"with another algorithm, mode or ranking than {self.algorithm}"
        if not self.rank:
            sys.stderr.write(f"oktopk: the state was saved {why}: residuals are kept, the algorithm starts anew\n")

    def __str__(self) -> str:
        groups, steps = self._engine.groups, self._engine.config.dense_steps
        dense, total = self._dense_numels, len(self._engine.parameters)
        on_device = self._engine.on_device
        kernel = "gpu (triton), steps stay there" if on_device else kernels_for(groups[0].residual.held).name
        return (
            f"{self.algorithm} on {count(self.size, 'rank')}; "
            f"{count(steps, 'dense step') + ', then sparse' if steps else 'sparse from the first step'}; "
            f"{total - len(dense)} parameters ({self._engine.numel - sum(dense):,} elements) sparse, "
            f"{len(dense)} ({sum(dense):,}) dense; kernel: {kernel}"
        )

    def _repr_html_(self) -> str:
        """Return settings and summary, for notebooks."""
        return f"<p>{escape(str(self))}</p>{self.summary()._repr_html_()}"

    @property
    def _dense_numels(self) -> list[int]:
        """Elements of the parameters that travel dense."""
        names = (name for group in self._engine.groups for name in group.dense_names)
        return [self._engine.parameters[name].numel() for name in names]

    def announce(self) -> None:
        """Print the active settings to stderr on rank 0."""
        if self.rank:
            return
        sys.stderr.write(f"oktopk: {self}\n")
        dense = self._dense_numels
        sparse = self._engine.numel - sum(dense)
        selected = 2 * sparse * (self.density or 1.0)  # an index and a value each
        warnings = {
            "one rank has nobody to exchange with: its sparse steps only cost time": self.size == 1,
            "every parameter travels dense, nothing will be compressed": not sparse,
            f"most bytes travel dense: {sum(dense):,} elements of small tensors. Give attach another exclude=, such as "
            "() for none": sparse and sum(dense) > selected,
        }
        for text in (text for text, holds in warnings.items() if holds):
            sys.stderr.write(f"oktopk: WARNING: {text}\n")

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

    def check_parameters(self, theirs: Mapping[str, int]) -> None:
        """Refuse a state whose parameters, given by name and length, are not this model's."""
        ours = {name: parameter.numel() for name, parameter in self._engine.parameters.items()}
        if theirs != ours:
            missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
            resized = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
            raise StateError(
                f"the state dict is of another model: missing {missing}, unknown {extra}, of another size {resized}"
            )


class WorkerThread(threading.Thread):
    """Runs the `jobs` that are put into its queue, until `stop`. A job deals with its own errors."""

    def __init__(self) -> None:
        super().__init__(name="oktopk exchange", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Run the jobs."""
        while (job := self.jobs.get()) is not None:
            job()
            del job  # or the last job, and all it refers to, would live until the next one comes

    def stop(self, timeout: float) -> None:
        """Join the thread, after the jobs that are waiting."""
        self.jobs.put(None)
        if threading.current_thread() is not self:
            self.join(timeout)


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


def _shut_down(
    owner: int,
    leave_optimizers: Callable[[], None],
    worker: WorkerThread,
    engine: Engine,
    group: dist.ProcessGroup,
    own: bool,
    timeout: float,
) -> None:
    """End what an attachment started, in the process that did: a forked child has none of its threads."""
    if os.getpid() != owner:
        return
    leave_optimizers()
    worker.stop(timeout)
    engine.close()
    if own and dist.is_initialized():
        with suppress(ValueError):  # it ended with the world it was in, and this is another
            dist.destroy_process_group(group)


def _number_of(name: str, value: Any) -> float | None:
    """Return a figure of a script as a float; None if it is not finite, because JSON has no NaN."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        came = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise SettingError(f"log wants a number for {name}, or a tensor of one element; this is {came}") from None
    return number if math.isfinite(number) else None


def _rules_of(
    exclude: Exclusion | Iterable[Exclusion] | None, model: DistributedDataParallel, algorithm: Algorithm
) -> tuple[Exclusion, ...]:
    if exclude is not None:
        return rules_of(exclude)
    density = algorithm.density if algorithm.has_density else 1.0
    chosen = frozenset(smallest(_parameters_of(model), density))  # a later density leaves it as it is
    return (lambda name, _: name in chosen,)


def _algorithm_of(algorithm: Algorithm | str) -> Algorithm:
    return as_algorithm(make_algorithm(algorithm) if isinstance(algorithm, str) else algorithm)
