"""The audit: sparse steps are predicted from dense ones, and the prediction is held against what was measured."""

from dataclasses import replace
from typing import Any

import pytest

from oktopk import OkTopk
from oktopk.cost import ELEMENT_S, GROUP_S, predict
from oktopk.ddp.audit import FIRST, SAMPLES, Audit
from oktopk.telemetry.schema import StepRecord

NUMEL, SIZE = 1_000_000, 4
DENSE = StepRecord(
    step=0, phase="dense", numel=NUMEL, wanted=NUMEL, selected=NUMEL, nnz=NUMEL, sparsity=0.0, compression_ratio=1.0,
    nominal_bytes=4 * NUMEL, sent_bytes=6 * NUMEL, received_bytes=6 * NUMEL, messages=6, world_size=SIZE,
    seconds={"dense_tail": 0.6}, wait_seconds=0.5, step_seconds=0.7,
)  # fmt: skip
SPARSE = replace(DENSE, phase="sparse", step_seconds=0.25)


def test_a_sparse_step_is_computing_plus_its_bytes_at_the_dense_speed_less_what_was_hidden() -> None:
    audit, algorithm = Audit(), OkTopk()
    for _ in range(3):
        assert audit.look(DENSE, None, []).predicted_seconds is None
    made = audit.look(SPARSE, algorithm, [(NUMEL, 0)])
    exchange_s = 4 * predict(algorithm, NUMEL, SIZE).typical * 0.6 / (6 * NUMEL) + GROUP_S + ELEMENT_S * NUMEL
    assert made.predicted_seconds == pytest.approx(0.7 - 0.5 + max(0.0, exchange_s - 0.1))
    for _ in range(FIRST + SAMPLES - 2):
        audit.look(SPARSE, algorithm, [(NUMEL, 0)])
    assert audit.sentence is None
    audit.look(SPARSE, algorithm, [(NUMEL, 0)])
    assert audit.sentence is not None
    assert "and took 250 ms (-20 %)" in audit.sentence


@pytest.mark.parametrize("case", ["no dense steps", "one rank", "an algorithm without a cost model"])
def test_there_is_no_prediction_without_its_facts(case: str) -> None:
    audit = Audit()
    if case != "no dense steps":
        audit.look(replace(DENSE, world_size=1) if case == "one rank" else DENSE, None, [])
    record = replace(SPARSE, world_size=1) if case == "one rank" else SPARSE
    algorithm: Any = object() if case == "an algorithm without a cost model" else OkTopk()
    made = audit.look(record, algorithm, [(NUMEL, 0)])
    assert (made.predicted_seconds, audit.sentence) == (None, None)
