"""`LocalSteps`: workers train alone for some steps, then exchange how far they moved, with error feedback.

    movement    start - now, the outer gradient of a worker: how far its weights moved since the last agreed point
    agreed      the point that all workers share, bit for bit; the outer optimizer moves it by the delivered mean

A worker's weights are the agreed point plus its own steps since then. The part of its movement that was not delivered
is in its residual, not in its weights. So every element that a worker moved was delivered, or is held back.

A worker may be several ranks: FSDP's exchange their shards, DDP's a part of the weights each, which they then share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from oktopk.algorithms import Algorithm, Dense
from oktopk.algorithms.base import describe
from oktopk.comm import Comm, MeteredComm, ProcessGroupComm
from oktopk.comm.agree import START, digest_of
from oktopk.cuda.events import record_event, wait_event
from oktopk.ddp.engine import Bucket, DDPConfig, Engine
from oktopk.ddp.exclude import Exclusion, rules_for
from oktopk.ddp.handle import Handle, algorithm_of
from oktopk.errors import NonFiniteError, SettingError, one_of, within
from oktopk.state import to_plain
from oktopk.steps import ParamGroup, make_groups
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import SINK_PATIENCE_S, Sink, Sinks

OUTER: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "nesterov": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),  # DiLoCo's
    "sgd": partial(SGD, lr=1.0),  # the mean of the workers' weights, as far as it is delivered
}


class LocalSteps(Handle):
    """Inner steps without communication, and an exchange after every H of them. All workers construct it alike.

    model           a module, whose weights are the same on all workers; or one that the ranks of a worker share, by DDP
                    or `fully_shard`
    optimizer       the inner optimizer of its parameters: any of torch's
    algorithm       an algorithm, the name of one, or any object with its `init` and `reduce`; `Dense()` makes it DiLoCo
    every           H: steps from one exchange of a parameter to the next
    fragments       parts of the model that are exchanged in turn, evenly over the H steps
    delay           steps that go on while an exchange is under way; 0: training waits for it
    outer           "sgd": move by the delivered mean; "nesterov": DiLoCo's outer optimizer; or a function that returns
                    a torch optimizer of the tensors that it is given
    feedback_decay  factor on the residual after each exchange; below 1 old movements fade, as in SparseLoCo
    exclude, sinks, timeout   see `attach`
    on_nonfinite    "raise": a NaN or Inf on any rank is an error in step() on all, and nothing changes; "skip": all
                    workers go back to the agreed point
    group           a process group for the exchange alone, or a `Comm` (default: a new group of all ranks); if a worker
                    is several ranks, the ranks of this one's place in all workers, such as mesh["replicate"]

    Buffers, such as BatchNorm's, stay each worker's own.
    """

    MORE = ("since", "weights", "agreed", "outer", "flight")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm | str = "oktopk",
        *,
        every: int,
        fragments: int = 1,
        delay: int = 0,
        outer: str | Callable[[Iterable[Tensor]], Optimizer] = "sgd",
        feedback_decay: float = 1.0,
        exclude: Exclusion | Iterable[Exclusion] | None = None,
        on_nonfinite: str = "raise",
        sinks: Sequence[Sink | Callable[[StepRecord], object]] = (),
        group: dist.ProcessGroup | Comm | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.optimizer, self._inner = optimizer, inner_group(model)
        if self._inner is not None and group is None:
            raise SettingError(
                "the ranks of this model communicate in each step already. Give LocalSteps the module without DDP, or "
                "group=, a process group with one rank of each worker"
            )
        module = model.module if isinstance(model, DistributedDataParallel) else model
        self._parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._parts = self._share_out(model, int(within("fragments", fragments, 1, within("every", every, 1))))
        names = [name for part in self._parts[self._place] for name in part]
        self._agreed = {name: wide(self._weight(name)).clone(memory_format=torch.contiguous_format) for name in names}
        made = OUTER[one_of("outer optimizer", outer, OUTER)] if isinstance(outer, str) else outer
        self._outer = made(list(self._agreed.values()))
        used = algorithm_of(algorithm)
        config = LocalConfig(
            algorithm=used, dense_steps=0, exclude=rules_for(exclude, self._agreed, used), clip=None,
            density_schedule=(), on_nonfinite="skip",  # the engine's: `_end` raises, before anything is applied
            every=int(every), fragments=fragments, delay=int(within("delay", delay, 0, every // fragments)),
            outer=f"{type(self._outer).__name__} {self._outer.defaults}",
            feedback_decay=within("feedback_decay", feedback_decay, 0, 1),
        )  # fmt: skip
        self.on_nonfinite = one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip"))
        self._since = 0  # steps since the last exchange began
        self._flight: _Flight | None = None
        self._start_exchange(config, sinks, group, timeout)
        self.compile_kernels()
        self.announce()
        self._engine.log_settings(type(module).__name__)

    def _when(self) -> str:
        config = self.config
        return f"an exchange every {config.every} steps" + f" in {config.fragments} fragments" * (config.fragments > 1)

    def _start_exchange(
        self,
        config: LocalConfig,
        sinks: Sequence[Sink | Callable[[StepRecord], object]],
        group: dist.ProcessGroup | Comm | None,
        timeout: float,
    ) -> None:
        is_own = group is None
        if group is None:
            group = dist.new_group(timeout=timedelta(seconds=timeout))
        self.group = group if isinstance(group, dist.ProcessGroup) else None
        own = [self.group] if is_own and self.group is not None else []
        comm = ProcessGroupComm(group) if isinstance(group, dist.ProcessGroup) else group
        fragments = [
            make_groups([(name, self._agreed[name]) for name in part], math.inf, first_bytes=math.inf)
            for part in self._parts[self._place]
        ]
        writes = Sinks(sinks, min(SINK_PATIENCE_S, timeout / 2))
        self._start(_LocalEngine(self._agreed, fragments, MeteredComm(comm), config, writes), own, timeout)

    @property
    def config(self) -> LocalConfig:
        """The settings in use."""
        assert isinstance(self._engine.config, LocalConfig)
        return self._engine.config

    @property
    def since(self) -> int:
        """Inner steps since the last exchange began."""
        return self._since

    @property
    def agreed(self) -> dict[str, Tensor]:
        """A copy of the point that all workers share; of DDP's ranks each has a part of it."""
        return {name: tensor.clone() for name, tensor in self._agreed.items()}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step of the inner optimizer, and an exchange if one is due; return the closure's loss."""
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.advance()
        return loss

    @torch.no_grad()
    def advance(self) -> None:
        """Count an inner step that was made elsewhere, such as by a GradScaler, and exchange if that is due."""
        self._since += 1
        config = self.config
        if self._flight is not None and self._since >= config.delay:
            self._end()
        if self._flight is not None:
            return
        place = self._engine.next_step % config.fragments
        first, last = (i * config.every // config.fragments for i in (place, place + 1))
        if self._since >= last - first:
            self._begin(place)
            if not config.delay:
                self._end()

    def detach(self) -> None:
        """End: apply an exchange that is under way, join the worker, close the sinks."""
        if self._flight is not None and self._engine.failure is None:
            self._end()
        self._engine.is_detached = True
        self._finalizer()

    def _begin(self, place: int) -> None:
        """Hand the movement of a fragment to the worker thread."""
        groups = self._local_engine.fragments[place]
        moved = [self._moved(group) for group in groups]
        if self._inner is not None and not self._is_finite_on_all(moved):
            moved[0][0] = math.nan  # the ranks of a worker are refused together
        flight = self._flight = _Flight(place, [name for group in groups for name in group.names], moved)
        if self.config.delay:
            flight.sent_at = {name: self._weight(name).clone() for name in flight.names}
        for i, (group, buffer) in enumerate(zip(groups, moved, strict=True)):
            parts = torch.split(buffer, [self._agreed[name].numel() for name in group.names])
            grads, ready = dict(zip(group.names, parts, strict=True)), record_event(buffer.device)
            bucket = Bucket(i, i == len(groups) - 1, buffer, grads, flight.done, ready=ready)
            self._worker.jobs.put(partial(self._engine.take_and_flush, bucket))
            flight.last = bucket
        self._since = 0

    @torch.no_grad()
    def _end(self) -> None:
        """Wait for the exchange that is under way, and apply it: all of it, or nothing."""
        flight, self._flight = self._wait(), None
        assert flight is not None
        if flight.refused and self.on_nonfinite == "raise":
            raise NonFiniteError(
                f"{flight.refused}. Weights, agreed point and residuals are as they were, on all ranks. Go on from a "
                'checkpoint, or use on_nonfinite="skip"'
            )
        if flight.refused:
            for name in flight.names:
                self._weight(name).copy_(self._agreed[name])
        else:
            self._move(flight)
        self._share(flight)

    def _wait(self) -> _Flight | None:
        """Return the exchange that is under way, if there is one, when it is done."""
        flight = self._flight
        if flight is None or flight.last is None:
            return flight
        error = flight.done.wait()
        if error is not None:
            raise error
        wait_event(flight.delivered[0].device, flight.last.over)
        record, flight.last = self._engine.last, None
        assert record is not None
        if record.skipped:
            flight.refused = f"exchange {record.step} of the movements: {record.reason}"
        return flight

    def _move(self, flight: _Flight) -> None:
        """Move the agreed point by the delivered mean, and the weights with it."""
        for group, means in zip(self._local_engine.fragments[flight.place], flight.delivered, strict=True):
            parts = torch.split(means, [self._agreed[name].numel() for name in group.names])
            for name, mean in zip(group.names, parts, strict=True):
                self._agreed[name].grad = mean.view_as(self._agreed[name])
        self._outer.step()
        for name in flight.names:
            self._agreed[name].grad = None
            weight, start = self._weight(name), self._agreed[name].to(self._weight(name).dtype)
            weight.copy_(start + (weight - flight.sent_at[name]) if name in flight.sent_at else start)
        for group in self._local_engine.fragments[flight.place]:
            if self.config.feedback_decay != 1:
                group.residual.held.mul_(self.config.feedback_decay)

    def _moved(self, group: ParamGroup) -> Tensor:
        """Return how far the weights of a group moved since they were the agreed point, as one vector."""
        moved = torch.empty(group.numel, dtype=group.dtype, device=group.device)
        parts = torch.split(moved, [self._agreed[name].numel() for name in group.names])
        for name, part in zip(group.names, parts, strict=True):
            start, now = self._agreed[name], self._weight(name)
            torch.sub(wide(start.to(now.dtype)), wide(now), out=part.view_as(start))
        return moved

    def _weight(self, name: str) -> Tensor:
        return _local(self._parameters[name])

    # The ranks inside a worker

    @property
    def _place(self) -> int:
        return dist.get_rank(self._inner) if len(self._parts) > 1 else 0

    @property
    def _local_engine(self) -> _LocalEngine:
        assert isinstance(self._engine, _LocalEngine)
        return self._engine

    def _share_out(self, model: nn.Module, fragments: int) -> list[list[list[str]]]:
        """Return the names of each fragment that each rank of a DDP worker exchanges; others exchange all they have."""
        sizes = {name: self._weight(name).numel() for name in self._parameters}
        ranks = dist.get_world_size(self._inner) if isinstance(model, DistributedDataParallel) else 1
        shares = split_evenly(sizes, ranks)
        return [split_evenly({name: sizes[name] for name in share}, fragments) for share in shares]

    def _is_finite_on_all(self, moved: Sequence[Tensor]) -> bool:
        """Whether all ranks of this worker have a finite movement."""
        is_finite = torch.stack([each.isfinite().all() for each in moved]).all().int()
        dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=self._inner)
        return bool(is_finite)

    def _share(self, flight: _Flight) -> None:
        """Hand the weights that a rank of a DDP worker moved to its other ranks."""
        if len(self._parts) > 1:
            for rank, part in enumerate(self._parts):
                for name in part[flight.place]:
                    dist.broadcast(self._weight(name), group=self._inner, group_src=rank)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which this rank resumes bit for bit, its weights included; every rank saves its own."""
        flight, names, outer = self._wait(), [*self._agreed], dict[str, dict[str, Any]]()
        for i, state in self._outer.state_dict()["state"].items():
            for kind, value in state.items():
                outer.setdefault(kind, {})[names[i]] = to_plain(value)
        return {
            **super().state_dict(),
            "since": self._since,
            "weights": {name: self._weight(name).clone() for name in self._parameters},
            "agreed": self.agreed,
            "outer": outer,
            "flight": {} if flight is None else flight.state_dict(),
        }

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the residuals of a rank, and how far it had moved since its last exchange."""
        flight, owed = saved["flight"], dict(saved["residual"])
        for name, agreed in saved["agreed"].items():
            start = flight["sent_at"].get(name, agreed) if "sent_at" in flight else agreed
            owed[name] = owed[name] + movement(start, saved["weights"][name])
        return owed

    @torch.no_grad()
    def load_rest(self, saved: Mapping[str, Any], is_own: bool) -> None:
        """Go on with the weights, the agreed point and the outer state of a state dict of this rank.

        With those of another rank, go on from the agreed point, after the exchange that was under way.
        """
        self._flight = None
        for name, tensor in saved["agreed"].items():
            self._agreed[name].copy_(tensor)
        for name in self._parameters:
            self._weight(name).copy_(saved["weights"][name])
        kinds = {kind: dict(values) for kind, values in saved["outer"].items()}
        state = {i: {kind: kinds[kind][name] for kind in kinds} for i, name in enumerate(self._agreed) if kinds}
        self._outer.load_state_dict({"state": state, "param_groups": self._outer.state_dict()["param_groups"]})
        self._since = int(saved["since"])
        if saved["flight"]:
            place = int(saved["flight"]["place"])
            names = [name for group in self._local_engine.fragments[place] for name in group.names]
            self._flight = _Flight.of(saved["flight"], names)
        if not is_own:
            if self._flight is not None:
                self._end()
            for name in self._agreed:
                self._weight(name).copy_(self._agreed[name])


