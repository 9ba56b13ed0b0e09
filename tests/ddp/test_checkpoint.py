"""`save_distributed` and `load_distributed`: what is pending survives, on as many ranks or on others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import OkTopk, OkTopkPaper, TopkA
from tests.ddp.harness import (
    Books,
    Net,
    Raised,
    Worlds,
    attach,
    check_balance,
    descend_,
    error_of,
    mean_of,
    relative_error,
    same_bits,
    step_,
    weights_of,
)

pytestmark = pytest.mark.processes

CONSERVED = 1e-6
STEPS, MORE = 8, 8
BOUNDED = OkTopk(density=0.05, rescale_every=3)
PAPER = OkTopkPaper(density=0.05, repartition_every=3, rethreshold_every=2)


def start(algorithm: Any, bucket_cap_mb: float = 0.01, **settings: Any) -> tuple[DDP, oktopk.Attached]:
    model = DDP(Net(), bucket_cap_mb=bucket_cap_mb)
    return model, attach(model, algorithm, **{"dense_steps": 2, "exclude": "*bias", **settings})


def train(model: DDP, first: int, end: int) -> None:
    for step in range(first, end):
        step_(model, step)
        descend_(model)


def save(path: Path, algorithm: Any, settings: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Train, save, and go on: the residual that was saved, and the weights of the run that never stopped."""
    model, attached = start(algorithm, **settings)
    train(model, 0, STEPS)
    oktopk.save_distributed(path, attached)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), path / "net.pt")
    saved = {"residual": attached.residual}
    train(model, STEPS, STEPS + MORE)
    attached.detach()
    return saved | {"weights": weights_of(model.module)}


