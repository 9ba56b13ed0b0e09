"""`watch_scalers`, `scaler_of_this_backward`: which GradScaler scaled the loss that is being differentiated.

`GradScaler.scale` is wrapped, for the whole process: each tensor that it returns carries a hook, which autograd calls
when backward() reaches that tensor, before any parameter. So several scalers, and an unscaled loss, are told apart.
"""

from collections.abc import Iterable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.variable import Variable

from oktopk.errors import SettingError

_backward = -1  # the latest backward pass that reached a scaled loss
_scalers: list[GradScaler] = []  # those of that pass; none after it


@cache
def watch_scalers() -> None:
    """Mark every loss that a GradScaler scales from now on."""
    scale = GradScaler.scale

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # or a compiled function would trace the hook away
    @wraps(scale)
    def scale_and_mark(self: GradScaler, outputs: Any) -> Any:
        return _marked(self, scale(self, outputs)) if self.is_enabled() else outputs

    GradScaler.scale = scale_and_mark  # type: ignore[method-assign]


def scaler_of_this_backward() -> GradScaler | None:
    """Return the scaler whose loss backward() has reached; None if it was none."""
    if len(_scalers) > 1:
        raise SettingError(
            "two GradScalers scaled what this backward() differentiates: call backward() for each loss, or give "
            "attach() its scaler="
        )
    return _scalers[0] if _scalers else None


def loss_scale_of(scaler: Any, on_device: bool) -> float | Tensor:
    """Return the scale by which a scaler multiplied the loss: a number, or on the device path a tensor."""
    if on_device and isinstance(scaler, GradScaler):
        scale = scaler._get_scale_async()
        if scale is not None:
            return scale
    return float(scaler.get_scale())


def forget_scalers() -> None:
    """Forget the scalers of a backward pass that raises: its callbacks, which would do so, never run."""
    _scalers.clear()


def _marked(scaler: GradScaler, scaled: Tensor | Iterable[Any]) -> Any:
    if isinstance(scaled, Tensor):
        if scaled.requires_grad:
            scaled.register_hook(partial(_reach, scaler))  # type: ignore[no-untyped-call]
        return scaled
    if not isinstance(scaled, (list, tuple)):
        return map(partial(_marked, scaler), scaled)  # GradScaler returns what is lazy as it came
    for each in scaled:
        _marked(scaler, each)
    return scaled


def _reach(scaler: GradScaler, _: Tensor) -> None:
    global _backward
    backward = torch._C._current_graph_task_id()
    if backward != _backward:  # one that raised may have left its scaler here
        _scalers.clear()
        _backward = backward
    if scaler not in _scalers:
        _scalers.append(scaler)
    # The callback queues another one, because with a static graph DDP calls its hook in a callback of its own.
    after_backward = Variable._execution_engine.queue_callback
    after_backward(partial(after_backward, _scalers.clear))