@dataclass
class LocalConfig(DDPConfig):
    """The settings of a `LocalSteps`."""

    every: int = 1
    fragments: int = 1
    delay: int = 0
    outer: str = ""
    feedback_decay: float = 1.0

    def algorithm_at(self, step: int) -> Algorithm | None:  # noqa: ARG002
        """Return the algorithm, or None for `Dense`: a step is a plain all_reduce, and is recorded as dense."""
        return None if isinstance(self.algorithm, Dense) else self.algorithm

    def settings(self) -> dict[str, Any]:
        """Return the settings that all ranks must share."""
        names = ("every", "fragments", "delay", "outer", "feedback_decay")
        return {"algorithm": describe(self.algorithm.given), **{name: getattr(self, name) for name in names}}


class _LocalEngine(Engine):
    """An engine each of whose steps has the groups of one fragment, in turn."""

    def __init__(
        self,
        agreed: Mapping[str, Tensor],
        fragments: Sequence[Sequence[ParamGroup]],
        comm: MeteredComm,
        config: LocalConfig,
        sinks: Sinks,
    ) -> None:
        self.fragments = fragments
        super().__init__(agreed, [group for groups in fragments for group in groups], comm, config, sinks, None, False)

    def _groups_of_step(self) -> list[ParamGroup]:
        return list(self.fragments[self.next_step % len(self.fragments)])

    def _shared(self) -> dict[str, Any]:
        return {**super()._shared(), START: digest_of(self.parameters.values())}


