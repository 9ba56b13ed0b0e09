"""`attach`: Ok-Topk in a DDP script, in one line.

The comm hook hands each bucket to a worker thread and returns at once, so that the exchange overlaps backward; the
worker has a process group of its own. All buckets' futures are completed together, when the last one is done: only then
is it known that every rank's whole gradient was finite, and the residuals are committed, or none is.
"""
# No `from __future__ import annotations` here: DDP checks the hook's annotation itself, which must be the class.

import math
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import timedelta
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from oktopk.algorithms import Algorithm, make_algorithm
from oktopk.comm import Metered, ProcessGroupComm
from oktopk.errors import MismatchError, NonFiniteError, PeerError, SettingError, StateError, one_of, within
from oktopk.kernels import kernels_for
from oktopk.lanes import Lane, Momentum, Plan, plan_lanes
from oktopk.telemetry import Sink, Sinks, StepRecord, Summary, total_of
from oktopk.worker import Worker

VERSION = 1
SMALL = 16_384
PLAIN_UNDER_WAY = 2
"""Dense sums under way at a time while the next bucket is awaited: as many as gloo has threads."""

Exclusion = str | Callable[[str, Tensor], bool]


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
    momentum: float | Momentum | None = None,
    density_schedule: Sequence[tuple[int, float]] | None = None,
    on_nonfinite: str = "raise",
    scaler: Any = None,
    sinks: Sequence[Sink | Callable[[StepRecord], object]] = (),
    group: dist.ProcessGroup | None = None,
    timeout: float = 300.0,
) -> "Attached":
    """Make DDP exchange its gradients with `algorithm`; return the handle to it. All ranks call this alike.

    dense_steps         steps before the first sparse one; they flush whatever residual there is
    exclude             what travels dense: glob patterns of names, predicates of (name, parameter), or several of both
    clip                sparse steps: this rank's gradient is scaled to a norm of at most clip / sqrt(P) before the
                        exchange. The norm is known when backward is over, so that the two do not overlap then
    momentum            DGC's momentum correction, in place of the optimizer's momentum: a factor, or a `Momentum`
    density_schedule    [(steps, density), ...] for the first sparse steps; then the algorithm's own density
    on_nonfinite        "raise": NaN or Inf on any rank is an error in backward() on all; "skip": the step delivers NaN,
                        which GradScaler or your own check will see, and the residuals are as if it had not been
    scaler              your torch.amp.GradScaler: residuals are kept in unscaled units, whatever the scale does
    sinks               where the records go: `JsonlSink`, `TensorBoardSink`, `MemorySink`, or any callable
    group               a process group for the exchange alone (default: a new one with the ranks of the model's)
    timeout             seconds after which a rank that waits for another gives up
    """
    _check_model(ddp_model)
    settings = Settings(
        algorithm=make_algorithm(algorithm) if isinstance(algorithm, str) else algorithm,
        dense_steps=int(within("dense_steps", dense_steps, 0)),
        exclude=exclude,
        clip=None if clip is None else within("clip", clip, 0, open_low=True),
        momentum=Momentum(momentum) if isinstance(momentum, (int, float)) else momentum,
        density_schedule=_checked_schedule(density_schedule),
        on_nonfinite=one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip")),
    )
    attached = Attached(ddp_model, settings, scaler, sinks, group, timeout)
    _register(ddp_model, attached)
    attached.announce()
    return attached


@dataclass
class Settings:
    """What `attach` was given; what may change between steps is changed through `Attached`."""

    algorithm: Algorithm
    dense_steps: int
    exclude: Exclusion | Iterable[Exclusion]
    clip: float | None
    momentum: Momentum | None
    density_schedule: tuple[tuple[int, float], ...]
    on_nonfinite: str

    def algorithm_at(self, step: int) -> Algorithm | None:
        """Return the algorithm of a step, with the density that the schedule gives it; None for a dense step."""
        sparse_step = step - self.dense_steps
        if sparse_step < 0:
            return None
        for steps, density in self.density_schedule:
            if sparse_step < steps:
                return replace(self.algorithm, density=density)  # type: ignore[type-var]
            sparse_step -= steps
        return self.algorithm

    def fingerprint(self, names: Iterable[str]) -> int:
        """Return a number that differs where ranks would not do the same."""
        algorithm = self.algorithm if is_dataclass(self.algorithm) else type(self.algorithm).__qualname__
        rest = (self.dense_steps, self.clip, self.momentum, self.density_schedule, self.on_nonfinite)
        return zlib.crc32(f"{algorithm} {rest} {list(names)}".encode())


