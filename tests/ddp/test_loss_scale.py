"""With a GradScaler, residuals and the limit of a clip are in unscaled units: updates are those without it.

Scales are powers of two, so that scaling rounds nothing and the two runs can be held to the same bits.
"""

import copy
import io
import math
from contextlib import nullcontext, redirect_stderr
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import OkTopk, OkTopkPaper, TopkA
from tests.cases import device_step
from tests.ddp.accounts import Audit, check_same_on_all_ranks, grads_of, mean_of, same_bits, weights_of, worst_error
from tests.ddp.harness import attach, check_words, error_of, gathered, on_ranks
from tests.ddp.nets import BRAIN, HALF, Net, batch, loss_of, step_

OKTOPK = OkTopk(density=0.05)
STEPS = 14
DENSE_STEPS = 3


def train(algorithm=OKTOPK, scaled=False, autocast=None, option="", inf_at=(1, 7), init_scale=2.0**10, **settings):
    """Train with or without a scaler, and an option of DDP; at some steps rank 1's gradient is Inf."""
    rank, model = dist.get_rank(), DDP(Net(), bucket_cap_mb=0.01, **({option: True} if option else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=init_scale, growth_interval=3)
    defaults = {"dense_steps": DENSE_STEPS, "exclude": "*bias", "scaler": scaler, "on_nonfinite": "skip"}
    attached = attach(model, algorithm, **{**defaults, **settings})
    scales = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        spoiled = step in inf_at and rank == 1
        scaler.scale(loss * math.inf if spoiled else loss).backward()
        scales.append(scaler.get_scale())
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        elif all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
    weights, skipped = weights_of(model.module), attached.summary().nonfinite
    return SimpleNamespace(weights=weights, residual=attached.residual, scales=scales, skipped=skipped)


RUNS = {
    "bounded": {"algorithm": OkTopk(density=0.05, rescale_every=4)},
    "paper": {
        "algorithm": OkTopkPaper(density=0.05, repartition_every=4, rethreshold_every=3),
        "option": "static_graph",
    },
    "clip": {"clip": 0.25, "option": "gradient_as_bucket_view"},
    "topka": {"algorithm": TopkA(density=0.05), "dense_steps": 0, "exclude": ()},
    "autocast": {"autocast": BRAIN},
}


@pytest.mark.parametrize("name", RUNS)
@on_ranks(2)
def test_updates_are_those_without_a_scaler_whether_attach_was_told_of_it_or_not(name):
    theirs = train(**RUNS[name])
    for told in ({}, {"scaler": None}):
        ours = train(scaled=True, **RUNS[name], **told)
        assert any(a < b for a, b in pairwise(ours.scales)), "the scale was to grow"
        assert any(a > b for a, b in pairwise(ours.scales)), "the scale was to shrink"
        assert ours.skipped == theirs.skipped == 2
        assert same_bits(ours.weights, theirs.weights)
        assert same_bits(ours.residual, theirs.residual)


@on_ranks(2)
def test_under_float16_autocast_updates_are_nearly_those_without_a_scaler():
    """Nearly: float16 rounds small gradients more coarsely without a scaler. The one that attach finds is the same."""
    settings = ({"scaled": True}, {}, {"scaled": True, "scaler": None})
    ours, plain, untold = (train(OkTopk(density=1.0), autocast=HALF, **each) for each in settings)
    assert len(set(ours.scales)) > 1
    assert worst_error(ours.weights, plain.weights) <= 1e-3
    assert ours.scales == untold.scales
    assert same_bits(ours.weights, untold.weights)


@on_ranks(2)
def test_a_scale_that_overflows_float16_settles():
    ours = train(scaled=True, autocast=HALF, init_scale=2.0**22, inf_at=())
    assert 0 < ours.skipped < STEPS
    assert gathered(ours.scales) == [ours.scales] * 2
    check_same_on_all_ranks(ours.weights)
    assert all(bool(weight.isfinite().all()) for weight in ours.weights.values())


@on_ranks(2)
def test_each_of_two_scalers_that_attach_was_not_told_of_conserves_mass():
    """Made after attach, with another scale in each step; both losses are scaled before the first backward()."""
    rank, models = dist.get_rank(), [DDP(Net(seed=seed), bucket_cap_mb=0.01) for seed in (1, 2)]
    audits = [Audit(model, attach(model, OKTOPK, exclude="*bias")) for model in models]
    scalers = [torch.amp.GradScaler("cpu") for _ in models]
    with redirect_stderr(io.StringIO()) as said:
        for step in range(8):
            losses = {}
            for m, (scaler, audit) in enumerate(zip(scalers, audits, strict=True)):
                scaler.scale(torch.zeros(1))  # a scaler makes its scale when it is first used
                scaler.update(1.5 ** (3 * step % 7 + 10 * m))
                losses[audit.model] = scaler.scale([loss_of(audit.model, rank, step)])[0]
                losses[audit.local] = loss_of(audit.local, rank, step) * scaler.get_scale()
            for scaler, audit in zip(scalers, audits, strict=True):
                audit.step(lambda each, losses=losses: losses[each].backward(), scaler.get_scale())
        for audit in audits:
            audit.check()
    assert said.getvalue().count("oktopk: a GradScaler scales the loss") == (0 if rank else 2)


@on_ranks(2)
def test_a_loss_that_is_not_scaled_beside_one_that_is_and_one_that_two_scalers_scale():
    """At density 1 nothing is held back. Two scalers are refused, unless attach was given one of them."""
    model, scalers = DDP(Net()), [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    attached, came = attach(model), []
    for scale in (scalers[0].scale, lambda loss: loss):
        model.zero_grad()
        scale(loss_of(model, dist.get_rank(), 0)).backward()
        came.append(grads_of(model.module))
    attached.detach()
    assert worst_error(came[0], {name: 1024 * grad for name, grad in came[1].items()}) <= 1e-6
    for given in (None, scalers[0]):
        model = DDP(Net())
        attach(model, scaler=given)
        losses = [scaler.scale(loss_of(model, dist.get_rank(), 0)) for scaler in scalers]
        assert ("two GradScalers" in error_of(sum(losses).backward)) == (given is None)


@on_ranks(2)
def test_with_raise_an_overflow_is_an_error_on_all_ranks():
    raised = error_of(partial(train, scaled=True, on_nonfinite="raise"))
    check_words(raised, "NonFiniteError", "rank 1")
    with redirect_stderr(io.StringIO()) as told:
        train(scaler=None, inf_at=())
    assert "GradScaler" not in told.getvalue(), "the scaler of the pass that raised was taken for the next one's"


@pytest.mark.parametrize("phase", ["dense", "sparse", "device"])
@on_ranks(2)
def test_float16_parameters_lose_no_small_gradients_to_the_scale(phase):
    """Unscaled, these gradients would be denormal in float16, if anything."""
    net = nn.Linear(16, 16, bias=False).half()
    model, scaler = DDP(net), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    attached = attach(model, scaler=scaler, dense_steps=int(phase == "dense"))
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randn(16, 16, generator=generator).half() for _ in range(2)]
    scaler.scale(torch.zeros(1))  # a scaler makes its scale when it is first used
    with device_step() if phase == "device" else nullcontext():
        (model(torch.eye(16).half()).float() * targets[dist.get_rank()].float()).sum().backward()
    mean = (targets[0].double() + targets[1].double()).t() / 2
    assert worst_error({"weight": net.weight.grad}, {"weight": mean}) <= 2.0**-10
    if phase != "dense":  # what float16 rounds away waits in the residual, in unscaled units
        waits = mean_of(attached.residual)["weight"] * scaler.get_scale()
        assert (
            worst_error({"weight": grads_of(net)["weight"].double() + waits}, {"weight": mean.reshape(-1)}) <= 2.0**-20
        )


@pytest.mark.parametrize("flush", [False, True], ids=["sparse", "flush"])
@on_ranks(2)
def test_more_than_float16_can_hold_is_delivered_in_parts_or_refused(flush):
    """The residual of several steps is more than a float16 gradient can carry at once: nothing may be lost."""
    model = DDP(nn.Linear(8, 8, bias=False).half())
    audit = Audit(model, attach(model, OkTopk(density=0.02), on_nonfinite="skip"))
    for step in range(8):
        if step == 5 and flush:
            audit.attached.exclude("weight")
        audit.step(lambda each: (each(torch.eye(8).half()).float() * 30_000.0).sum().backward())
    audit.check(held=not flush)
    assert bool(audit.sums[0]["weight"].isfinite().all()), "a finite gradient became infinite"


def norm_of(grads):
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))


