"""`Updates`: sparse steps that exchange how far each rank's optimizer moved the weights, not the gradients.

A sparse exchange delivers an element's gradients of many steps at once. Adam divides by the size of what it is given,
and Muon turns a whole matrix into one of orthogonal rows, so that both see lumps where there was a steady gradient.
Here they see none: each rank's optimizer steps on the rank's own gradient, and its movement is exchanged, with error
feedback. All ranks then continue from the same weights. On a GPT with AdamW this learns as well as dense steps do, and
sparse gradients do not (docs/learning.md). Under FSDP a rank's gradient is that of its replica, and its part a shard.

    start       the weights before the optimizers step, the same bits on all ranks
    movement    start - now: an update of the weights, so that the residual is one, too

The optimizers' moments are each rank's own from the first such step on: a checkpoint of every rank has its own.
`detach` gives all ranks the mean of them, since plain DDP goes on with those of every rank.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from oktopk.cuda.events import record_event, wait_event
from oktopk.ddp.engine import Bucket, Engine, clip_factor
from oktopk.ddp.momentum import kind_of
from oktopk.errors import NonFiniteError, SettingError, StateError
from oktopk.steps import ParamGroup, agree_with_shards

Jobs = queue.SimpleQueue[Callable[[], None] | None]
Moments = dict[str, dict[str, Tensor]]
"""Of an optimizer's state: the tensors of each kind, such as "exp_avg", by the name of the parameter."""


def can_exchange_updates(optimizers: Sequence[Optimizer] | None, parameters: Iterable[Tensor]) -> bool:
    """Return whether these optimizers divide by the gradient's size, and step all parameters, as wide as residuals."""
    kinds = [kind_of(each) for each in optimizers or ()]
    if not kinds or not all(kind is not None and kind.normalises for kind in kinds):
        return False
    stepped = {
        id(parameter) for each in optimizers or () for group in each.param_groups for parameter in group["params"]
    }
    return all(id(each) in stepped and each.dtype in (torch.float32, torch.float64) for each in parameters)