@dataclass
class _Flight:
    """An exchange that is under way: `delivered` has the movements, and in their place the means when it is done."""

    place: int  # of the fragment
    names: list[str]
    delivered: list[Tensor]
    sent_at: dict[str, Tensor] = field(default_factory=dict)  # the weights when it began, if steps go on meanwhile
    refused: str = ""  # why it delivered nothing
    last: Bucket | None = None  # until it is known to be done

    def __post_init__(self) -> None:
        devices: list[int | str | torch.device] = [each.device for each in self.delivered[:1] if each.is_cuda]
        self.done: Future[Exception | None] = Future(devices=devices or None)

    def state_dict(self) -> dict[str, Any]:
        """Return the exchange, which is done."""
        delivered = {str(i): each.clone() for i, each in enumerate(self.delivered)}
        sent_at = {name: each.clone() for name, each in self.sent_at.items()}
        refused = torch.tensor([*self.refused.encode()], dtype=torch.uint8)  # as a checkpoint of tensors can hold it
        return {"place": self.place, "delivered": delivered, "sent_at": sent_at, "refused": refused}

    @staticmethod
    def of(saved: Mapping[str, Any], names: list[str]) -> _Flight:
        """Return the exchange that a `state_dict` holds, given its parameters in their order."""
        delivered = [saved["delivered"][str(i)] for i in range(len(saved["delivered"]))]
        refused = bytes(saved["refused"].tolist()).decode()
        return _Flight(int(saved["place"]), names, delivered, dict(saved.get("sent_at", {})), refused)


