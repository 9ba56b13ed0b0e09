"""`attach`: Ok-Topk in a DDP script, in one line.

The comm hook hands each bucket to a worker thread and returns at once, so that the exchange overlaps backward; the
worker has a process group of its own. All buckets' futures are completed together, when the last one is done: only then
is it known that every rank's whole gradient was finite, and the residuals are committed, or none is.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.algorithms import Algorithm, as_algorithm, make_algorithm
from oktopk.comm import MeteredComm, ProcessGroupComm
from oktopk.cuda.events import record_event, wait_event
from oktopk.ddp.config import DDPConfig, Exclusion, checked_rules
from oktopk.ddp.engine import Bucket, Engine
from oktopk.ddp.hook import check_alone_in_backward, check_model, hook_of, register
from oktopk.ddp.loss_scale import forget_scalers, scaler_of_this_backward, watch_scalers
from oktopk.ddp.mixed_precision import gradient_dtype
from oktopk.ddp.thread import WorkerThread
from oktopk.errors import MismatchError, SettingError, StateError, one_of, within
from oktopk.kernels import kernels_for
from oktopk.steps import make_groups
from oktopk.telemetry import SINK_PATIENCE_S, Sink, Sinks, StepRecord, Summary

VERSION = 3
SMALL = 16_384


def small_or_vector(name: str, parameter: Tensor) -> bool:  # noqa: ARG001
    """Whether a parameter is too small to be worth sparsifying (fewer than 16,384 elements) or 1-D (biases, norms)."""
    return parameter.dim() <= 1 or parameter.numel() < SMALL


def attach(
    ddp_model: DistributedDataParallel,
    algorithm: Algorithm | str,
    *,
    dense_steps: int = 128,
    exclude: Exclusion | Iterable[Exclusion] = small_or_vector,
    clip: float | None = None,
    density_schedule: Sequence[tuple[int, float]] | None = None,
    on_nonfinite: str = "raise",
    scaler: Any = None,
    sinks: Sequence[Sink | Callable[[StepRecord], object]] = (),
    group: dist.ProcessGroup | None = None,
    timeout: float = 300.0,
) -> Attached:
    """Make DDP exchange its gradients with `algorithm`; return the handle to it. All ranks call this alike.

    dense_steps         steps before the first sparse one; they flush whatever residual there is
    exclude             what travels dense: glob patterns of names, predicates of (name, parameter), or several of both
    clip                sparse steps: this rank's gradient is scaled to a norm of at most clip / sqrt(P) before the
                        exchange. The norm is known when backward is over, so that the two do not overlap then
    density_schedule    [(steps, density), ...] for the first sparse steps; then the algorithm's own density
    on_nonfinite        "raise": NaN or Inf on any rank is an error in backward() on all; "skip": the step delivers
                        zeros, or NaN under a GradScaler, which then skips its step. The residuals stay as they were
    scaler              your torch.amp.GradScaler: residuals are kept in unscaled units, whatever the scale does. If
                        none is given, `GradScaler.scale` is wrapped to find the one that scaled each loss. Anything
                        with is_enabled() and get_scale() will do
    sinks               where the records go: `JsonlSink`, `TensorBoardSink`, `MemorySink`, or any callable
    group               a process group for the exchange alone (default: a new one with the ranks of the model's)
    timeout             seconds after which a rank that waits for another gives up
    """
    check_model(ddp_model)
    config = DDPConfig(
        algorithm=_algorithm_of(algorithm),
        dense_steps=int(within("dense_steps", dense_steps, 0)),
        exclude=exclude if isinstance(exclude, str) or callable(exclude) else tuple(exclude),
        clip=None if clip is None else within("clip", clip, 0, open_low=True),
        density_schedule=_checked_schedule(density_schedule),
        on_nonfinite=one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip")),
        scaled=scaler is not None and bool(scaler.is_enabled()),
    )
    for _, density in config.density_schedule:
        config.algorithm.with_density(density)
    if not config.scaled:
        watch_scalers()
    attached = Attached(ddp_model, config, scaler, sinks, group, timeout)
    register(ddp_model, attached)
    attached.announce()
    return attached


class Attached:
    """The handle that `attach` returns.

    last          the record of the latest step; None before the first
    summary()     all steps so far
    detach()      back to plain DDP; joins the worker
    """

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        config: DDPConfig,
        scaler: Any,
        sinks: Sequence[Sink | Callable[[StepRecord], object]],
        group: dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        parameters = _parameters_of(ddp_model)
        checked_rules(config.exclude, parameters)
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
        self._worker = WorkerThread("oktopk exchange")
        self._engine = Engine(
            parameters,
            make_groups(list(parameters.items()), int(ddp_model.bucket_bytes_cap), gradient_dtype(ddp_model)),
            MeteredComm(ProcessGroupComm(self.group)),
            config,
            Sinks(sinks, min(SINK_PATIENCE_S, timeout / 2)),  # so that the other ranks do not give up before
            scaler,
            may_be_unused=bool(ddp_model.find_unused_parameters or ddp_model.static_graph),
        )
        self._finalizer = weakref.finalize(
            self, _shut_down, os.getpid(), self._worker, self._engine, self.group, group is None, timeout
        )
        try:
            self._engine.agree()
        except MismatchError:
            self._finalizer()
            raise

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest step."""
        return self._engine.last

    @property
    def active(self) -> bool:
        """Whether gradients go through here: registered, the worker alive, nothing failed. A script can assert it."""
        hook = hook_of(self._model())
        return hook is not None and hook.target is self and self._worker.alive and self._engine.failure is None

    @property
    def rank(self) -> int:
        """This rank in the group of the exchange."""
        return self._engine.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._engine.comm.size

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
        """Return the norm of this rank's residual on its device; the host does not wait for it."""
        norms = [torch.linalg.vector_norm(group.residual.held).double() for group in self._engine.groups]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float64)

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
        chosen = exclude if isinstance(exclude, str) or callable(exclude) else tuple(exclude)
        self._engine.change(replace(self._engine.config, exclude=chosen))

    def summary(self) -> Summary:
        """Return the totals of all steps so far; `print` shows them as a table."""
        return self._engine.summary

    def flush(self) -> None:
        """Write the records of all steps so far to the sinks; on the device path this waits for the steps."""
        self._engine.flush_records(delay=0)

    def detach(self) -> None:
        """Go back to plain DDP: finish the current step, join the worker, close the sinks. Residuals stay readable."""
        hook = hook_of(self._model())
        if hook is not None and hook.target is self:
            hook.target = None
        self._finalizer()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which this rank resumes bit for bit; every rank saves its own."""
        self._engine.save_()
        return {
            "version": VERSION,
            "algorithm": type(self.algorithm).__name__,
            "rank": self.rank,
            "size": self.size,
            "step": self._engine.next_step,
            "residual": self.residual,
            "groups": [group.state_dict() for group in self._engine.groups],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict`; one that does not fit is refused and changes nothing.

        Mode, ranking and all other settings are those of this attachment, not the saved ones.
        """
        self._check_fits(saved)
        mine = {
            "algorithm": type(self.algorithm).__name__,
            "size": self._engine.comm.size,
            "rank": self._engine.comm.rank,
        }
        for what, ours in mine.items():
            if saved[what] != ours:
                raise StateError(
                    f"the state dict is of {what} {saved[what]!r}, here it is {ours!r}"
                    + ("; save_distributed and load_distributed change the world size" if what == "size" else "")
                )
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
            self._say_it_starts_anew("for other groups of parameters than here")
            return
        fits = [group.load_state_dict_(each, algorithm, comm) for group, each in zip(groups, saved, strict=True)]
        if not all(fits):
            self._say_it_starts_anew(f"with another algorithm, mode or ranking than {self.algorithm}")

    def _say_it_starts_anew(self, why: str) -> None:
        if not self.rank:
            sys.stderr.write(f"oktopk: the state was saved {why}: residuals are kept, the algorithm starts anew\n")

    def announce(self) -> None:
        """Print the active settings to stderr on rank 0."""
        if self._engine.comm.rank:
            return
        dense = [self._engine.parameters[name].numel() for group in self._engine.groups for name in group.dense_names]
        total = [parameter.numel() for parameter in self._engine.parameters.values()]
        sparse = sum(total) - sum(dense)
        steps = self._engine.config.dense_steps
        kernel = "gpu (triton), steps stay there" if self._engine.on_device else self._kernel()
        sys.stderr.write(
            f"oktopk: {self.algorithm} on {self._engine.comm.size} ranks; "
            f"{f'{steps} dense steps, then sparse' if steps else 'sparse from the first step'}; "
            f"{len(total) - len(dense)} parameters ({sparse:,} elements) sparse, {len(dense)} ({sum(dense):,}) dense; "
            f"kernel: {kernel}\n"
        )
        if not sparse:
            sys.stderr.write("oktopk: WARNING: every parameter travels dense, nothing will be compressed\n")

    def _kernel(self) -> str:
        return kernels_for(self._engine.groups[0].residual.held).NAME if self._engine.groups else "none"

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket from DDP, on the autograd thread, and return at once."""
        model = self._model()
        if model is not None and not vars(model).get("_divide_by_initial_world_size", True):
            raise SettingError("Join(divide_by_initial_world_size=False) is not supported: the mean is over all ranks")
        if bucket.index() == 0:  # the buckets of a step are done together
            self._done = Future(devices=self._devices)
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
            self._worker.submit(partial(self._engine.take_and_flush, taken))
        else:
            self._engine.take(taken)  # gloo sums in threads of its own: a hop through ours would only delay it
            if taken.is_last:
                self._worker.submit(self._engine.flush_records)
        return self._done.then(partial(_outcome, taken))

    def _check_fits(self, saved: Mapping[str, Any]) -> None:
        version = saved.get("version") if isinstance(saved, Mapping) else None
        if version != VERSION:
            raise StateError(f"wanted an attachment's state dict of version {VERSION}, not of version {version!r}")
        self.check_parameters({name: tensor.numel() for name, tensor in saved["residual"].items()})

    def check_parameters(self, theirs: Mapping[str, int]) -> None:
        """Refuse a state whose parameters, given by name and length, are not this model's."""
        ours = {name: parameter.numel() for name, parameter in self._engine.parameters.items()}
        if theirs != ours:
            missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
            resized = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
            raise StateError(
                f"the state dict is of another model: missing {missing}, unknown {extra}, of another size {resized}"
            )


