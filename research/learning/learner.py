"""`Learner`: the net, with a replica for each worker; their gradients as flat vectors, and one update for all.

The workers' weights are the same at every step, so the replicas share one copy of them; statistics are each worker's
own, and the evaluation takes worker 0's, as the trainer does. On a GPU every worker has its own stream: the steps of an
LSTM are too small to fill it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oktopk.ddp.exclude import small_or_vector
from oktopk.errors import SettingError
from research.learning.mechanisms import Layout
from research.learning.settings import FROM_RECIPE, Setting
from research.learning.workload import AdamW, Sgd, Workload


class Learner:
    """The net on the device, and the flat vectors that are exchanged."""

    def __init__(self, workload: Workload, workers: int, device: torch.device) -> None:
        self.workload, self.net = workload, workload.make_net()
        large = {name: not small_or_vector(name, parameter) for name, parameter in self.net.named_parameters()}
        self.parameters: list[Tensor] = [p for name, p in self.net.named_parameters() if large[name]]
        side = [p for name, p in self.net.named_parameters() if not large[name]]
        self.layout = Layout(
            lengths=[p.numel() for p in self.parameters],
            rows=[p[0].numel() for p in self.parameters],
            side=sum(p.numel() for p in side),
        )
        self.parameters += side
        self.replicas = [self.net, *(_replica(self.net) for _ in range(1, workers))]
        self.grads = torch.zeros(workers, self.layout.numel, device=device)
        self.streams = [_stream(device) for _ in self.replicas]
        usual = workload.optimizer
        self.weight_decay = usual.weight_decay if isinstance(usual, AdamW) else 0.0
        self.optimizer = make_optimizer(usual, self.layout.numel, device)

    def fill_gradient(self, worker: int, step: int) -> float:
        """Write a worker's gradient into its row of `grads`; return its loss, once all that is done."""
        stream = self.streams[worker]
        with torch.cuda.stream(stream):  # None: no stream
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream(stream.device))  # on which the weights are changed
            loss = self.workload.loss(self.replicas[worker].train(), step, worker)
            made = torch.autograd.grad(loss, self.parameters)
            torch.cat([grad.reshape(-1) for grad in made], out=self.grads[worker])
            return float(loss.detach())

    @torch.no_grad()
    def update(self, grad: Tensor, rates: Rates) -> Tensor:
        """Clip the gradient that trains, step, and return its norm before."""
        norm: Tensor = grad.norm()
        if rates.clip:
            grad = grad * (rates.clip / (norm + 1e-6)).clamp(max=1.0)
        direction = self.optimizer.direction(grad, rates)
        parts = torch.split(direction, [parameter.numel() for parameter in self.parameters])
        shaped = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]
        if self.weight_decay:
            matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
            torch._foreach_mul_(matrices, 1 - rates.lr * self.weight_decay)
        torch._foreach_add_(self.parameters, shaped, alpha=-rates.lr)
        return norm

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the figures of the workload's evaluation."""
        return self.workload.evaluate(self.net.eval())

    def state_dict(self) -> dict[str, Any]:
        """Return what another learner needs to go on from here."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there."""
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _replica(net: nn.Module) -> nn.Module:
    """Return a copy whose parameters are the net's own."""
    copy = deepcopy(net)
    for name, module in copy.named_modules():
        for own, parameter in net.get_submodule(name).named_parameters(recurse=False):
            setattr(module, own, parameter)
    return copy


@dataclass(frozen=True)
class Rates:
    """The optimizer's figures in one step; `clip` 0: none."""

    lr: float
    momentum: float
    nesterov: bool
    clip: float
    quasi: float = 0.0
    lazy: bool = False

    @staticmethod
    def at(lr: float, optimizer: Sgd | AdamW, setting: Setting, step: int) -> Rates:
        """Return the recipe's figures, `lr` and `optimizer`, before the switch, and the setting's after it."""
        usual = Rates(lr, optimizer.momentum, optimizer.nesterov, optimizer.clip)
        since = step - setting.dense_steps
        if since < 0:
            return usual
        rise = min(1.0, (since + 1) / setting.rewarm) if setting.rewarm else 1.0
        return Rates(
            usual.lr * setting.lr_scale * rise,
            _or(setting.momentum, usual.momentum),
            bool(_or(setting.nesterov, usual.nesterov)),
            _or(setting.clip, usual.clip),
            setting.quasi,
            setting.lazy,
        )


