"""Momentum and learning rate in sparse steps: the user's optimizers step with others, and keep their own settings.

A sparse step delivers an element's gradients of several steps at once. Momentum spreads them over still more steps, so
that they act late: half of what sparse steps lose under AdamW, and as much for an LSTM under SGD (docs/learning.md).
Where ranks exchange updates (`oktopk.ddp.updates`), the learning rate is higher, see `lr_factor`.

The lower momentum holds within `optimizer.step()` alone. Schedulers and checkpoints see the user's values, and a
scheduler may change any of them. Buffers are scaled where the momentum changes, so that under a steady gradient all
updates have one size. The param group remembers for which momentum: it is saved with the buffers that it describes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from oktopk.errors import SettingError

KEY = "oktopk_momentum"
"""Key of a param group: the momentum that its buffers are scaled for, while that is not the group's own."""

SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
"""Mean squares of gradients. Those of one rank are up to P times those of the mean, so that the switch scales them."""

MOST_LR_FACTOR = 3.0
"""Of `lr_factor`: the largest that was tried."""

Group = dict[str, Any]
IsSparse = Callable[[bool], bool]
"""Whether the latest step was sparse; given True, whether the next one will be."""


class Rates(NamedTuple):
    """Learning rate and momentum of one step."""

    lr: float
    momentum: float


class Kind(NamedTuple):
    """How optimizers of one kind carry gradients on."""

    normalises: bool  # divides by the gradient's size, so that updates of noisy gradients are as large as of clear ones
    sparse_momentum: float  # above which sparse steps are known to learn less
    buffer: str  # its name in the optimizer's state
    momentum: Callable[[Group], float]
    settings: Callable[[float, Group], Group]  # of a momentum
    lr: Callable[[float, float, float], float]  # of (lr, momentum, lower momentum), so that updates keep their size
    scale: Callable[[float, float, Mapping[str, Any]], Any]  # of a buffer, from a momentum to another

    def rates(self, lr: float, momentum: float, most: float | None = None, factor: float = 1.0) -> Rates:
        """Return the rates of a sparse step, if those of a dense one are `lr` and `momentum`."""
        lower = min(momentum, self.sparse_momentum if most is None or not self.is_lowered else most)
        return Rates(factor * (lr if lower == momentum else self.lr(lr, momentum, lower)), lower)

    @property
    def is_lowered(self) -> bool:
        """Whether less momentum is known to help."""
        return self.sparse_momentum < 1


SGD = Kind(
    normalises=False,
    sparse_momentum=0.5,
    buffer="momentum_buffer",
    momentum=lambda group: float(group["momentum"]),
    settings=lambda momentum, _: {"momentum": momentum},
    # Under a steady gradient g a buffer is g / (1 - momentum). SGD leaves it alone while the momentum is 0.
    lr=lambda lr, momentum, lower: lr * (1 - lower) / (1 - momentum),
    scale=lambda before, after, _: (1 - before) / (1 - after) if before else 0.0,
)
ADAM = Kind(
    normalises=True,
    sparse_momentum=0.5,
    buffer="exp_avg",
    momentum=lambda group: float(group["betas"][0]),
    settings=lambda momentum, group: {"betas": (momentum, group["betas"][1])},
    # Under a steady gradient g a buffer is g (1 - beta1^steps), and Adam divides by the bracket.
    lr=lambda lr, *_: lr,
    scale=lambda before, after, state: (1 - after ** state["step"]) / (1 - before ** state["step"]),
)
MUON = Kind(  # less momentum than 0.9 did not help it
    normalises=True,
    sparse_momentum=1.0,
    buffer="momentum_buffer",
    momentum=lambda group: float(group["momentum"]),
    settings=lambda momentum, _: {"momentum": momentum},
    lr=lambda lr, *_: lr,
    scale=lambda *_: 1.0,
)


def lr_factor(ranks: int) -> float:
    """Return the factor on the learning rate where the mean over `ranks` of normalised updates is taken.

    The noise in gradients of several ranks is independent. The mean of P such updates of size 1 has size P ** -0.5,
    and an update by the mean gradient has size 1.
    """
    return min(math.sqrt(ranks), MOST_LR_FACTOR)


def kind_of(optimizer: Optimizer) -> Kind | None:
    """Return the rule of an optimizer; None if it is not known."""
    if isinstance(optimizer, torch.optim.SGD):
        return SGD
    if hasattr(torch.optim, "Muon") and isinstance(optimizer, torch.optim.Muon):
        return MUON
    return ADAM if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else None