class Updates:
    """The steps of some optimizers, whose movements an engine exchanges from its first sparse step on."""

    def __init__(self, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        self.has_begun = False
        self._engine, self._optimizers = engine, list(optimizers)
        self._jobs: Jobs | None = None
        self._start: list[Tensor] = []  # of each group
        self._moved: list[Tensor] = []  # of each group; both stay where they are, for the sake of CUDA graphs
        self._has_start = False  # from the first optimizer's step to the exchange
        self._stepped: list[Optimizer] = []  # since the last exchange
        self._is_local = False  # the gradients at hand are this rank's own
        self._buckets: list[Bucket] = []  # of the backward pass that is under way
        self._moments: list[Moments] = []  # of a checkpoint, until the optimizers step
        self._handles = [
            handle
            for each in self._optimizers
            for handle in (each.register_step_pre_hook(self._before), each.register_step_post_hook(self._after))
        ]

    def begin(self, jobs: Jobs) -> None:
        """Hand the exchanges to the worker thread that runs these jobs."""
        self._jobs = jobs

    @property
    def is_due(self) -> bool:
        """Whether the next step exchanges movements. Once one did, all do: the residual is one of weights."""
        return self.has_begun or self._engine.is_sparse(True)

    def is_update(self, coming: bool) -> bool:
        """Return whether the optimizers' movements will be exchanged; `coming`: backward() is still to come."""
        return self._is_local or (coming and self.is_due)

    def keep(self, bucket: Bucket) -> None:
        """Take a bucket of gradients that this rank's optimizers are to have, from the hook."""
        if self._stepped:
            rest = [type(each).__name__ for each in self._optimizers if each not in self._stepped]
            raise SettingError(
                f"{', '.join(rest)} made no step since the last backward() but one, and the other optimizers did: an "
                "exchange wants a step of each. Give attach optimizer= the ones that step together"
            )
        self._is_local = True
        assert self._jobs is not None
        self._jobs.put(partial(self._keep, bucket))

    def _keep(self, bucket: Bucket) -> None:
        """Look at the gradients of a backward pass, on the worker thread, and let it go on."""
        try:
            if bucket.index == 0:
                self._buckets.clear()
            if bucket.ready is not None:
                self._engine.follow(bucket.ready, bucket.buffer.device)
            self._buckets.append(bucket)
            if bucket.is_last:
                grads = {name: grad for each in self._buckets for name, grad in each.grads.items()}
                error, over = self._checked(grads, self._engine.scaler_of(bucket)), record_event(bucket.buffer.device)
                for each in self._buckets:
                    each.over = over
                bucket.done.set_result(error)
        except BaseException as error:  # whatever it is, backward() must hear of it, and the other ranks too
            self._engine.give_up(error, bucket)

    def _checked(self, grads: Mapping[str, Tensor], scaler: Any) -> NonFiniteError | None:
        """Clip this rank's gradient; return the error to raise on all ranks if any gradient has a NaN or Inf."""
        engine, config, names = self._engine, self._engine.config, [*self._engine.parameters]
        engine.go_on()
        engine.refusal = None
        bad = next((i for i, name in enumerate(names) if name in grads and not bool(grads[name].isfinite().all())), -1)
        every = engine.comm.all_gather(torch.tensor([bad], device=engine.groups[0].device)).flatten().tolist()
        rank = next((rank for rank, place in enumerate(every) if place >= 0), None)
        error = None
        if rank is not None:
            text = f"step {engine.next_step}: rank {rank}: the gradient of {names[every[rank]]!r} is not finite"
            error = NonFiniteError(text, rank=rank)
        if engine.shards is not None:
            error = agree_with_shards(error, engine.shards)
        if error is not None:
            for grad in grads.values():  # a GradScaler skips the step of a NaN
                grad.fill_(0.0 if scaler is None else math.nan)
            if config.on_nonfinite == "raise":
                return error
            engine.refusal = error
            return None
        if config.clip is not None:
            loss_scale = 1.0 if scaler is None else float(scaler.get_scale())
            factor = clip_factor(
                grads.values(), config.clip / math.sqrt(engine.comm.size), loss_scale, False, engine.shards
            )
            for grad in grads.values() if factor != 1 else ():
                grad.mul_(factor)
        return None

    def _before(self, _: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        closure = next(iter(args[1:]), kwargs.get("closure"))  # it is about to call backward()
        if self._has_start or not self.is_update(closure is not None):
            return
        self._load_moments()
        if not self._start:
            self._start, self._moved = self._vectors(), self._vectors()
        self._read_weights(self._start)
        self._has_start = True

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_local:
            self._has_start = False  # a closure made a dense step
            return
        if optimizer not in self._stepped:
            self._stepped.append(optimizer)
        if len(self._stepped) == len(self._optimizers):
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the movements, and put all ranks at the same weights; after an error at those they started from."""
        self._has_start, self._is_local, self.has_begun = False, False, True
        self._stepped.clear()
        self._read_weights(self._moved)
        for start, moved in zip(self._start, self._moved, strict=True):
            torch.sub(start, moved, out=moved)
        error = self._reduce_(self._moved)
        for group, start, mean in zip(self._engine.groups, self._start, self._moved, strict=True):
            for name, part in self._parts(group, start if error is not None else start.sub_(mean)):
                _here(self._engine.parameters[name]).copy_(part)
        if error is not None:
            raise error

    def _reduce_(self, movements: Sequence[Tensor]) -> Exception | None:
        """Put the mean over ranks in the place of each group's movement, as far as it is delivered."""
        groups, device = self._engine.groups, movements[0].device
        done: Future[Exception | None] = Future(devices=[device] if device.type == "cuda" else None)
        assert self._jobs is not None
        for i, (group, buffer) in enumerate(zip(groups, movements, strict=True)):
            grads = dict(self._flat_parts(group, buffer))
            is_last = i == len(groups) - 1
            bucket = Bucket(i, is_last, buffer, grads, done, ready=record_event(device), is_update=True)
            self._jobs.put(partial(self._engine.take_and_flush, bucket))
        error = done.wait()
        if error is None:
            wait_event(device, bucket.over)
        return error

    def _vectors(self) -> list[Tensor]:
        """Return a vector for each group."""
        groups = self._engine.groups
        return [torch.empty(group.numel, dtype=group.dtype, device=group.device) for group in groups]

    def _read_weights(self, vectors: Sequence[Tensor]) -> None:
        """Write the weights of each group into its vector."""
        for group, vector in zip(self._engine.groups, vectors, strict=True):
            pieces = []
            for name in group.names:
                weight, span = _here(self._engine.parameters[name]).detach().reshape(-1), group.spans[name]
                pieces.append(weight)
                if len(weight) < span.stop - span.start:  # FSDP pads a shard
                    pieces.append(weight.new_zeros(span.stop - span.start - len(weight)))
            torch.cat(pieces, out=vector)

    def _parts(self, group: ParamGroup, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's part, in the shape that this rank has of it."""
        for name, part in self._flat_parts(group, flat):
            weight = _here(self._engine.parameters[name])
            yield name, part[: weight.numel()].view(weight.shape)

    def _flat_parts(self, group: ParamGroup, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        spans = [group.spans[name] for name in group.names]
        return zip(group.names, torch.split(flat, [span.stop - span.start for span in spans]), strict=True)

    # The optimizers' moments

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's moments, which the checkpoint of another rank's optimizers does not have."""
        if not self.has_begun:
            return {}
        moments = self._moments or [self._moments_of(each) for each in self._optimizers]
        copied = {
            str(i): {k: {n: t.clone() for n, t in v.items()} for k, v in each.items()} for i, each in enumerate(moments)
        }
        return {"begun": 1, "moments": copied}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on with the result of `state_dict`; the moments are put into the optimizers when they step."""
        self.has_begun, self._is_local = bool(saved.get("begun", 0)), False
        self._has_start = False
        self._stepped.clear()
        moments = saved.get("moments", {})
        self._moments = [moments[number] for number in sorted(moments, key=int)]

    def _load_moments(self) -> None:
        for optimizer, saved in zip(self._optimizers, self._moments, strict=False):
            ours = self._moments_of(optimizer)
            if {kind: each.keys() for kind, each in ours.items()} != {
                kind: each.keys() for kind, each in saved.items()
            }:
                raise StateError(
                    f"the checkpoint has other moments than this {type(optimizer).__name__}: load the optimizer's own "
                    "state dict of the same checkpoint, too, before the first step"
                )
            for kind, each in saved.items():
                for name, tensor in each.items():
                    ours[kind][name].copy_(tensor)
        self._moments = []

    def _moments_of(self, optimizer: Optimizer) -> Moments:
        """Return the tensors of an optimizer's state that have the shape of their parameter."""
        found: Moments = {}
        for name, parameter in self._engine.parameters.items():
            for kind, tensor in optimizer.state.get(parameter, {}).items():
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape and kind != "step":
                    found.setdefault(kind, {})[name] = _here(tensor)
        return found

    @torch.no_grad()
    def agree_(self) -> None:
        """Give all ranks the mean of their moments. All ranks call this alike, with no step under way."""
        self._load_moments()
        comm = self._engine.comm
        for optimizer in self._optimizers:
            for each in self._moments_of(optimizer).values():
                for tensor in (tensor for tensor in each.values() if tensor.numel()):
                    tensor.copy_(comm.all_reduce(tensor.contiguous().view(-1)).view_as(tensor) / comm.size)
        comm.pop()

    def close(self) -> None:
        """Leave the optimizers to themselves."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@torch.no_grad()
def _here(tensor: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or of a tensor like it: its shard under FSDP, else the whole."""
    here: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here
