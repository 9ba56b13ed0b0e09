"""The laws of an attachment whose steps stay on the device: with the reference kernels, on any machine."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import MemorySink, OkTopk, StepRecord
from tests.cases import broken_readback, device_step
from tests.ddp.harness import (
    Books,
    Net,
    Raised,
    Worlds,
    attach,
    check_balance,
    delivered_nothing,
    error_of,
    grads_of,
    same_bits,
    step_,
    through_a_file,
)

pytestmark = pytest.mark.processes

STEPS, DENSE_STEPS = 8, 2


def started(density: float = 0.05, **config: Any) -> tuple[DDP, oktopk.Attached]:
    model = DDP(Net(), bucket_cap_mb=0.005)
    config = {"dense_steps": DENSE_STEPS, "exclude": "*.bias", "timeout": 4.0, **config}
    return model, attach(model, OkTopk(density=density, wire="fp32"), **config)


def spoilt_step_(model: DDP, step: int, spoil: str) -> None:
    """Make a step's gradients, but on rank 0 that of one parameter is NaN."""
    parameter = model.module.get_parameter(spoil)
    spoiling = parameter.register_hook(lambda grad: grad * math.nan if dist.get_rank() == 0 else grad)
    try:
        step_(model, step)
    finally:
        spoiling.remove()


def balance(density: float, exclude: Any) -> tuple[Books, list[dict[str, Tensor]], list[StepRecord]]:
    """Return the accounts of a run, each step's gradients, and its records."""
    with device_step() as seen:
        sink = MemorySink()
        model, attached = started(density, exclude=exclude, sinks=[sink])
        local, books, delivered = copy.deepcopy(model.module), Books(model.module), []
        for step in range(STEPS):
            step_(model, step)
            step_(local, step)
            books.enter_(model.module, local)
            delivered.append(grads_of(model.module))
            assert attached.last is not None
            assert attached.last.step == step
        assert seen.runs
        assert attached.summary().steps == STEPS
        books.residual = attached.residual
        attached.detach()
        return books, delivered, sink.records


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost_all_ranks_get_the_same_and_every_step_has_its_record(worlds: Worlds, size: int) -> None:
    cases = {"no biases": (0.05, "*.bias"), "no group": (0.05, ["exit.*", "branch.*"]), "everything": (1.0, [])}
    for name, by_rank in worlds.run_all(size, balance, cases).items():
        check_balance([books for books, _, _ in by_rank], held=name != "everything")
        for _, delivered, records in by_rank:
            assert all(same_bits(*pair) for pair in zip(delivered, by_rank[0][1], strict=True))
            assert [record.step for record in records] == list(range(STEPS))
            for record in records[DENSE_STEPS:]:
                assert len(record.buckets) > 1
                assert 0 < record.selected <= 1.4 * record.wanted
                assert 0 < record.nnz <= 1.4 * record.wanted


def accident(on_nonfinite: str, spoil: str) -> tuple[bool, bool, Raised | None, int, list[StepRecord]]:
    """Return whether residuals are as before and nothing was delivered, what was raised in which step; the records."""
    with device_step():
        sink = MemorySink()
        model, attached = started(on_nonfinite=on_nonfinite, sinks=[sink])
        for step in range(4):
            step_(model, step)
        before = attached.residual
        spoilt_step_(model, 4, spoil)
        undone, nothing = same_bits(attached.residual, before), delivered_nothing(grads_of(model.module))
        raised, step = None, 4
        while raised is None and step < 8:
            step += 1
            raised = error_of(partial(step_, model, step))
        attached.detach()
        return undone, nothing, raised, step, sink.records


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_is_not_finite_leaves_no_trace(worlds: Worlds, size: int) -> None:
    """In the first group; in the last, in a parameter that travels dense."""
    cases = {f"{how} {spoil}": (how, spoil) for how in ("raise", "skip") for spoil in ("exit.weight", "entry.bias")}
    for name, by_rank in worlds.run_all(size, accident, cases).items():
        for undone, nothing, raised, step, records in by_rank:
            assert undone, name
            assert nothing, name
            refused = records[4]
            assert (refused.selected, refused.nnz, refused.threshold, refused.compression_ratio) == (0, 0, None, None)
            assert all(part.skipped for part in refused.buckets)
            assert refused.reason is not None
            assert all(record.to_json() for record in records)
            skipped = [record.step for record in records if record.skipped]
            if name.startswith("raise"):
                assert skipped == [4, 6]
                assert raised is not None
                assert "step 4" in raised.message
                assert step == 6  # on all ranks the same one, though what step 4 did was asked for before
            else:
                assert raised is None
                assert skipped == [4]
                assert len(records) == 9


def accidents(loads: bool) -> tuple[list[int], bool, list[int]]:
    """Spoil steps 3 and 4, and go on, whatever is raised; return the steps that raised, whether each of them left the
    residuals as they were, and the steps that are said to have been skipped. One rank asks for `last` at every step.
    """
    with device_step():
        sink, raised, undone = MemorySink(), [], True
        model, attached = started(sinks=[sink])
        for step in range(9):
            saved, before = attached.state_dict() if step == 3 else {}, attached.residual
            spoils = step in (3, 4)
            make = partial(spoilt_step_, spoil="exit.weight") if spoils else step_
            if error_of(partial(make, model, step)) is not None:
                raised.append(step)
                undone = undone and same_bits(attached.residual, before)
            assert dist.get_rank() or attached.last is not None
            if step == 3 and loads:
                attached.load_state_dict(saved)
        attached.detach()
        return raised, undone, [record.step for record in sink.records if record.skipped]


def test_two_accidents_are_told_of_in_the_same_steps_on_all_ranks(worlds: Worlds) -> None:
    assert worlds.run(2, accidents, False) == [([5, 6], True, [3, 4, 5, 6])] * 2


def test_who_goes_back_to_a_checkpoint_has_left_the_accident_behind(worlds: Worlds) -> None:
    for raised, _, _ in worlds.run(2, accidents, True):
        assert raised == [6]  # only what was spoilt since


def resumed(schedule: Any) -> bool:
    with device_step():
        whole_model, whole = started(density_schedule=schedule)
        for step in range(5):
            step_(whole_model, step)
        saved = through_a_file(whole.state_dict())
        model, attached = started(density_schedule=schedule)
        attached.load_state_dict(saved)
        same = True
        for step in range(5, 24):
            step_(whole_model, step)
            step_(model, step)
            same = same and same_bits(grads_of(whole_model.module), grads_of(model.module))
        same = same and same_bits(whole.residual, attached.residual)
        whole.detach()
        attached.detach()
        return same


def test_going_on_from_a_checkpoint_is_never_having_stopped(worlds: Worlds) -> None:
    cases = {"constant": (None,), "schedule": ([(4, 0.5), (4, 0.1)],)}
    assert list(worlds.run_all(2, resumed, cases).values()) == [[True, True]] * len(cases)


def unreadable_stats() -> Raised | None:
    """Return what backward() says after the stats of steps could not be read on one rank."""
    with device_step():
        model, attached = started(timeout=2.0)
        raised = None
        with broken_readback("the device is gone") if dist.get_rank() == 0 else nullcontext():
            for step in range(STEPS):
                raised = raised or error_of(partial(step_, model, step))
        attached.detach()
        return raised


def test_what_breaks_behind_the_steps_ends_all_ranks(worlds: Worlds) -> None:
    first, second = worlds.run(2, unreadable_stats)
    assert first is not None
    assert second is not None
    assert "the device is gone" in first.message
    assert "the device is gone" in second.message or "rank 0" in second.message
