"""Models that DDP would train, and whose gradients a hook cannot have: refused at once."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.ddp.harness import Raised, Worlds, attach, error_of


def sparse_gradients() -> Raised | None:
    return error_of(lambda: attach(DDP(nn.Embedding(10, 4, sparse=True))))


def test_a_module_with_sparse_gradients(worlds: Worlds) -> None:
    (raised,) = worlds.run(1, sparse_gradients)
    assert raised.kind == "SettingError"
    assert "sparse=True" in raised.message


def attach_to_a_copy() -> tuple[bool, bool, bool]:
    model = DDP(nn.Linear(200, 200))
    first = attach(model)
    other = copy.deepcopy(model)
    second = attach(other)
    other(torch.ones(1, 200)).sum().backward()
    seen = (first.active, second.active, second.last is not None and first.last is None)
    first.detach()
    second.detach()
    return seen


def test_a_copy_of_an_attached_model_is_attached_to_nothing_and_can_be(worlds: Worlds) -> None:
    assert worlds.run(1, attach_to_a_copy) == [(True, True, True)]
