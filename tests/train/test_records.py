from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.report.reader import Record, read_records
from oktopk.report.summary import finite, mean, summarise
from oktopk.train.records import MetricsFile, forget_from
from oktopk.train.run_logger import RunLogger
from oktopk.train.rundir import RunDir, RunError, write_text


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
        "steps": 5,
        "dense_steps": 2,
        "sparse_steps": 3,
        "skipped_steps": 1,
        "epochs": 4,
        "first_loss": 8.0,
        "train_loss": 4.0,
        "val_loss": 2.5,
        "wer": 1.0,
        "cer": 0.375,
        "best_wer": 0.75,
        "best_epoch": 1,
        "sparsity": 0.97,
        "compression_ratio": 37.5,
        "sent_bytes": 230,
        "dense_bytes": 500,
        "sent_of_dense": 0.46,
    }


def test_nothing_is_known_of_nothing() -> None:
    summary = summarise([])
    assert summary["steps"] == 0
    for name in ("train_loss", "val_loss", "wer", "sparsity", "compression_ratio", "sent_of_dense"):
        assert summary[name] is None
    assert summary["seconds_per_step"] == {"dense": None, "sparse": None}


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


def test_finite() -> None:
    assert [finite(value) for value in (1.5, 0.0, None, math.nan, math.inf, -math.inf)] == [1.5, 0.0] + 4 * [None]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_record_cannot_hold_what_is_not_finite(tmp_path: Path, value: float) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        file.write("step", loss=value)
    file.close()
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_record_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for number in range(3):
        file.write("step", step=number)
        assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == list(range(number + 1))
    file.close()


@given(st.integers(0, 400))
def test_a_file_that_was_cut_off_anywhere_is_read_up_to_there(tmp_path: Path, kept: int) -> None:
    whole = [step(number) for number in range(3)]
    text = "".join(json.dumps(record) + "\n" for record in whole)
    path = tmp_path / "metrics.jsonl"
    path.write_text(text[:kept])
    found = list(read_records(path))
    assert found == whole[: len(found)]
    assert len(found) in (text[:kept].count("\n"), text[:kept].count("\n") + 1)
    summarise(found)


@pytest.mark.parametrize("text", ["", "\n", "null\n", "[1]\n", "{}\n", "\0\0\0", "not json\n"])
def test_files_without_a_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert list(read_records(tmp_path / "metrics.jsonl")) == []
    assert list(read_records(tmp_path / "there-is-none.jsonl")) == []


def test_forget_what_is_made_again(tmp_path: Path) -> None:
    """Resumed at step 5, amid the third epoch of two steps each."""
    path = tmp_path / "metrics.jsonl"
    event = {"kind": "event", "event": "warning", "message": ""}
    kept = [
        {"kind": "run"}, {**event, "step": 0}, step(0), step(1), epoch(0), step(2), step(3), epoch(1), step(4),
    ]  # fmt: skip
    again = [{**event, "step": 5}, step(5), epoch(2), step(6)]
    path.write_text("\n".join(map(json.dumps, [*kept, *again])) + '\n{"kind": "st')
    forget_from(path, 5, 2)
    assert list(read_records(path)) == kept
    forget_from(path, 5, 2)
    assert list(read_records(path)) == kept


def test_an_epoch_that_a_limit_cut_short_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, [step(0), {**epoch(0), "step": 1}])))
    forget_from(path, 1, 0)
    assert [record["kind"] for record in read_records(path)] == ["step"]


def test_a_start_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    """The workers are started again before there was a checkpoint: no step may be counted twice."""
    run = RunDir(tmp_path)
    run.logs.mkdir()
    for _ in range(2):
        run_logger = RunLogger(run, 0)
        run_logger.start(workers=2)
        record = step(0)
        record.pop("kind")
        run_logger.step(**{**record, "lr": 0.1, "grad_norm": 1.0, "selected": 1, "nnz": 1, "threshold": None})
        run_logger.close()
    assert [record["kind"] for record in read_records(run.metrics)] == ["run", "step"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    file = MetricsFile(Path("/dev/full"))
    with pytest.raises(RunError, match=r"cannot write /dev/full: No space left on device; make room"):
        file.write("step", step=0)
    file.close()


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last"
    write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*/last: No space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