class SparseMomentum:
    """Lowers the momentum of some optimizers in the steps that are sparse, until `close`."""

    def __init__(
        self,
        optimizers: Iterable[Optimizer],
        most: float | None,
        is_sparse: IsSparse,
        speaks: bool,
        factor: float = 1.0,
    ) -> None:
        self._most, self._is_sparse, self._speaks, self._factor = most, is_sparse, speaks, factor
        self._own: list[tuple[Group, Group]] = []  # groups within a step, and their own settings
        kinds = {optimizer: kind_of(optimizer) for optimizer in optimizers}
        self._optimizers = {optimizer: kind for optimizer, kind in kinds.items() if kind is not None}
        self._loaded: dict[Optimizer, Mapping[str, float]] = {}
        for name in sorted({type(each).__name__ for each in kinds.keys() - self._optimizers} if speaks else ()):
            sys.stderr.write(f"oktopk: {name} keeps its momentum in sparse steps\n")
        self._handles = [
            handle
            for optimizer in self._optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._after_step()  # a step that raised has left its settings
        for number, momentum in self._loaded.pop(optimizer, {}).items():
            optimizer.param_groups[int(number)].setdefault(KEY, momentum)
        closure = next(iter(args[1:]), kwargs.get("closure"))
        self._change(optimizer, self._is_sparse(closure is not None))  # a closure is about to call backward()

    def _change(self, optimizer: Optimizer, sparse: bool) -> None:
        kind, said = self._optimizers[optimizer], ""
        for group in optimizer.param_groups:
            own, lr = kind.momentum(group), group["lr"]
            factor = self._factor if kind.normalises else 1.0
            rates = kind.rates(lr, own, self._most, factor) if sparse else Rates(lr, own)
            before, was_changed, is_changed = group.get(KEY, own), KEY in group, rates != (lr, own)
            if before != rates.momentum or was_changed != is_changed:
                said = f"momentum {rates.momentum:g}, before {before:g}; lr x {rates.lr / lr if lr else 1:.3g}"
                squares = factor ** (2 * (is_changed - was_changed))
                _scale_(optimizer, group, kind, before, rates.momentum, squares)
            if not is_changed:
                group.pop(KEY, None)
                continue
            changed = {"lr": rates.lr, **kind.settings(rates.momentum, group)}
            self._own.append((group, {name: group[name] for name in changed}))
            group.update({KEY: rates.momentum, **changed})
        if said and self._speaks:
            steps = "sparse" if sparse else "dense"
            sys.stderr.write(f"oktopk: {type(optimizer).__name__} in {steps} steps: {said}\n")

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the momentum that buffers are scaled for, by optimizer and group, where it is not the group's own.

        The optimizer's state dict has it, too. But torch.distributed.checkpoint loads no more than what is there.
        """
        momenta = (
            {str(j): float(group[KEY]) for j, group in enumerate(each.param_groups) if KEY in group}
            for each in self._optimizers
        )
        return {str(i): each for i, each in enumerate(momenta) if each}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on with the result of `state_dict` when the optimizers step, which may not be loaded yet."""
        numbered = {str(i): each for i, each in enumerate(self._optimizers)}
        self._loaded = {
            numbered[i]: {j: float(momentum) for j, momentum in saved[i].items()} for i in saved if i in numbered
        }

    def _after_step(self, *_: Any) -> None:
        while self._own:
            group, own = self._own.pop()
            group.update(own)

    def close(self) -> None:
        """Leave the optimizers as in dense steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._after_step()
        self._speaks = False
        for optimizer in self._optimizers:
            self._change(optimizer, sparse=False)
        self._optimizers.clear()


@torch.no_grad()
def _scale_(optimizer: Optimizer, group: Group, kind: Kind, before: float, after: float, squares: float) -> None:
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if state.get(kind.buffer) is not None:  # there is none before the first step
            state[kind.buffer].mul_(kind.scale(before, after, state))
        for name in SQUARES if squares != 1 else ():
            if state.get(name) is not None:
                state[name].mul_(squares)


def optimizers_of(given: Any, parameters: Iterable[Tensor]) -> list[Optimizer]:
    """Return one optimizer or several as a list, without a trainer's wrapper; refuse those of another model."""
    several = [given] if isinstance(given, Optimizer) or not isinstance(given, Iterable) else list(given)
    ours, found = {id(parameter) for parameter in parameters}, []
    for each in several:
        inner = getattr(each, "optimizer", each)  # of Accelerate and Lightning
        if not isinstance(inner, Optimizer):
            raise SettingError(
                f"optimizer= wants a torch.optim.Optimizer or a list of them, not {type(inner).__name__}"
            )
        others = sum(id(parameter) not in ours for group in inner.param_groups for parameter in group["params"])
        if others:
            raise SettingError(
                f"optimizer= wants an optimizer of the model's parameters; {others} of this {type(inner).__name__}'s "
                "are not the model's: make it from model.parameters(), after the model was moved to its device"
            )
        found.append(inner)
    return found


def warn_of_momentum(parameters: Iterable[Tensor], is_sparse: IsSparse, speaks: bool) -> Callable[[], None]:
    """Warn at the first sparse step if an optimizer steps these parameters with much momentum; return the way out."""
    ours, seen = {id(parameter) for parameter in parameters}, set[int]()

    def look(optimizer: Optimizer, *_: Any) -> None:
        kind = kind_of(optimizer)
        if not is_sparse(False) or kind is None:
            return
        if id(optimizer) in seen:  # it steps again: all have stepped once
            handle.remove()
            return
        groups = [group for group in optimizer.param_groups if any(id(each) in ours for each in group["params"])]
        seen.update([id(optimizer)] * bool(groups))
        most = max(map(kind.momentum, groups), default=0.0)
        if speaks and most > kind.sparse_momentum:
            sys.stderr.write(
                f"oktopk: WARNING: {type(optimizer).__name__} has momentum {most:g}, and sparse steps learn less with "
                f"more than {kind.sparse_momentum:g}: attach(..., optimizer=optimizer) lowers it in them\n"
            )

    handle = register_optimizer_step_post_hook(look)
    return handle.remove