@dataclass
class _Bucket:
    """One of DDP's buckets on its way: the gradients in it, by name, and the future that DDP waits for."""

    index: int
    is_last: bool
    buffer: Tensor
    grads: dict[str, Tensor]
    done: "Future[Exception | None]"


@dataclass
class _Step:
    """A step being made."""

    plan: Plan
    buckets: list[_Bucket] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    under_way: deque[tuple[Lane, dict[str, Tensor], Callable[[], StepRecord]]] = field(default_factory=deque)
    nonfinite: NonFiniteError | None = None


class Attached:
    """The handle that `attach` returns.

    last          the record of the latest step
    summary()     all steps so far
    detach()      back to plain DDP; joins the worker
    """

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        settings: Settings,
        scaler: Any,
        sinks: Sequence[Sink | Callable[[StepRecord], object]],
        group: dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        self.last: StepRecord | None = None
        self._settings = settings
        self._scaler = scaler
        self._sinks = Sinks(sinks)
        self._summary = Summary()
        self._parameters = {n: p for n, p in ddp_model.module.named_parameters() if p.requires_grad}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._may_be_unused = bool(ddp_model.find_unused_parameters or ddp_model.static_graph)
        self._model = weakref.ref(ddp_model)
        self._lanes = plan_lanes(list(self._parameters.items()), int(ddp_model.bucket_bytes_cap))
        self._lane_of = {name: lane for lane in self._lanes for name in lane.names}
        self._arrived: dict[str, Tensor] = {}
        self._waiting: list[Lane] = []
        self._now: _Step | None = None
        self._next_step = 0
        self._agreed = False
        self._failure: BaseException | None = None
        self._lay_out()
        self._timeout = timeout
        own = group is None
        self.group = group or _new_group(ddp_model.process_group, timeout)
        self._comm = Metered(ProcessGroupComm(self.group))
        self._worker = Worker("oktopk exchange")
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._sinks, self.group, own, timeout)
        try:
            self._agree()
        except MismatchError:
            self._finalizer()
            raise

    @property
    def active(self) -> bool:
        """Whether gradients go through here: registered, the worker alive, nothing failed. A script can assert it."""
        hook = getattr(self._model(), _HOOK, None)
        return hook is not None and hook.target is self and self._worker.alive and self._failure is None

    @property
    def rank(self) -> int:
        """This rank in the group of the exchange."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._comm.size

    @property
    def step(self) -> int:
        """The step that comes next, from 0."""
        return self._next_step

    @property
    def residual(self) -> dict[str, Tensor]:
        """A copy of what this rank has not delivered yet, by parameter, flat."""
        return {name: tensor for lane in self._lanes for name, tensor in lane.by_name()["residual"].items()}

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the sparse steps. May be set between steps, on all ranks alike; residuals stay."""
        return self._settings.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm | str) -> None:
        chosen = make_algorithm(algorithm) if isinstance(algorithm, str) else algorithm
        self._settings = replace(self._settings, algorithm=chosen)
        self._agreed = False

    @property
    def density(self) -> float | None:
        """The density of the sparse steps, past any schedule. May be set between steps, on all ranks alike."""
        return getattr(self._settings.algorithm, "density", None)

    @density.setter
    def density(self, density: float) -> None:
        self.algorithm = replace(self._settings.algorithm, density=density)  # type: ignore[type-var]

    def exclude(self, exclude: Exclusion | Iterable[Exclusion]) -> None:
        """Make other parameters travel dense from the next step on; what is held back for them goes with it."""
        before = self._settings
        self._settings = replace(self._settings, exclude=exclude)
        try:
            self._lay_out()
        except SettingError:
            self._settings = before
            raise
        self._agreed = False

    def summary(self) -> Summary:
        """Return what all steps so far did; `print` shows it as a table."""
        return self._summary

    def detach(self) -> None:
        """Go back to plain DDP: end what is under way, join the worker, close the sinks; what is held back stays."""
        hook = getattr(self._model(), _HOOK, None)
        if hook is not None and hook.target is self:
            hook.target = None
        self._finalizer()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on as if it had never stopped; every rank saves its own."""
        kept = [lane.by_name() for lane in self._lanes]
        return {
            "version": VERSION,
            "algorithm": type(self.algorithm).__name__,
            "rank": self._comm.rank,
            "size": self._comm.size,
            "step": self._next_step,
            "residual": {name: t for lane in kept for name, t in lane["residual"].items()},
            "velocity": {name: t for lane in kept for name, t in lane.get("velocity", {}).items()},
            "lanes": [lane.state_dict() for lane in self._lanes],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict`; one that does not fit is refused and changes nothing."""
        self._check_fits(saved)
        mine = {"algorithm": type(self.algorithm).__name__, "size": self._comm.size, "rank": self._comm.rank}
        for what, ours in mine.items():
            if saved[what] != ours:
                raise StateError(
                    f"the state dict is of {what} {saved[what]!r}, here it is {ours!r}"
                    + ("; save_distributed and load_distributed change the world size" if what == "size" else "")
                )
        self.load_pending(saved["residual"], saved["velocity"], saved["step"])
        if [lane["names"] for lane in saved["lanes"]] == [lane.names for lane in self._lanes]:
            self.load_lanes({str(i): lane["state"] for i, lane in enumerate(saved["lanes"])})

    def load_pending(self, residual: Mapping[str, Tensor], velocity: Mapping[str, Tensor], step: int) -> None:
        """Hold these residuals (and velocities), by parameter, and go on at `step`."""
        for lane in self._lanes:
            lane.load_by_name_({"residual": residual, "velocity": velocity})
            lane.state = None
        self._next_step = int(step)
        self._agreed = False

    def load_lanes(self, states: Mapping[str, Any]) -> None:
        """Go on with the algorithm's states of these lanes, by number."""
        for number, state in states.items():
            if state is not None:
                self._lanes[int(number)].load_state_(state, self.algorithm, self._comm)

    def announce(self) -> None:
        """Say on rank 0's stderr what is active."""
        if self._comm.rank:
            return
        dense = [self._parameters[name].numel() for lane in self._lanes for name in lane.dense_names]
        total = [parameter.numel() for parameter in self._parameters.values()]
        sparse = sum(total) - sum(dense)
        steps = self._settings.dense_steps
        kernel = kernels_for(self._lanes[0].residual.held.device).NAME if self._lanes else "none"
        sys.stderr.write(
            f"oktopk: {self.algorithm} on {self._comm.size} ranks; "
            f"{f'{steps} dense steps, then sparse' if steps else 'sparse from the first step'}; "
            f"{len(total) - len(dense)} parameters ({sparse:,} elements) sparse, {len(dense)} ({sum(dense):,}) dense; "
            f"kernel: {kernel}\n"
        )
        if not sparse:
            sys.stderr.write("oktopk: WARNING: every parameter travels dense, nothing will be compressed\n")

    def _on_bucket(self, bucket: GradBucket) -> "Future[Tensor]":
        """Take a bucket from DDP, on the autograd thread, and return at once."""
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        done: Future[Exception | None] = Future(devices=devices)
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        sizes = [self._parameters[name].numel() for name in names]
        grads = dict(zip(names, torch.split(buffer, sizes), strict=True))
        taken = _Bucket(bucket.index(), bucket.is_last(), buffer, grads, done)
        self._worker.submit(partial(self._take, taken))
        return done.then(partial(_outcome, buffer))

    def _take(self, bucket: _Bucket) -> None:
        """Sort a bucket's gradients into their lanes, and reduce those that are complete. Runs on the worker."""
        try:
            if self._failure is not None:
                raise PeerError(f"oktopk stopped at an earlier error: {self._failure}")
            if self._now is None or bucket.index == 0:
                self._begin()
            assert self._now is not None
            self._now.buckets.append(bucket)
            self._arrived.update(bucket.grads)
            self._reduce_complete_lanes(self._now, bucket)
            if bucket.is_last:
                self._end(self._now)
        except BaseException as error:  # whatever it is, backward() must hear of it, and the other ranks too
            self._give_up(error, bucket)

    def _begin(self) -> None:
        if not self._agreed:
            self._agree()
        scale = float(self._scaler.get_scale()) if self._scaler is not None and self._scaler.is_enabled() else 1.0
        plan = Plan(
            step=self._next_step,
            algorithm=self._settings.algorithm_at(self._next_step),
            loss_scale=scale,
            momentum=self._settings.momentum,
            may_be_unused=self._may_be_unused,
        )
        self._now, self._arrived, self._waiting = _Step(plan), {}, list(self._lanes)

    def _reduce_complete_lanes(self, step: _Step, bucket: _Bucket) -> None:
        clipping = self._settings.clip is not None and step.plan.algorithm is not None
        if clipping and not bucket.is_last:
            return  # the norm of the gradient is not known before all of it is here
        if clipping:
            step.plan = replace(step.plan, clip=self._clip_factor(step.plan.loss_scale))
        complete = [lane for lane in self._waiting if all(name in self._arrived for name in lane.names)]
        for lane in complete:
            self._waiting.remove(lane)
            grads = {name: self._arrived[name] for name in lane.names}
            step.under_way.append((lane, grads, lane.start_(grads, step.plan, self._comm)))
            self._finish(step, keep=PLAIN_UNDER_WAY if step.plan.is_plain else 0)
        if bucket.is_last:
            self._finish(step, keep=0)

    def _finish(self, step: _Step, keep: int) -> None:
        """End the reductions that were started first, but for the last `keep`."""
        while len(step.under_way) > keep:
            lane, grads, end = step.under_way.popleft()
            try:
                step.records.append(end())
            except NonFiniteError as error:
                step.nonfinite = step.nonfinite or error
                step.records.append(lane.refused(step.plan, self._comm))
                for grad in grads.values():
                    grad.fill_(math.nan)

    def _clip_factor(self, loss_scale: float) -> float:
        """Return what scales this rank's gradient to a norm of at most clip / sqrt(P)."""
        assert self._settings.clip is not None
        squares = math.fsum(float(grad.float().dot(grad.float())) for grad in self._arrived.values())
        norm = math.sqrt(squares) / loss_scale
        limit = self._settings.clip / math.sqrt(self._comm.size)
        return limit / norm if math.isfinite(norm) and norm > limit else 1.0

    def _end(self, step: _Step) -> None:
        """Commit the step, or leave everything as it was; then let backward() go on, and tell the sinks."""
        assert not self._waiting, f"backward ended without a gradient for {self._waiting[0].names}"
        if step.nonfinite is None:
            for lane in self._lanes:
                lane.commit_(step.plan)
        phase = "dense" if step.plan.algorithm is None else "sparse"
        record = total_of(step.records, step=step.plan.step, phase=phase, skipped=step.nonfinite is not None)
        self.last, self._now, self._next_step = record, None, self._next_step + 1
        self._summary.add_(record)
        for bucket in step.buckets:
            bucket.done.set_result(step.nonfinite if self._settings.on_nonfinite == "raise" else None)
        self._sinks.write(record)

    def _give_up(self, error: BaseException, bucket: _Bucket) -> None:
        """Tell backward() here, and the other ranks, why there will be no more exchanges."""
        if not isinstance(error, (PeerError, MismatchError)):
            self._comm.fail(error)
        self._failure = self._failure or error
        waiting = [] if self._now is None else self._now.buckets
        for each in {id(b): b for b in (*waiting, bucket)}.values():
            if not each.done.done():
                each.done.set_result(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    def _agree(self) -> None:
        """Make sure that all ranks are about to do the same."""
        shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in self._parameters.items()]
        dense = [name for lane in self._lanes for name in lane.dense_names]
        mine = [zlib.crc32(repr(shapes).encode()), self._settings.fingerprint(dense), self._next_step]
        device = self._lanes[0].residual.held.device if self._lanes else torch.device("cpu")
        every = self._comm.all_gather(torch.tensor(mine, device=device)).tolist()
        self._comm.take()
        for what, column in zip(("parameters", "settings", "step"), zip(*every, strict=True), strict=True):
            if len(set(column)) > 1:
                differing = [rank for rank, value in enumerate(column) if value != column[0]]
                raise MismatchError(f"the ranks disagree on the {what}: {differing} differ from rank 0")
        self._agreed = True

    def _lay_out(self) -> None:
        """Decide for every parameter whether it travels dense."""
        rules = self._settings.exclude
        rules = [rules] if isinstance(rules, str) or callable(rules) else list(rules)
        for rule in rules:
            if isinstance(rule, str) and not any(fnmatchcase(name, rule) for name in self._parameters):
                close = get_close_matches(rule, self._parameters, n=1, cutoff=0.3)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise SettingError(f"exclude: no parameter matches {rule!r}.{hint}")
        for lane in self._lanes:
            lane.lay_out_(lambda name: any(_matches(rule, name, self._parameters[name]) for rule in rules))

    def _check_fits(self, saved: Mapping[str, Any]) -> None:
        version = saved.get("version") if isinstance(saved, Mapping) else None
        if version != VERSION:
            raise StateError(f"wanted an attachment's state dict of version {VERSION}, not of version {version!r}")
        theirs = {name: tensor.numel() for name, tensor in saved["residual"].items()}
        ours = {name: parameter.numel() for name, parameter in self._parameters.items()}
        if theirs != ours:
            missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
            resized = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
            raise StateError(
                f"the state dict is of another model: missing {missing}, unknown {extra}, of another size {resized}"
            )


