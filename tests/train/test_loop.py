"""The update of a step whose gradient only the device knows to be finite or not."""

from __future__ import annotations

import math

import pytest
import torch

from oktopk.train.loop import update


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_update_leaves_no_trace(fused: bool) -> None:
    """Steps 0 and 2 are skipped; a fused optimizer is told by a tensor, as on a GPU."""
    parameters = []
    for skips in ((0, 2), ()):
        weights = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, nesterov=True, fused=fused)
        for step in range(5) if skips else (1, 3, 4):
            weights.grad = torch.full((7,), math.nan if step in skips else 0.5 + step)
            update(optimizer, ~torch.isfinite(weights.grad.norm()))
        parameters.append((weights.detach(), optimizer.state[weights]["momentum_buffer"]))
    assert all(map(torch.equal, *parameters))