def load(path: Path, algorithm: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Load and go on: the residual that was loaded, and what conservation says of the steps after it."""
    model, attached = start(algorithm, **settings)
    model.module.load_state_dict(torch.load(path / "net.pt", weights_only=True))
    oktopk.load_distributed(path, attached)
    loaded = {"residual": attached.residual, "step": attached.step}
    train(model, STEPS, STEPS + MORE)
    attached.detach()
    return loaded | {"weights": weights_of(model.module), "active steps": attached.summary().steps}


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (BOUNDED, {}),
        pytest.param(PAPER, {}, marks=pytest.mark.slow),
        pytest.param(TopkA(density=0.05), {"dense_steps": STEPS + 1}, marks=pytest.mark.slow),
    ],
    ids=["bounded", "paper", "topka, dense phase"],
)
def test_on_as_many_ranks_the_run_goes_on_with_the_same_bits(
    worlds: Worlds, tmp_path: Path, algorithm: Any, settings: dict[str, Any]
) -> None:
    saved = worlds.run(2, save, tmp_path, algorithm, settings)
    loaded = worlds.run(2, load, tmp_path, algorithm, settings)
    for before, after in zip(saved, loaded, strict=True):
        assert after["step"] == STEPS
        assert all(same_bits(after[what], before[what]) for what in ("residual", "weights"))


@pytest.mark.parametrize(
    ("old", "new"),
    [(2, 3), pytest.param(4, 2, marks=pytest.mark.slow), (3, 1)],
)
def test_on_other_ranks_the_mean_of_what_is_pending_is_conserved(
    worlds: Worlds, tmp_path: Path, old: int, new: int
) -> None:
    saved = worlds.run(old, save, tmp_path, BOUNDED, {})
    loaded = worlds.run(new, load, tmp_path, BOUNDED, {})
    before, after = (mean_of([each["residual"] for each in ranks]) for ranks in (saved, loaded))
    assert before.keys() == after.keys()
    assert all(relative_error(after[name], before[name]) <= CONSERVED for name in before)
    assert any(bool(tensor.any()) for tensor in saved[0]["residual"].values())
    assert all(each["step"] == STEPS and each["active steps"] == MORE for each in loaded)


def load_and_account(path: Path) -> tuple[Books, dict[str, Tensor]]:
    """Go on with another algorithm, other buckets and exclusions: the books, and the residual that was loaded."""
    model, attached = start(PAPER, bucket_cap_mb=25, exclude="norm.*")
    model.module.load_state_dict(torch.load(path / "net.pt", weights_only=True))
    oktopk.load_distributed(path, attached)
    loaded = attached.residual
    local, books = copy.deepcopy(model.module), Books(model.module, loaded)
    for step in range(STEPS, STEPS + MORE):
        for net in (local, model):
            step_(net, step)
        books.enter_(model.module, local)
    attached.detach()
    books.residual = attached.residual
    return books, loaded


def test_with_other_buckets_and_exclusions_every_residual_keeps_its_place(worlds: Worlds, tmp_path: Path) -> None:
    saved = worlds.run(2, save, tmp_path, BOUNDED, {"bucket_cap_mb": 0.004})
    by_rank = worlds.run(2, load_and_account, tmp_path)
    check_balance([books for books, _ in by_rank])
    for before, (_, loaded) in zip(saved, by_rank, strict=True):
        assert same_bits(loaded, before["residual"])


def test_a_threshold_comes_back_to_the_last_bit(worlds: Worlds, tmp_path: Path) -> None:
    for before, after in worlds.run(2, save_and_load_thresholds, tmp_path):
        assert any(threshold != float(torch.tensor(threshold)) for threshold in before), "these need float64"
        assert after == before


def save_and_load_thresholds(path: Path) -> tuple[list[float], list[float]]:
    """Return the thresholds that were saved, and those that were loaded; they are measured in float64 here."""
    model = DDP(Net().double(), bucket_cap_mb=0.01)
    attached = attach(model, PAPER)
    for step in range(3):
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(inputs).square().mean().backward()
    oktopk.save_distributed(path, attached)
    before = attached.state_dict()["groups"]
    oktopk.load_distributed(path, attached)
    after = attached.state_dict()["groups"]
    attached.detach()
    return [lane["state"]["threshold"] for lane in before], [lane["state"]["threshold"] for lane in after]


class Slashed(nn.Module):
    """A net with a layer of this name, which may look like a path."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(8, 32)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers.values()]).sum(0)


def load_into(name: str, path: Path, saves: bool) -> tuple[Raised | None, bool]:
    """Load a checkpoint of this model or of another one: what is raised, and whether the residual is that of before."""
    model = DDP(Slashed(name))
    attached = attach(model, BOUNDED)
    model(torch.randn(4, 8)).square().mean().backward()
    if saves:
        oktopk.save_distributed(path, attached)
    before = attached.residual
    if saves:
        model(torch.randn(4, 8)).square().mean().backward()
    raised = error_of(lambda: oktopk.load_distributed(path, attached))
    attached.detach()
    return raised, same_bits(attached.residual, before)


def test_any_name_of_a_parameter_will_do(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, load_into, "a/b", tmp_path, True) == [(None, True)] * 2


def test_the_checkpoint_of_another_model_and_a_folder_without_one_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, save, tmp_path, BOUNDED, {})
    for size in (2, 1):  # as many ranks, and fewer
        for raised, unchanged in worlds.run(size, load_into, "x", tmp_path, False):
            assert raised is not None
            assert raised.kind == "StateError"
            assert "layers.x.weight" in raised.message
            assert "body.0.weight" in raised.message
            assert unchanged
    for raised in worlds.run(2, load_what_is_none_of_ours, tmp_path / "other"):
        assert raised is not None
        assert raised.kind == "StateError"
        assert "save_distributed" in raised.message


def load_what_is_none_of_ours(path: Path) -> Raised | None:
    _, attached = start(BOUNDED)
    dist.checkpoint.save({"x": torch.ones(1)}, checkpoint_id=path)
    raised = error_of(lambda: oktopk.load_distributed(path, attached))
    attached.detach()
    return raised