_HOOK = "_oktopk_hook"


class _Hook:
    """What DDP has registered, for good: it hands buckets to whoever is attached, or reduces them as DDP would."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.target: Attached | None = None


def _hook(state: _Hook, bucket: GradBucket) -> Future[Tensor]:
    if state.target is None:
        return default_hooks.allreduce_hook(state.process_group, bucket)
    return state.target._on_bucket(bucket)


def _outcome(buffer: Tensor, done: "Future[Exception | None]") -> Tensor:
    """Return the bucket's buffer to DDP, or raise in its backward()."""
    error = done.value()
    if error is not None:
        raise error
    return buffer


def _check_model(model: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        kind = type(model).__name__
        raise SettingError(f"attach wants a DistributedDataParallel model, not {kind}: wrap it in DDP first")
    hook = getattr(model, _HOOK, None)
    if hook is not None and hook.target is not None:
        raise SettingError("oktopk is attached to this model already: detach() first")
    if hook is None and getattr(model, "_comm_hooks", None):
        raise SettingError("this model has another communication hook, and DDP takes only one: attach before it")


def _register(model: DistributedDataParallel, attached: Attached) -> None:
    hook = getattr(model, _HOOK, None)
    if hook is None:
        hook = _Hook(model.process_group)
        model.register_comm_hook(hook, _hook)
        setattr(model, _HOOK, hook)
    hook.target = attached


def _new_group(like: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup:
    """Return a group of the same ranks for the exchange alone, so that it cannot mix with DDP's own collectives."""
    ranks = dist.get_process_group_ranks(like)
    some = len(ranks) < dist.get_world_size()  # then the other ranks do not come here
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=some)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _shut_down(worker: Worker, sinks: Sinks, group: dist.ProcessGroup, own: bool, timeout: float) -> None:
    worker.stop(timeout)
    sinks.close()
    if own and dist.is_initialized():
        dist.destroy_process_group(group)


def _matches(rule: Exclusion, name: str, parameter: Tensor) -> bool:
    return fnmatchcase(name, rule) if isinstance(rule, str) else bool(rule(name, parameter))


def _checked_schedule(schedule: Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    return tuple(
        (int(within("steps of density_schedule", steps, 1)), within("density", density, 0, 1, open_low=True))
        for steps, density in schedule or ()
    )
