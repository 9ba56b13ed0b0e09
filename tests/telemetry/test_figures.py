"""The figures of a whole run, by hand and whatever its records are."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.telemetry.figures import finite, mean, summarise
from oktopk.telemetry.reader import Record


def step(number: int, **values: Any) -> Record:
    """Return a record of a step, as far as the figures need it."""
    split = {"data": 0.1, "compute": 0.2, "wait": 0.3, "update": 0.4}
    return {
        "kind": "step", "step": number, "phase": "dense", "sparsity": 0.0, "compression_ratio": 1.0, "sent_bytes": 100,
        "skipped": False, "loss": 1.0, "split": split, **values,
    }  # fmt: skip


def epoch(number: int, **values: Any) -> Record:
    return {"kind": "epoch", "epoch": number, "step": 2 * number + 2, "train_loss": 1.0, "wer": None, **values}


def test_figures_by_hand() -> None:
    sparse = {"phase": "sparse", "sent_bytes": 10, "split": {"data": 0.0, "compute": 0.5, "wait": 0.0, "update": 0.0}}
    records = [
        {"kind": "run", "dense_bytes": 100},
        step(0),
        step(1),
        epoch(0, train_loss=8.0, val_loss=4.0, wer=1.25, cer=0.5),
        {"kind": "event", "event": "first-sparse", "step": 2, "message": ""},
        step(2, **sparse, sparsity=0.98, compression_ratio=50.0),
        step(3, **sparse, sparsity=0.96, compression_ratio=25.0),
        step(4, **sparse, sparsity=1.0, compression_ratio=None, skipped=True, loss=None),
        epoch(1, train_loss=6.0, val_loss=3.0, wer=0.75, cer=0.25),
        epoch(2, train_loss=5.0, val_loss=2.5, wer=1.0, cer=0.375),
        epoch(3, train_loss=4.0, val_loss=None),
    ]
    summary = summarise(records)
    assert summary.pop("seconds") == pytest.approx({"data": 0.2, "compute": 1.9, "wait": 0.6, "update": 0.8})
    assert summary.pop("sent_bytes_per_step") == {"dense": 100.0, "sparse": 10.0}
    assert summary.pop("seconds_per_step") == pytest.approx({"dense": 1.0, "sparse": 0.5})
    assert summary == {
        "steps": 5, "dense_steps": 2, "sparse_steps": 3, "skipped_steps": 1, "epochs": 4,
        "first_loss": 8.0, "train_loss": 4.0, "val_loss": 2.5, "wer": 1.0, "cer": 0.375,
        "best_wer": 0.75, "best_epoch": 1, "sparsity": 0.97, "compression_ratio": 37.5,
        "sent_bytes": 230, "dense_bytes": 500, "sent_of_dense": 0.46,
    }  # fmt: skip


def test_nothing_is_known_of_nothing() -> None:
    summary = summarise([])
    assert summary["steps"] == 0
    for name in ("train_loss", "val_loss", "wer", "sparsity", "compression_ratio", "sent_of_dense"):
        assert summary[name] is None
    assert summary["seconds_per_step"] == {"dense": None, "sparse": None}
    assert [finite(value) for value in (1.5, 0.0, None, math.nan, math.inf, -math.inf)] == [1.5, 0.0] + 4 * [None]


FIGURES = st.one_of(st.none(), st.floats(0, 1e9))
STEPS = st.builds(
    lambda phase, skipped, sparsity, ratio, sent: step(
        0, phase=phase, skipped=skipped, sparsity=sparsity, compression_ratio=ratio, sent_bytes=sent
    ),
    st.sampled_from(["dense", "sparse"]),
    st.booleans(),
    st.floats(0, 1),
    FIGURES,
    st.integers(0, 10**12),
)
EPOCHS = st.builds(
    lambda wer, loss, val: epoch(0, wer=wer, train_loss=loss, val_loss=val, cer=wer), FIGURES, FIGURES, FIGURES
)
RUNS = st.builds(lambda dense: {"kind": "run", "dense_bytes": dense}, st.integers(0, 10**12))


@given(st.lists(st.one_of(STEPS, EPOCHS, RUNS), max_size=30))
def test_no_figure_is_ever_nan(records: list[Record]) -> None:
    summary = summarise(records)
    json.dumps(summary, allow_nan=False)
    assert summary["steps"] == summary["dense_steps"] + summary["sparse_steps"]
    assert summary["skipped_steps"] <= summary["steps"]
    if summary["best_wer"] is not None:
        assert summary["best_wer"] <= summary["wer"]
    if summary["sparsity"] is not None:
        assert 0 <= summary["sparsity"] <= 1


@given(st.lists(FIGURES))
def test_a_mean_over_nothing_is_none(values: list[float | None]) -> None:
    known = [value for value in values if value is not None]
    found = mean(values)
    assert (found is None) == (not known)
    if found is not None:
        assert min(known) * (1 - 1e-12) <= found <= max(known) * (1 + 1e-12)
