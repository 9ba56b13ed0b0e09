"""The optimizers of a run."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from oktopk.ddp.momentum import kind_of
from oktopk.errors import SettingError
from oktopk.train.config import Config

BETA2 = 0.95
WEIGHT_DECAY = 0.1
"""Of matrices, as is usual for transformers; vectors, such as the weights of a norm, have none."""


def make_optimizers(net: nn.Module, config: Config) -> list[Optimizer]:
    """Return the optimizers of the settings: one, or Muon for the matrices between embedding and head and AdamW."""
    parameters = list(net.parameters())
    if config.optimizer == "sgd":
        return [torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0)]
    if config.optimizer == "adamw":
        return [_adamw(parameters, config)]
    if not hasattr(torch.optim, "Muon"):
        raise SettingError(f"optimizer=muon needs torch 2.9 or newer, and this is {torch.__version__}: use adamw")
    embeddings = {id(each.weight) for each in net.modules() if isinstance(each, nn.Embedding)}
    hidden = [each for each in parameters if each.ndim == 2 and id(each) not in embeddings]
    chosen = {id(each) for each in hidden}
    # With this adjustment Muon takes the learning rate of AdamW (Liu et al., 2025, arXiv 2502.16982).
    muon = torch.optim.Muon(hidden, lr=config.lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw([each for each in parameters if id(each) not in chosen], config)]


def _adamw(parameters: Iterable[nn.Parameter], config: Config) -> Optimizer:
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for each in parameters:
        (matrices if each.ndim > 1 else vectors).append(each)
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, BETA2))


def set_rates(optimizers: Iterable[Optimizer], lr: float, momentum: float) -> None:
    """Set the rates of dense steps; `attach` lowers the momentum in sparse ones."""
    for optimizer in optimizers:
        kind = kind_of(optimizer)
        for group in optimizer.param_groups:
            group.update({"lr": lr, **(kind.settings(momentum, group) if kind is not None and kind.is_lowered else {})})
