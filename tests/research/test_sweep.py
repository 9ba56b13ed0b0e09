"""The sweep on one device: dense steps are shared, exchanges conserve, density 1 is dense."""

import pytest
import torch

from research.learning.language import Text
from research.learning.sweep import BLOCK, WORKERS, Exchange, Line, World, train

TEXT = Text(torch.randint(256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)), 3000)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world():
    return World(TEXT, 1, (1, BLOCK, 8, 8), 1, CPU)


@pytest.mark.parametrize("text", ["scheme=gradients", "scheme=gradients bits=4 power=0.5", "scheme=gradients bits=1",
                                  "scheme=gradients low_rank=2", "scheme=powersgd", "scheme=ternary",
                                  "scheme=updates inner=ternary part=1"])  # fmt: skip
def test_what_is_not_delivered_is_held_back(world, text):
    exchange, delivered = Exchange(world, Line.parse(text)), torch.zeros(world.large)
    vectors = torch.randn(WORKERS, world.large, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        delivered += exchange.deliver(vectors)
    held = exchange.held.mean(0) + exchange._owned
    torch.testing.assert_close(delivered + held, 3 * vectors.mean(0), rtol=0, atol=1e-4)


def test_density_1_trains_as_dense_does(world):
    lines = [Line.parse(f"steps=3 dense=1 {each}") for each in ("scheme=dense", "scheme=gradients density=1")]
    dense, whole = [result["nats"][3] for result in train(lines, lambda _: world, 60)]
    assert whole == pytest.approx(dense, abs=1e-3)
    assert not torch.equal(world.weights, world.first)
