"""Gradients, weights and residuals by name: how far they differ, on all ranks, and whether any mass is lost."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.ddp.harness import gathered


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient that there is, in the order of memory, as attachments keep residuals."""
    grads = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    return {name: grad.as_strided((grad.numel(),), (1,)).clone() for name, grad in grads.items()}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def any_left(tensors: Mapping[str, Tensor]) -> bool:
    """Whether any element is not zero: in residuals, or in the gradients of a step, which has none if it is skipped."""
    return any(bool(tensor.any()) for tensor in tensors.values())


def worst_error(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference in a tensor, over the largest element of what that should be."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name].double(), tensor.double()) for name, tensor in theirs.items() if tensor.numel()]
    return max(float((a - b).abs().max() / (b.abs().max() if b.any() else 1.0)) for a, b in pairs)


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    pairs = ((ours[name].reshape(-1), theirs[name].reshape(-1)) for name in ours)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def check_same_on_all_ranks(tensors: Mapping[str, Tensor]) -> None:
    assert all(same_bits(tensors, theirs) for theirs in gathered(tensors))


def distance(ours: DDP, plain: DDP, backward: Callable[[DDP], None]) -> float:
    """Return the largest relative error of the gradients of one model, with the plain one's for the same weights."""
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    for model in (plain, ours):
        backward(model)
    return worst_error(grads_of(ours.module), grads_of(plain.module))


def mean_of(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean over ranks, in float64, by name."""
    by_rank = gathered(dict(mine))
    return {name: torch.stack([each[name].double() for each in by_rank]).mean(0) for name in mine}


class Audit:
    """An attached model, a copy of its net outside of DDP, and sums of their gradients by parameter, in float64.

    gradients applied + mean residual = mean of the local gradients + mean of what was pending at the start
    """

    def __init__(self, model: DDP, attached: Any, local: nn.Module | None = None) -> None:
        self.model, self.attached, self.local = model, attached, local or copy.deepcopy(model.module)
        pending = {name: residual.double() for name, residual in attached.residual.items()}
        sizes = {name: residual.abs() for name, residual in pending.items()}
        self.sums = {name: torch.zeros_like(each) for name, each in pending.items()}, pending, sizes

    def step(self, backward: Callable[[nn.Module], Any], scale: float = 1.0) -> None:
        """Make the gradients of both, of a scaled loss, and enter them unless the step was skipped."""
        for each in (self.local, self.model):
            each.zero_grad()
            backward(each)
        if not self.attached.last.skipped:
            applied, gradient, magnitude = self.sums
            for name, grad in grads_of(self.model.module).items():
                applied[name] += grad.double() / scale
            for name, grad in grads_of(self.local).items():
                gradient[name] += grad.double() / scale
                magnitude[name] += grad.double().abs() / scale

    def check(self, held: bool = True) -> None:
        """Check, on all ranks, that no element lost more than rounding, and that something is held back if `held`."""
        applied, *mine = self.sums
        gradient, magnitude, residual = (mean_of(each) for each in (*mine, self.attached.residual))
        for name in gradient:
            missing = (applied[name] + residual[name] - gradient[name]).abs()
            lost = float((missing / magnitude[name]).nan_to_num().max()) if missing.numel() else 0.0
            assert bool((missing <= 1e-5 * magnitude[name]).all()), f"{name} lost {lost:.3g} of its gradients"
        assert not held or any_left(residual)
