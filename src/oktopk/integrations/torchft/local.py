"""`LocalSteps` under torchft: members train alone for some steps, then exchange how far they moved, all or none.

    movement    agreed - weights, the outer gradient of a member
    agreed      the point that all members share, bit for bit; the outer optimizer moves it by the delivered mean

The quorum is asked for before each exchange, so that members may come and go between two. One that joins begins at the
agreed point. An exchange that is not committed is made again, with the members that are left: no movement is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oktopk.algorithms import Algorithm
from oktopk.comm import Comm
from oktopk.ddp.exclude import Exclusion, rules_for
from oktopk.ddp.handle import algorithm_of
from oktopk.ddp.local import OUTER, LocalConfig, movement, wide
from oktopk.errors import PeerError, one_of, within
from oktopk.integrations.torchft.attach import check_model
from oktopk.integrations.torchft.exchange import Exchange, State
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import Sink
from oktopk.telemetry.summary import Summary

TRIES = 100
"""Attempts at an exchange before a `PeerError`, because each has waited for a quorum."""


class LocalSteps:
    """Inner steps without communication, and an exchange among the members of a quorum after every H of them.

    manager           a torchft Manager with use_async_quorum=False; its timeouts must exceed the time of `every` steps
    checkpoint_step   exchanges of the run's newest checkpoint: a quorum of members that are all before it is refused

    The other settings are those of `oktopk.LocalSteps`; there is no delay and one fragment. Before the first exchange
    members must have the same weights. A Manager with init_sync=True makes them so, and drops the movements of all but
    one member. With init_sync=False seed all alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        algorithm: Algorithm | str = "oktopk",
        *,
        manager: Any,
        every: int,
        outer: str | Callable[[Iterable[Tensor]], Optimizer] = "sgd",
        feedback_decay: float = 1.0,
        exclude: Exclusion | Iterable[Exclusion] | None = None,
        on_nonfinite: str = "raise",
        sinks: Sequence[Sink | Callable[[StepRecord], object]] = (),
        checkpoint_step: int = 0,
        timeout: float = 300.0,
        make_comm: Callable[[Any], Comm] | None = None,
    ) -> None:
        check_model(model)
        self.model, self.optimizer, self._since = model, optimizer, 0
        self._weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._agreed = {name: wide(each.detach()).clone() for name, each in self._weights.items()}
        made = OUTER[one_of("outer optimizer", outer, OUTER)] if isinstance(outer, str) else outer
        self._outer = made(list(self._agreed.values()))
        used = algorithm_of(algorithm)
        config = LocalConfig(
            algorithm=used, dense_steps=0, exclude=rules_for(exclude, self._agreed, used), clip=None,
            density_schedule=(), on_nonfinite=one_of("choice for on_nonfinite", on_nonfinite, ("raise", "skip")),
            every=int(within("every", every, 1)),
            outer=f"{type(self._outer).__name__} {self._outer.defaults}",
            feedback_decay=within("feedback_decay", feedback_decay, 0, 1),
        )  # fmt: skip
        self.exchange = Exchange(
            self._agreed, config, manager, save=self._save, load=self._load,
            sinks=sinks, checkpoint_step=checkpoint_step, timeout=timeout, make_comm=make_comm, one_group=True,
        )  # fmt: skip
        self._config = config
        self.exchange.begin_record(type(model).__name__)

    @property
    def exchanges(self) -> int:
        """The number of committed exchanges."""
        return self.exchange.members.step

    @property
    def agreed(self) -> dict[str, Tensor]:
        """A copy of the point that all members share."""
        return {name: each.clone() for name, each in self._agreed.items()}

    @property
    def residual(self) -> dict[str, Tensor]:
        """A copy of what this member has not delivered yet, by parameter, flat."""
        return self.exchange.residual()

    def summary(self) -> Summary:
        """Return the totals of all committed exchanges."""
        return self.exchange.summary

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step of the inner optimizer, and an exchange if one is due; return the closure's loss."""
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.advance()
        return loss

    def advance(self) -> None:
        """Count an inner step that was made elsewhere, such as by a GradScaler, and exchange if that is due."""
        self._since += 1
        if self._since >= self._config.every:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self, *, flush: bool = False) -> None:
        """Exchange the movements now, with as many quorums as it takes; with `flush` densely, which leaves no residual.

        A NaN or Inf on any member refuses the exchange on all, and raises or skips, as `on_nonfinite` says.
        """
        self._since = 0
        for _ in range(TRIES):
            self.exchange.meet()  # which puts a member that heals at the agreed point
            moved = {name: movement(self._agreed[name], each) for name, each in self._weights.items()}
            if self.exchange.reduce(moved, flush=flush):
                self._move(moved)
                return
        raise PeerError(f"{TRIES} attempts at an exchange failed: the members come and go faster than it takes")

    def hand_over(self) -> None:
        """Ask for a dense exchange, the next but one, after which this member owes nothing and may leave."""
        self.exchange.wants_flush = True

    def state_dict(self) -> State:
        """Return the state of a checkpoint; any member's is all of it."""
        return self.exchange.state_dict()

    def load_state_dict(self, saved: State) -> None:
        """Go on from a checkpoint, on all members alike, before the first step."""
        self.exchange.load_state_dict(saved)

    def detach(self) -> None:
        """Close the sinks."""
        self.exchange.close()

    def _move(self, means: dict[str, Tensor]) -> None:
        """Move the agreed point by the means, and the weights to it; an exchange that is skipped moves the latter."""
        assert self.exchange.last is not None
        is_skipped = self.exchange.last.skipped
        if not is_skipped:
            for name, agreed in self._agreed.items():
                agreed.grad = means[name].view_as(agreed)
            self._outer.step()
        for name, agreed in self._agreed.items():
            agreed.grad = None
            self._weights[name].copy_(agreed)
        if self._config.feedback_decay != 1 and not is_skipped:
            for group in self.exchange.groups:
                group.residual.held.mul_(self._config.feedback_decay)

    def _save(self) -> State:
        return {"agreed": self.agreed, "outer": self._outer.state_dict(), "inner": self.optimizer.state_dict()}

    @torch.no_grad()
    def _load(self, saved: State) -> None:
        for name, agreed in self._agreed.items():
            agreed.copy_(saved["agreed"][name])
            self._weights[name].copy_(agreed)
        self._outer.load_state_dict(saved["outer"])
        self.optimizer.load_state_dict(saved["inner"])
        self._since = 0
