"""Does the learning experiment run, and do its mechanisms keep their promises?"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from oktopk import run_local
from oktopk.train.config import make_config
from research.learning.learner import FlatSgd, Learner, Rates
from research.learning.mechanisms import Exchange, Layout
from research.learning.recognition import Recognition
from research.learning.settings import CATALOGUE, parse
from research.learning.speech import Recordings, Speech

pytestmark = pytest.mark.long

LAYOUT = Layout(lengths=(600, 300, 100), rows=(20, 30, 10), side=24)
RANKS, STEPS = 3, 8
CPU = torch.device("cpu")


def as_exchanged(name):
    """Return the setting without what only the optimizer sees."""
    ours = {"lr_scale": 1, "rewarm": 0, "momentum": 0, "nesterov": 0, "clip": 0, "quasi": 0, "lazy": False, "buffer": 1}
    return replace(parse(name), name="", dense_steps=0, **ours)


SPARSE = list({as_exchanged(name): name for name in reversed(CATALOGUE) if not parse(name).is_dense}.values())


def made_up(count):
    """Return noise, said to be letters; two recordings more are to validate with."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2000, 4000, (count + 2,), generator=generator).tolist()
    samples = [torch.randint(-3000, 3000, (length,), generator=generator, dtype=torch.int16) for length in lengths]
    return Recordings(samples, ["A B"] * (count + 2), count)


def gradient(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    size = torch.cat([torch.full((length,), 10.0**-i) for i, length in enumerate((*LAYOUT.lengths, LAYOUT.side))])
    return torch.randn(LAYOUT.numel, generator=generator) * size


@cache
def exchanged(spec, buffer=0.0):
    """Return each rank's exchange after `STEPS` sparse steps of this setting, and the update of each step."""

    def rank(comm):
        exchange = Exchange(parse(spec), comm, LAYOUT, clip=1e9, momentum=0.9)
        exchange.begin(torch.full((LAYOUT.numel,), buffer))
        return exchange, [exchange.sparse(gradient(comm.rank, step)) for step in range(STEPS)]

    return run_local(RANKS, rank)


def mean_gradient(step):
    return sum(gradient(rank, step) for rank in range(RANKS)) / RANKS


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPARSE)
def test_all_ranks_train_with_the_same_bits_and_what_was_not_delivered_is_in_a_residual(name):
    setting, done = parse(name), exchanged(name)
    for _, trained in done[1:]:
        assert all(torch.equal(a, b) for a, b in zip(done[0][1], trained, strict=True))
    if setting.decay != 1 or setting.late == "drop" or setting.local_momentum:
        return
    pending = sum(exchange.residual.held for exchange, _ in done) / RANKS
    if setting.ef21:  # what trains is all that was delivered so far; what is pending, how far that is behind
        delivered, wanted = done[0][1][-1], sum(exchange.source.average for exchange, _ in done) / RANKS
    else:
        delivered, wanted = sum(done[0][1]), sum(map(mean_gradient, range(STEPS)))
    close(delivered[: LAYOUT.large] + pending, wanted[: LAYOUT.large])
    close(delivered[LAYOUT.large :], wanted[LAYOUT.large :])


@pytest.mark.parametrize("name", [name for name in SPARSE if not parse(name).local_momentum])
def test_at_density_1_every_setting_delivers_what_dense_does(name):
    average, ef21 = torch.zeros(LAYOUT.numel), parse(name).ef21
    for step, got in enumerate(exchanged(f"{name}+density=1+wire=fp32+ramp=+flush_wire=fp32+ceiling=0")[0][1]):
        average += ef21 * (mean_gradient(step) - average)
        close(got, average if ef21 else mean_gradient(step))


@pytest.mark.parametrize(("name", "scale"), [("dgc-unmasked", 1), ("ef21m", 10)])
def test_at_density_1_local_momentum_and_ef21_go_on_as_heavy_ball_does_unless_they_mask(name, scale):
    velocity = torch.full((LAYOUT.numel,), 2.0)
    for step, got in enumerate(exchanged(f"{name}+density=1", buffer=2.0)[0][1]):
        velocity = 0.9 * velocity + mean_gradient(step)
        close(got * scale, velocity)
    exchange, trained = exchanged("dgc+density=1")[0]  # which forgets the velocity of what was delivered
    assert not exchange.source.velocity[: LAYOUT.large].any()
    close(trained[-1][: LAYOUT.large], mean_gradient(STEPS - 1)[: LAYOUT.large])


def test_a_flush_leaves_nothing_behind_but_what_rounding_takes():
    exchange, trained = exchanged("scaled-1+flush_every=4")[0]
    assert not exchange.residual.held.any()
    close(sum(trained), sum(map(mean_gradient, range(STEPS))))
    done = exchanged("scaled-1+flush_every=4+flush_wire=bf16")
    pending = sum(exchange.residual.held for exchange, _ in done) / RANKS
    assert 0 < pending.norm() < 0.01 * mean_gradient(0).norm()
    total = sum(done[0][1])[: LAYOUT.large] + pending
    torch.testing.assert_close(total, sum(map(mean_gradient, range(STEPS)))[: LAYOUT.large], rtol=0, atol=0.05)


def test_scales_of_the_gradient_do_not_grow_with_what_waits():
    spec = "density=0.01+scale_over=row+scale_of=grad+scale_power=0.5+scale_every=1"
    squares = sum(gradient(rank, STEPS - 1).square() for rank in range(RANKS))[: LAYOUT.large] / RANKS
    rms = torch.cat([row.mean().sqrt().expand(len(row)) for row in squares.split(LAYOUT.groups("row"))])
    for exchange, _ in exchanged(spec):
        close(exchange.weights.scale_weight, rms**-0.5)


@pytest.mark.parametrize("ranking", ["scaled", "magnitude"])
def test_unpacked_indices_change_the_bytes_and_nothing_else(ranking):
    packed, plain = (exchanged(f"library+ranking={ranking}{more}") for more in ("", "+packed=no"))
    for (exchange, trained), (other, same) in zip(packed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(trained, same, strict=True))
        assert torch.equal(exchange.residual.held, other.residual.held)
        assert exchange.take_sent_bytes() < other.take_sent_bytes()


def test_replicas_have_the_weights_of_the_net_and_statistics_of_their_own():
    speech = Speech(made_up(8), seed=1, workers=2, batch_size=2, device=CPU)
    learner = Learner(Recognition(make_config({"dnn": "lstman4-small"}), speech, CPU), 2, CPU)
    learner.update(torch.ones(learner.layout.numel), Rates(0.01, 0.0, False, 0.0))
    batch = speech.batch(0, worker=0)
    outputs = [replica.eval()(batch.inputs, batch.frames)[0] for replica in learner.replicas]
    assert torch.equal(*outputs)
    learner.fill_gradient(1, 0)
    assert torch.equal(learner.net.last_norm.running_mean, torch.zeros(160))
    assert learner.replicas[1].last_norm.running_mean.any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_is_torchs(nesterov):
    weight = torch.nn.Parameter(torch.zeros(50))
    theirs = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=nesterov)
    ours, mine = FlatSgd(50, CPU), torch.zeros(50)
    for step in range(5):
        weight.grad = torch.randn(50, generator=torch.Generator().manual_seed(step))
        mine -= 0.1 * ours.direction(weight.grad, Rates(0.1, 0.9, nesterov, 0.0))
        theirs.step()
    torch.testing.assert_close(mine, weight.detach())
