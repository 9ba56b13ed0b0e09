import dataclasses
import json

import pytest
import torch

from oktopk import Dense, OkTopk, Reduced, Reducer, Sparse, StepRecord, TopkA, run_local
from oktopk.telemetry.record import total_of
from tests.cases import device_step


def _record(algorithm: object) -> StepRecord:
    def job(comm: object) -> StepRecord:
        reducer = Reducer(algorithm, comm)
        reducer.all_reduce(torch.arange(1.0, 101))
        return reducer.last

    return run_local(2, job)[1]


def test_the_record_of_a_dense_step() -> None:
    record = _record(Dense())
    assert (record.phase, record.nnz, record.sparsity, record.compression_ratio) == ("dense", 100, 0.0, 1.0)
    assert (record.nominal_bytes, record.selected, record.threshold, record.oldest_wait_steps) == (400, 100, None, 0)
    assert record.sent_bytes == 4 * 100 + 8  # 2 n (P-1)/P words, and a verdict
    assert (record.world_size, record.dense_tail_numel, record.nnz_by_owner) == (2, 100, ())


def test_the_record_of_a_sparse_step_holds_no_nan_and_cannot_be_changed() -> None:
    record = _record(TopkA(density=0.05))
    assert (record.phase, record.nnz, record.sparsity, record.compression_ratio) == ("sparse", 5, 0.95, 20.0)
    assert (record.nominal_bytes, record.selected, record.messages) == (40, 5, 2)
    assert record.sent_bytes == record.received_bytes == 4 * (4 + 2 * 5) + 8
    assert (record.world_size, record.dense_tail_numel) == (2, 0)
    assert sum(made["sent_bytes"] for made in record.collectives.values()) == record.sent_bytes
    assert set(record.sent_by_phase) == {"agree", "gather"}
    assert {"accumulate", "select", "gather", "apply"} <= set(record.seconds)
    assert json.loads(record.to_json())["nnz"] == record.nnz  # raises on NaN
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.step = 5


def test_the_record_of_a_step_merges_its_groups_by_the_catalogue() -> None:
    one, two = _record(TopkA(density=0.05)), _record(TopkA(density=0.1))
    both = total_of([dataclasses.replace(one, threshold=None), two], step=7, phase="sparse")
    assert (both.step, both.numel, both.nnz, both.sparsity) == (7, 200, 15, 1 - 15 / 200)
    assert both.compression_ratio == pytest.approx(200 / 15)
    assert (both.sent_bytes, both.world_size, both.threshold) == (one.sent_bytes + two.sent_bytes, 2, two.threshold)
    assert both.sent_by_phase["gather"] == one.sent_by_phase["gather"] + two.sent_by_phase["gather"]
    made = both.collectives["gather/all_gather"]
    assert made["calls"] == sum(part.collectives["gather/all_gather"]["calls"] for part in (one, two))
    assert sum(count for _, count in made["sizes"]) == 2
    assert both.buckets[1] == two
    assert total_of([], step=0, phase="dense").numel == 0


@pytest.mark.parametrize(
    ("taken", "selected"),
    [(torch.tensor([0, 2]), 2), (torch.tensor([True, False, True, True]), 3), (slice(None), 4), (slice(1, 3), 2)],
)
def test_a_custom_algorithm_that_does_not_count_is_counted_for(taken: torch.Tensor | slice, selected: int) -> None:
    class Mine:
        def init(self, *_: object) -> None:
            return None

        def reduce(self, acc: torch.Tensor, *_: object) -> Reduced:
            keep = torch.zeros(4, dtype=torch.bool)
            keep[taken] = True
            return Reduced(Sparse.pick(acc, keep.nonzero().view(-1)), taken)

    def job(comm: object) -> tuple[StepRecord, torch.Tensor]:
        reducer = Reducer(Mine(), comm)
        reducer.all_reduce(torch.tensor([1.0, 2, 3, 4]))
        return reducer.last, reducer.residual

    ((record, residual),) = run_local(1, job)
    assert record.selected == selected
    assert int(residual.count_nonzero()) == 4 - selected


def test_the_oldest_wait_is_that_of_the_element_that_no_step_sends() -> None:
    """Of three elements one is sent each step: the largest, until the residual of another has outgrown it."""

    def job(comm: object) -> list[int | None]:
        reducer, waits = Reducer(TopkA(density=0.3), comm), []
        for _ in range(6):
            reducer.all_reduce(torch.tensor([2.2, 1.0, 0.0]))
            waits.append(reducer.last.oldest_wait_steps)
        return waits

    assert run_local(2, job) == [[1, 2, 1, 1, 2, 1]] * 2
    with device_step():  # where the host must not wait for it
        assert _record(OkTopk(density=0.05)).oldest_wait_steps is None
