"""The models whose steps are timed: names for some, and a contract for yours.

factory() -> (net, batch, loss)        importable as module:factory, called with no arguments

net                                    an nn.Module
batch(size, seed) -> inputs, targets   inputs: a tensor, or a tuple of what net is called with
loss(net(*inputs), targets)            -> a scalar tensor, to call backward() on
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from oktopk.bench.wide_mlp import wide
from oktopk.errors import SettingError, one_of


def _lstman4() -> Any:
    from oktopk.train.models.synthetic import lstman4

    return lstman4()


def _an4_small() -> Any:
    from oktopk.train.models.synthetic import an4_small

    return an4_small()


MODELS: Mapping[str, Callable[[], Any]] = MappingProxyType({"lstman4": _lstman4, "an4-small": _an4_small, "wide": wide})

CONTRACT = (
    "a factory takes no arguments and returns (net, batch, loss): an nn.Module, batch(size, seed) -> (inputs, targets) "
    "and loss(output, targets) -> scalar tensor"
)


@dataclass(frozen=True)
class Model:
    """What a factory returned, and what it is trained on."""

    net: nn.Module
    batch: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]

    def inputs(self, size: int, seed: int) -> tuple[tuple[Any, ...], Any]:
        """Return what the net is called with, as a tuple, and the targets."""
        made = self.batch(size, seed)
        if not isinstance(made, tuple) or len(made) != 2:
            raise SettingError(f"batch(size, seed) returned {_shape(made)}; {CONTRACT}")
        inputs, targets = made
        return (inputs if isinstance(inputs, tuple) else (inputs,)), targets


def load_model(name: str) -> Model:
    """Return a new model: one of `MODELS`, or module:factory; the same weights each time, if torch draws them."""
    factory = MODELS.get(name) or _find(name)
    torch.manual_seed(0)
    made = factory()
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
        raise SettingError(f"{name} returned {_shape(made)}; {CONTRACT}")
    return Model(*made)


def check_model(name: str, batch: int) -> int:
    """Return how many parameters the model has; a `SettingError` says what is wrong with it, if a step is."""
    model = load_model(name)
    try:
        inputs, targets = model.inputs(batch, 0)
        loss = model.loss(model.net(*inputs), targets)
    except SettingError:
        raise
    except Exception as error:  # whatever a user's model raises
        raise SettingError(f"a step of {name} failed: {type(error).__name__}: {error}; {CONTRACT}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise SettingError(
            f"the loss of {name} is {_shape(loss)}, not a scalar tensor to call backward() on; {CONTRACT}"
        )
    return sum(parameter.numel() for parameter in model.net.parameters() if parameter.requires_grad)


def _find(name: str) -> Callable[[], Any]:
    module, colon, attribute = name.partition(":")
    if not colon:
        one_of("model (or module:factory)", name, MODELS)
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for python -m: a module in the current folder is found
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"cannot find the model {name}: {error}; {CONTRACT}") from error
    if not callable(factory):
        raise SettingError(f"{name} is {_shape(factory)}, which cannot be called; {CONTRACT}")
    return factory  # type: ignore[no-any-return]


def _shape(thing: Any) -> str:
    """Return what something is, in a few words."""
    if isinstance(thing, tuple):
        return f"({', '.join(type(part).__name__ for part in thing)})"
    return (
        f"a tensor of shape {list(thing.shape)}"
        if isinstance(thing, Tensor)
        else f"something of type {type(thing).__name__}"
    )
