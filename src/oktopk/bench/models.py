"""The gradients and models that are timed: four models by name, and any other by module:factory."""

import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.errors import SettingError, one_of

CONTRACT = (
    "a factory takes no arguments and returns (net, batch, loss): an nn.Module, batch(size, seed) -> (inputs, targets) "
    "and loss(output, targets) -> scalar tensor"
)
WIDE_LAYERS, WIDE_WIDTH = 3, 3000
POOL = 3
"""Number of gradients made in advance and used in turn, because making one must not be timed."""


def make_pool(numel: int) -> list[Tensor]:
    """Return `POOL` gradients, different on every rank."""
    return [heavy_tailed(numel, seed=100 * dist.get_rank() + i) for i in range(POOL)]


def heavy_tailed(numel: int, seed: int, device: str = "cpu") -> Tensor:
    """Return a gradient of which few elements carry most of the mass."""
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(seed), device=device).pow_(3)


@dataclass(frozen=True)
class Model:
    """The net, the batches and the loss that a factory returned."""

    net: nn.Module
    batch: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]

    def inputs(self, size: int, seed: int) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments of the net, as a tuple, and the targets."""
        made = self.batch(size, seed)
        if not isinstance(made, tuple) or len(made) != 2:
            raise SettingError(f"batch(size, seed) returned {_kind(made)}; {CONTRACT}")
        inputs, targets = made
        return (inputs if isinstance(inputs, tuple) else (inputs,)), targets


def wide() -> tuple[nn.Module, Callable[[int, int], tuple[Tensor, Tensor]], Callable[[Any, Any], Tensor]]:
    """Return a net of 27.0 M parameters that computes almost nothing: three Linear layers of 3000 x 3000."""

    def batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, WIDE_WIDTH, generator=torch.Generator().manual_seed(seed))
        return inputs, inputs

    layers = [module for _ in range(WIDE_LAYERS) for module in (nn.Linear(WIDE_WIDTH, WIDE_WIDTH), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), batch, F.mse_loss


MODELS = {
    "lstman4": "oktopk.train.models.synthetic:lstman4",
    "an4-small": "oktopk.train.models.synthetic:an4_small",
    "gpt-tiny": "oktopk.train.models.synthetic:gpt_tiny",
    "wide": f"{__name__}:wide",
}


def load_model(name: str) -> Model:
    """Return a new model, one of `MODELS` or module:factory, with the same weights each time if torch draws them."""
    factory = _find(MODELS.get(name, name))
    torch.manual_seed(0)
    made = factory()
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[0], nn.Module):
        raise SettingError(f"{name} returned {_kind(made)}; {CONTRACT}")
    return Model(*made)


def check_model(name: str, batch: int) -> int:
    """Return the number of the model's parameters; raise a `SettingError` if a step of it fails."""
    model = load_model(name)
    try:
        inputs, targets = model.inputs(batch, 0)
        loss = model.loss(model.net(*inputs), targets)
    except SettingError:
        raise
    except Exception as error:  # a user's model may raise anything
        raise SettingError(f"a step of {name} failed: {type(error).__name__}: {error}; {CONTRACT}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        wanted = "a scalar tensor to call backward() on"
        raise SettingError(f"the loss of {name} is {_kind(loss)}, not {wanted}; {CONTRACT}")
    return sum(parameter.numel() for parameter in model.net.parameters() if parameter.requires_grad)


def _find(name: str) -> Callable[[], Any]:
    if ":" not in name:
        one_of("model (or module:factory)", name, MODELS)
    if "" not in sys.path:
        sys.path.insert(0, "")  # python -m finds a module in the current folder, too
    try:
        factory = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"cannot find the model {name}: {error}; {CONTRACT}") from error
    if not callable(factory):
        raise SettingError(f"{name} is {_kind(factory)}, which cannot be called; {CONTRACT}")
    return factory  # type: ignore[no-any-return]


def _kind(value: Any) -> str:
    """Return the type of a value, for a message."""
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a value of type {type(value).__name__}"