def inner_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold this model together; None if one rank does."""
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
    else:
        meshes = [each.device_mesh for each in model.parameters() if hasattr(each, "device_mesh")]
        if not meshes:
            return None
        if meshes[0].ndim > 1:
            raise SettingError("LocalSteps wants fully_shard on the 1-D mesh of one worker, such as mesh['shard']")
        group = meshes[0].get_group()
    return group if dist.get_world_size(group) > 1 else None


def split_evenly(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Return the names in `parts` runs of about the same size, none of them empty.

    >>> split_evenly({"a": 1, "b": 8, "c": 1, "d": 2}, 3)
    [['a'], ['b'], ['c', 'd']]
    """
    if len(sizes) < parts:
        raise SettingError(f"{len(sizes)} parameters cannot be shared out to {parts} fragments or ranks")
    names, left, result = deque(sizes), sum(sizes.values()), list[list[str]]()
    for rest in range(parts, 0, -1):
        part, taken = [names.popleft()], 0
        taken = sizes[part[0]]
        while len(names) >= rest and taken + sizes[names[0]] / 2 <= left / rest:
            part.append(names.popleft())
            taken += sizes[part[-1]]
        left -= taken
        result.append(part)
    return result


def _local(parameter: Tensor) -> Tensor:
    """Return the tensor of this rank, without its history: of a DTensor the shard."""
    with torch.no_grad():
        to_local: Callable[[], Tensor] | None = getattr(parameter, "to_local", None)
        return parameter.detach() if to_local is None else to_local()


def movement(start: Tensor, now: Tensor) -> Tensor:
    """Return start - now, flat, where the weights began at `start` as their dtype has it."""
    return (wide(start.to(now.dtype)) - wide(now)).reshape(-1)


def wide(tensor: Tensor) -> Tensor:
    """Return it as residuals are kept: float64 as it is, anything else as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
