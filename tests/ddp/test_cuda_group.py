"""The laws of an attachment whose steps stay on the device: with the reference kernels, on any machine."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import MemorySink, OkTopk
from tests.cases import broken_readback, device_step
from tests.ddp.accounts import Audit, any_left, check_same_on_all_ranks, grads_of, same_bits
from tests.ddp.harness import attach, check_words, error_of, gathered, on_ranks
from tests.ddp.nets import Net, step_

STEPS, DENSE_STEPS = 8, 2


def started(density=0.05, **config):
    model = DDP(Net(), bucket_cap_mb=0.005)
    config = {"dense_steps": DENSE_STEPS, "exclude": "*.bias", "timeout": 4.0, **config}
    return model, attach(model, OkTopk(density=density, wire="fp32"), **config)


def spoilt_step_(model, step, spoil="exit.weight"):
    """Make a step's gradients, but on rank 0 that of one parameter is NaN."""
    parameter = model.module.get_parameter(spoil)
    spoiling = parameter.register_hook(lambda grad: grad * math.nan if dist.get_rank() == 0 else grad)
    try:
        step_(model, step)
    finally:
        spoiling.remove()


@pytest.mark.parametrize(("density", "exclude"), [(0.05, "*.bias"), (0.05, ["exit.*", "branch.*"]), (1.0, [])])
@on_ranks(1, 3)
def test_nothing_is_lost_all_ranks_get_the_same_and_every_step_has_its_record(density, exclude):
    with device_step() as seen:
        sink = MemorySink()
        model, attached = started(density, exclude=exclude, sinks=[sink])
        audit = Audit(model, attached)
        for step in range(STEPS):
            audit.step(partial(step_, step=step))
            check_same_on_all_ranks(grads_of(model.module))
            assert attached.last.step == step
        assert seen.runs
        assert attached.summary().steps == STEPS
        audit.check(held=density < 1)
        attached.detach()
    assert [record.step for record in sink.records] == list(range(STEPS))
    for record in sink.records[DENSE_STEPS:]:
        assert len(record.buckets) > 1
        assert 0 < record.selected <= 1.4 * record.wanted
        assert 0 < record.nnz <= 1.4 * record.wanted


@on_ranks(1, 2)
def test_a_step_that_is_not_finite_leaves_no_trace():
    """In the first group; in the last, in a parameter that travels dense."""
    for on_nonfinite in ("raise", "skip"):
        for spoil in ("exit.weight", "entry.bias"):
            with device_step():
                sink = MemorySink()
                model, attached = started(on_nonfinite=on_nonfinite, sinks=[sink])
                for step in range(4):
                    step_(model, step)
                before = attached.residual
                spoilt_step_(model, 4, spoil)
                assert same_bits(attached.residual, before), (on_nonfinite, spoil)
                assert not any_left(grads_of(model.module)), (on_nonfinite, spoil)
                raised = [error_of(step_, model, step) for step in range(5, 9)]
                attached.detach()
            refused, skipped = sink.records[4], [record.step for record in sink.records if record.skipped]
            assert (refused.selected, refused.nnz, refused.threshold, refused.compression_ratio) == (0, 0, None, None)
            assert all(part.skipped for part in refused.buckets)
            assert refused.reason is not None
            assert all(record.to_json() for record in sink.records)
            assert len(sink.records) == 9
            # The error comes in the same later step on all ranks, though `residual` asked for step 4 before.
            assert ["step 4" in each for each in raised] == [False, on_nonfinite == "raise", False, False], raised
            assert skipped == ([4, 6] if on_nonfinite == "raise" else [4])
            assert (sink.records[6].selected > 0) == (sink.records[6].nnz > 0) == (on_nonfinite == "skip")


@pytest.mark.parametrize("loads", [False, True])
@on_ranks(2)
def test_two_accidents_are_told_of_in_the_same_steps_unless_a_checkpoint_is_loaded(loads):
    """Steps 3 and 4 are spoilt; one rank asks for `last` at every step. Going back leaves step 3's accident behind."""
    with device_step():
        sink, raised = MemorySink(), []
        model, attached = started(sinks=[sink])
        for step in range(9):
            saved, before = attached.state_dict() if step == 3 else {}, attached.residual
            if error_of(spoilt_step_ if step in (3, 4) else step_, model, step):
                raised.append(step)
                assert same_bits(attached.residual, before)
            assert dist.get_rank() or attached.last is not None
            if step == 3 and loads:
                attached.load_state_dict(saved)
        attached.detach()
    assert raised == ([6] if loads else [5, 6])
    assert loads or [record.step for record in sink.records if record.skipped] == [3, 4, 5, 6]


@on_ranks(2)
def test_what_breaks_behind_the_steps_ends_all_ranks():
    """The stats of steps cannot be read on rank 0."""
    with device_step():
        model, _ = started(timeout=2.0)
        with broken_readback("the device is gone") if dist.get_rank() == 0 else nullcontext():
            raised = next(filter(None, map(partial(error_of, step_, model), range(STEPS))))
    first, second = gathered(raised)
    check_words(first, "the device is gone")
    assert "the device is gone" in second or "rank 0" in second
