from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from oktopk.telemetry.format import format_value
from oktopk.train import divergence
from oktopk.train.divergence import EXPLODED, FIRST_STEPS, IN_A_ROW, Health, nonfinite_message


def watch(health: Health, losses: list[float], start: int = 0) -> list[str | None]:
    """Return what is said of each step of a run on one worker."""
    return [health.check([loss], start + i, 0.5, 3.0, lambda: "a.weight") for i, loss in enumerate(losses)]


def test_an_explosion_names_everything() -> None:
    step = FIRST_STEPS + IN_A_ROW - 1
    said = watch(Health(), [2.0] * FIRST_STEPS + [2.0 * EXPLODED * 1.01] * IN_A_ROW)
    assert said[:-1] == [None] * step
    words = (f"step {step}, rank 0", "exploded", "20.2", "2 at the start", "lr 0.5", "norm 3", "'a.weight'", "--lr")
    assert [word for word in words if word not in str(said[-1])] == []


def test_the_worst_rank_is_named() -> None:
    health, losses = Health(), [[1.0] * 3] * 6 + [[1.0, 1.0, 100.0]] * IN_A_ROW
    said = [health.check(each, step, 0.1, None, lambda: "w") for step, each in enumerate(losses)][-1]
    assert "rank 2" in str(said)
    assert "gradient norm n/a" in str(said)


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=30))
def test_losses_of_a_kind_are_no_explosion(losses: list[float]) -> None:
    assert watch(Health(), losses) == [None] * len(losses)


def test_one_odd_batch_is_no_explosion() -> None:
    assert watch(Health(), [1.0] * 8 + [1000.0, 1000.0, 1.0] * 5) == [None] * 23


def test_a_checkpoint_keeps_what_it_knows() -> None:
    losses = [1.0] * 6 + [50.0] * 4
    for stop in range(1, len(losses)):
        first = Health()
        said = watch(first, losses[:stop])
        said += watch(Health(**asdict(first)), losses[stop:], start=stop)
        assert said == watch(Health(), losses)


@pytest.mark.parametrize("norm", [None, 2.5, math.inf, math.nan])
def test_the_words_for_a_loss_that_is_not_finite(norm: float | None) -> None:
    message = nonfinite_message(7, [1.0, math.nan, math.inf], 0.25, norm, "the gradient of 'w' is not finite")
    for word in (
        "step 7",
        "the gradient of 'w' is not finite",
        "on rank 1, 2",
        "lr 0.25",
        f"before {format_value(norm)}",
    ):
        assert word in message
    assert "nan" not in message.lower()
    assert "loss is finite on every rank" in nonfinite_message(7, [1.0], 0.25, norm, "")


def test_the_largest_gradient() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert divergence.largest_gradient(net) == "none"
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, float(number == 2))
    assert divergence.largest_gradient(net) == "1.weight"