@pytest.mark.parametrize(
    ("clip", "dense_steps", "scale", "on_device"),
    [(0.05, 1, 1.0, True), (0.05, 1, 1024.0, True), (0.05, 1, 1024.0, False), (1e6, 0, 1.0, False)],
)
@on_ranks(1, 3)
def test_each_rank_is_clipped_to_its_share_before_the_exchange(clip, dense_steps, scale, on_device):
    """Dense steps, and a gradient below the limit, are left alone."""
    model, size = DDP(Net(), bucket_cap_mb=0.01), dist.get_world_size()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
    attach(model, clip=clip, dense_steps=dense_steps, scaler=scaler)
    local = copy.deepcopy(model.module)
    with device_step() if on_device else nullcontext() as device:
        for step in range(4):
            step_(local, step)
            mean = {name: grad.double() for name, grad in grads_of(local).items()}
            norm, limit = norm_of(mean), clip / math.sqrt(size) if step >= dense_steps else math.inf
            assert clip > 1 or norm > clip, "there was to be something to clip"
            for each in mean.values():
                dist.all_reduce(each.mul_(min(1.0, limit / norm) / size))
            model.zero_grad()
            scaler.scale(loss_of(model, dist.get_rank(), step)).backward()
            came = {name: grad.double() / scale for name, grad in grads_of(model.module).items()}
            assert worst_error(came, mean) <= 1e-5
            assert norm_of(came) <= limit * (1 + 1e-5)
    assert device is None or device.runs
