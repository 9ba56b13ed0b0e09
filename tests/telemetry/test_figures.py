"""The figures of a whole run, by hand and whatever its records are."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.telemetry.figures import finite, summary_of
from oktopk.telemetry.reader import Record
from oktopk.telemetry.run import Run


def step(**values: Any) -> Record:
    """Return a record of a step, as far as the figures need it."""
    split = {"data": 0.1, "compute": 0.2, "wait": 0.3, "update": 0.4}
    figures = {"phase": "dense", "sparsity": 0.0, "compression_ratio": 1.0, "sent_bytes": 100, "skipped": False}
    return {"kind": "step", "step": 0, **figures, "loss": 1.0, "split": split, **values}


def epoch(number: int, train_loss: float | None, val_loss: float | None, wer: float | None = None) -> Record:
    losses = {"train_loss": train_loss, "val_loss": val_loss}
    return {"kind": "epoch", "epoch": number, **losses, "wer": wer, "cer": wer and wer / 2}


def test_figures_by_hand() -> None:
    sparse = {"phase": "sparse", "sent_bytes": 10, "split": {"data": 0.0, "compute": 0.5, "wait": 0.0, "update": 0.0}}
    summary = summary_of(Run([
        {"kind": "run", "dense_bytes": 100}, step(), step(), epoch(0, 8.0, 4.0, 1.25),
        step(**sparse, sparsity=0.98, compression_ratio=50.0), step(**sparse, sparsity=0.96, compression_ratio=25.0),
        step(**sparse, sparsity=1.0, compression_ratio=None, skipped=True, loss=None),
        epoch(1, 6.0, 3.0, 0.75), epoch(2, 5.0, 2.5, 1.0), epoch(3, 4.0, None),
    ]))  # fmt: skip
    assert summary.pop("seconds") == pytest.approx({"data": 0.2, "compute": 1.9, "wait": 0.6, "update": 0.8})
    assert summary.pop("sent_bytes_per_step") == {"dense": 100.0, "sparse": 10.0}
    assert summary.pop("seconds_per_step") == pytest.approx({"dense": 1.0, "sparse": 0.5})
    assert summary.pop("verdict").endswith("compression pays, a step is 2 times as fast")
    assert summary == {
        "steps": 5, "dense_steps": 2, "sparse_steps": 3, "skipped_steps": 1, "epochs": 4,
        "first_loss": 8.0, "train_loss": 4.0, "val_loss": 2.5, "wer": 1.0, "cer": 0.5,
        "bits_per_byte": None, "best_bits_per_byte": None,
        "best_wer": 0.75, "best_epoch": 1, "sparsity": 0.97, "compression_ratio": 37.5,
        "sent_bytes": 230, "dense_bytes": 500, "sent_of_dense": 0.46,
    }  # fmt: skip


def test_the_error_of_text_is_bits_a_byte() -> None:
    bits = [{"kind": "epoch", "epoch": i, "bits_per_byte": value} for i, value in enumerate((3.0, 2.0, None, 2.5))]
    summary = summary_of(Run(bits))
    assert (summary["bits_per_byte"], summary["best_bits_per_byte"], summary["best_epoch"]) == (2.5, 2.0, 1)
    assert (summary["wer"], summary["best_wer"]) == (None, None)


def test_nothing_is_known_of_nothing() -> None:
    summary = summary_of(Run())
    assert {name for name, value in summary.items() if value == 0} >= {"steps", "epochs", "sent_bytes", "dense_bytes"}
    unknown = ("train_loss", "val_loss", "wer", "best_wer", "sparsity", "compression_ratio", "sent_of_dense")
    assert [summary[name] for name in unknown] == [None] * 7
    assert summary["seconds_per_step"] == {"dense": None, "sparse": None}
    assert [finite(value) for value in (1.5, 0.0, None, math.nan, math.inf, -math.inf)] == [1.5, 0.0] + 4 * [None]


FIGURES = st.none() | st.floats(0, 1e9)
PHASES = st.sampled_from(["dense", "sparse"])
STEPS = st.builds(step, phase=PHASES, skipped=st.booleans(), sparsity=st.floats(0, 1), compression_ratio=FIGURES)


@given(st.lists(STEPS | st.builds(epoch, st.just(0), FIGURES, FIGURES, FIGURES)))
def test_no_figure_is_nan_and_none_is_better_than_the_best(records: list[Record]) -> None:
    summary = summary_of(Run(records))
    json.dumps(summary, allow_nan=False)
    assert summary["dense_steps"] + summary["sparse_steps"] == summary["steps"] >= summary["skipped_steps"]
    assert summary["best_wer"] is None or summary["best_wer"] <= summary["wer"]
    assert summary["sparsity"] is None or 0 <= summary["sparsity"] <= 1
