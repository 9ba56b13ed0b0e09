import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from oktopk.telemetry.format import format_value
from oktopk.train.divergence import EXPLODED, FIRST_STEPS, IN_A_ROW, Health, nonfinite_message


def watch(health, losses, start=0):
    """Return the message about each step of a run on three workers, of which rank 2 has this loss and the others 1."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, float(number == 2))
    return [health.check([1, 1, loss], start + i, 0.5, 3.0, net) for i, loss in enumerate(losses)]


def test_an_explosion_names_everything():
    step = FIRST_STEPS + IN_A_ROW - 1
    said = watch(Health(), [4.0] * FIRST_STEPS + [2.0 * EXPLODED * 1.01] * IN_A_ROW)
    assert said[:-1] == [None] * step
    words = (f"step {step}, rank 2", "exploded", "20.2", "2 at the start", "lr 0.5", "norm 3", "'1.weight'", "--lr")
    assert [word for word in words if word not in str(said[-1])] == []


@given(st.lists(st.floats(0.1, 1.0), max_size=30) | st.just([1.0] * 8 + [1000.0, 1000.0, 1.0] * 5))
def test_losses_of_a_kind_and_odd_batches_are_no_explosion(losses):
    assert watch(Health(), losses) == [None] * len(losses)


def test_a_checkpoint_keeps_what_it_knows():
    losses = [1.0] * 6 + [50.0] * 4
    for stop in range(1, len(losses)):
        first = Health()
        said = watch(first, losses[:stop])
        said += watch(Health(**asdict(first)), losses[stop:], start=stop)
        assert said == watch(Health(), losses)


@pytest.mark.parametrize("norm", [None, 2.5, math.inf, math.nan])
def test_the_words_for_a_loss_that_is_not_finite(norm):
    message = nonfinite_message(7, [1.0, math.nan, math.inf], 0.25, norm, "the gradient of 'w' is not finite")
    words = ("step 7", "the gradient of 'w' is not", "on rank 1, 2", "lr 0.25", f"before {format_value(norm)}")
    assert [word for word in words if word not in message] == []
    assert "nan" not in message.lower()
    assert "loss is finite on every rank" in nonfinite_message(7, [1.0], 0.25, norm, "")