def _parameters_of(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, by name: those in its buckets.

    They required gradients when DDP was made. One that was frozen or unfrozen since has changed nothing there.
    """
    buckets = model.reducer._get_zeros_like_grad_buckets()
    reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return {name: parameter for name, parameter in model.module.named_parameters() if id(parameter) in reduced}


def _outcome(bucket: Bucket, done: Future[Exception | None]) -> Tensor:
    """Return the bucket's buffer to DDP, or raise in its backward()."""
    error = done.value()
    if error is not None:
        forget_scalers()
        raise error
    wait_event(bucket.buffer.device, bucket.over)
    return bucket.buffer


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


def _shut_down(
    owner: int, worker: WorkerThread, engine: Engine, group: dist.ProcessGroup, own: bool, timeout: float
) -> None:
    """End what an attachment started, in the process that did: a forked child has none of its threads."""
    if os.getpid() != owner:
        return
    worker.stop(timeout)
    engine.close()
    if own and dist.is_initialized():
        with suppress(ValueError):  # it ended with the world it was in, and this is another
            dist.destroy_process_group(group)


def _algorithm_of(algorithm: Algorithm | str) -> Algorithm:
    return as_algorithm(make_algorithm(algorithm) if isinstance(algorithm, str) else algorithm)


def _checked_schedule(schedule: Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    return tuple(
        (int(within("steps of density_schedule", steps, 1)), within("density", density, 0, 1, open_low=True))
        for steps, density in schedule or ()
    )