def _or(value: float, usual: float) -> float:
    return usual if value == FROM_RECIPE else value


class Optimizer(Protocol):
    """Makes a direction of a flat gradient; `buffer` is its momentum."""

    buffer: Tensor

    @property
    def velocity(self) -> Tensor:
        """The momentum as a sum of gradients, the older the less: as SGD has it."""
        ...

    def direction(self, grad: Tensor, rates: Rates) -> Tensor:
        """Return what is subtracted, but for the learning rate; the state moves on."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what another needs to go on from here."""
        ...

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Go on from there."""
        ...


def make_optimizer(usual: Sgd | AdamW, numel: int, device: torch.device) -> Optimizer:
    """Return the recipe's optimizer, for vectors of a length."""
    return FlatAdam(usual, numel, device) if isinstance(usual, AdamW) else FlatSgd(numel, device)


class FlatAdam:
    """Adam as torch has it, on one flat vector; what makes it AdamW is the learner's, who has the weights."""

    def __init__(self, usual: AdamW, numel: int, device: torch.device) -> None:
        self.usual, self.steps = usual, torch.zeros((), dtype=torch.int64)
        self.buffer, self.squares = torch.zeros(2, numel, device=device)

    @property
    def velocity(self) -> Tensor:
        """The first moment is an average, a sum times 1 - momentum."""
        return self.buffer / (1 - self.usual.momentum)

    def direction(self, grad: Tensor, rates: Rates) -> Tensor:
        """Return what is subtracted, but for the learning rate; the moments move on."""
        if rates.nesterov or rates.quasi or rates.lazy:
            raise SettingError("AdamW is tried without nesterov, quasi and lazy: leave them out of the setting")
        self.steps += 1
        steps, momentum, beta2 = int(self.steps), rates.momentum, self.usual.beta2
        self.buffer.lerp_(grad, 1 - momentum)
        self.squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        deviation = (self.squares / (1 - beta2**steps)).sqrt_().add_(self.usual.eps)
        return (self.buffer / (1 - momentum**steps)).div_(deviation)

    def state_dict(self) -> dict[str, Tensor]:
        """Return both moments, and how many steps they are of."""
        return {"buffer": self.buffer, "squares": self.squares, "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Go on from there."""
        for name, own in self.state_dict().items():
            own.copy_(saved[name])


class FlatSgd:
    """SGD as torch has it, on one flat vector, with what is tried besides."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.buffer = torch.zeros(numel, device=device)

    @property
    def velocity(self) -> Tensor:
        """The buffer is that sum."""
        return self.buffer

    def state_dict(self) -> dict[str, Tensor]:
        """Return the buffer."""
        return {"buffer": self.buffer}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Go on from there."""
        self.buffer.copy_(saved["buffer"])

    def direction(self, grad: Tensor, rates: Rates) -> Tensor:
        """Return what is subtracted, but for the learning rate; the buffer moves on."""
        momentum, before = rates.momentum, self.buffer
        self.buffer = buffer = before * momentum + grad
        if rates.quasi:  # of an average, as Ma & Yarats (2019) have it: as long as the momentum alone would make it
            direction = (1 - rates.quasi) / (1 - momentum) * grad + rates.quasi * buffer
        else:
            direction = grad + momentum * buffer if rates.nesterov else buffer
        if rates.lazy:
            delivered = grad != 0
            self.buffer = torch.where(delivered, buffer, before)
            direction = torch.where(delivered, direction, 0.0)
        return direction
