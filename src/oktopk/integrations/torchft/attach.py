"""`attach`: Ok-Topk under a torchft Manager, whose members come and go. It takes the place of its OptimizerWrapper."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from oktopk.algorithms import Algorithm
from oktopk.comm import Comm
from oktopk.ddp.engine import DDPConfig
from oktopk.ddp.exclude import Exclusion, rules_for
from oktopk.ddp.handle import algorithm_of
from oktopk.ddp.hook import is_fsdp2
from oktopk.ddp.momentum import SparseMomentum, optimizers_of
from oktopk.errors import SettingError, one_of, within
from oktopk.integrations.torchft.exchange import Exchange, State
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import Sink
from oktopk.telemetry.summary import Summary


def attach(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    algorithm: Algorithm | str = "oktopk",
    *,
    manager: Any,
    dense_steps: int = 128,
    exclude: Exclusion | Iterable[Exclusion] | None = None,
    density_schedule: Sequence[tuple[int, float]] | None = None,
    on_nonfinite: str = "raise",
    sparse_momentum: float | None = None,
    sinks: Sequence[Sink | Callable[[StepRecord], object]] = (),
    checkpoint_step: int = 0,
    timeout: float = 300.0,
    make_comm: Callable[[Any], Comm] | None = None,
) -> Member:
    """Return this member of a run whose members come and go. `zero_grad()` joins a quorum, `step()` commits or not.

    model             a module, without DDP or FSDP: torchft knows its replicas, and this exchanges their gradients
    optimizer         the optimizer of its parameters, or several; in sparse steps they get a lower momentum
    manager           a torchft Manager with use_async_quorum=False. Weights, optimizers and schedules of a member that
                      heals are registered with it
    checkpoint_step   the step of the run's newest checkpoint: a quorum of members that are all before it is refused
    timeout           seconds to wait for a quorum
    make_comm         returns the `Comm` of the manager's quorum (default: over the manager's own process group)

    The other settings are those of `oktopk.attach`.
    """
    check_model(model)
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    used = algorithm_of(algorithm)
    config = DDPConfig(
        algorithm=used,
        dense_steps=int(within("dense_steps", dense_steps, 0)),
        exclude=rules_for(exclude, parameters, used),
        clip=None,
        density_schedule=tuple((int(steps), float(density)) for steps, density in density_schedule or ()),
        on_nonfinite=one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip")),
        sparse_momentum=sparse_momentum,
    )
    optimizers = optimizers_of(optimizer, model.parameters())
    return Member(
        model, optimizers, parameters, config, manager,
        sinks=sinks, checkpoint_step=checkpoint_step, timeout=timeout, make_comm=make_comm,
    )  # fmt: skip


class Member:
    """A member of the run, which `attach` returns."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, Tensor],
        config: DDPConfig,
        manager: Any,
        **settings: Any,
    ) -> None:
        self.model, self.optimizers, self._parameters = model, list(optimizers), dict(parameters)
        self.exchange = Exchange(self._parameters, config, manager, save=self._save, load=self._load, **settings)
        speaks = sys.stderr.isatty()
        self._momentum = SparseMomentum(self.optimizers, config.sparse_momentum, self.exchange.is_sparse, speaks)
        self.exchange.begin_record(type(model).__name__)

    @property
    def step_number(self) -> int:
        """The number of committed steps."""
        return self.exchange.members.step

    @property
    def rank(self) -> int:
        """The number of this member in the quorum that met last."""
        return int(self.exchange.members.manager.participating_rank() or 0)

    @property
    def size(self) -> int:
        """The members of the quorum that met last; 0 before the first."""
        return self.exchange.size

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest committed step."""
        return self.exchange.last

    @property
    def told(self) -> list[list[float]]:
        """The `figures` of every member in the latest committed step, in rank order."""
        return self.exchange.members.told

    @property
    def residual(self) -> dict[str, Tensor]:
        """A copy of what this member has not delivered yet, by parameter, flat."""
        return self.exchange.residual()

    def summary(self) -> Summary:
        """Return the totals of all committed steps."""
        return self.exchange.summary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Join the quorum of the next step, healed if this member is behind; then forget the gradients."""
        self.exchange.meet()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(
        self,
        *,
        flush: bool = False,
        figures: Sequence[float] = (),
        before_update: Callable[[], object] = lambda: None,
    ) -> bool:
        """Exchange the gradients, and step the optimizers if all members did; return whether they did.

        If not, nothing has changed but the gradients: make the same batch again, after `zero_grad()`. With `flush`, on
        all members alike, the step is dense and leaves no residual, as before a checkpoint. `figures` travel with this
        member's vote: `told` then has those of all. `before_update` is called when the means are the gradients.
        """
        grads = {name: _flat_grad(parameter) for name, parameter in self._parameters.items()}
        if not self.exchange.reduce(grads, flush=flush, figures=figures):
            return False
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad.data_ptr() != grads[name].data_ptr():
                parameter.grad.copy_(grads[name].view_as(parameter.grad))
        before_update()
        for optimizer in self.optimizers:
            optimizer.step()
        return True

    def hand_over(self) -> None:
        """Ask for a dense step, the next but one, after which this member owes nothing and may leave."""
        self.exchange.wants_flush = True

    def state_dict(self) -> State:
        """Return the state of a checkpoint; any member's is all of it. Make it after a step with `flush`."""
        return self.exchange.state_dict()

    def load_state_dict(self, saved: State) -> None:
        """Go on from a checkpoint, on all members alike, before the first step."""
        self.exchange.load_state_dict(saved)

    def detach(self) -> None:
        """Give the optimizers their momentum back, and close the sinks."""
        self._momentum.close()
        self.exchange.close()

    def _save(self) -> State:
        return {"model": self.model.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}

    def _load(self, saved: State) -> None:
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)


def check_model(model: nn.Module) -> None:
    """Refuse a model that has a process group of its own."""
    if isinstance(model, DistributedDataParallel) or is_fsdp2(model):
        raise SettingError(
            f"attach under torchft wants the module itself, not {type(model).__name__}: torchft knows the replicas, "
            "and their gradients are exchanged in step()"
        )


def _flat_grad(parameter: Tensor) -> Tensor:
    """Return the gradient as a flat vector, in place where it lies in one piece; a parameter without one has zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.contiguous().view(-1)
