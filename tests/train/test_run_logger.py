"""The records that a run leaves: none is counted twice, and a full disk is an error that names the file."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from oktopk.telemetry.reader import Record, read_records
from oktopk.telemetry.schema import EpochRecord, TrainStep
from oktopk.train.run_logger import RunLogger, forget_from
from oktopk.train.rundir import RunDir, RunError, write_text
from tests.report.synthetic import make_epoch, make_step


def step(number: int) -> Record:
    return make_step(random.Random(number), number, 2, False, False, 100, 0)


def epoch(number: int) -> Record:
    return make_epoch(random.Random(number), number, 2 * number + 2)


def test_records_made_again_are_forgotten(tmp_path: Path) -> None:
    """Resumed at step 5, amid the third epoch of two steps each; an epoch that a limit cut short is made again."""
    path = tmp_path / "metrics.jsonl"
    event = {"kind": "event", "event": "warning", "message": ""}
    kept = [
        {"kind": "run"}, {**event, "step": 0}, step(0), step(1), epoch(0), step(2), step(3), epoch(1), step(4),
    ]  # fmt: skip
    again = [{**event, "step": 5}, step(5), {**epoch(2), "step": 5}, step(6)]
    path.write_text("\n".join(map(json.dumps, [*kept, *again])) + '\n{"kind": "st')
    for _ in range(2):
        forget_from(path, 5, 2)
        assert list(read_records(path)) == kept


def test_a_start_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    """The workers are started again before there was a checkpoint: no step may be counted twice."""
    run = RunDir(tmp_path)
    run.logs.mkdir()
    for _ in range(2):
        run_logger = RunLogger(run, 0)
        run_logger.start(workers=2)
        run_logger.write(TrainStep(**step(0)))
        run_logger.write(EpochRecord(**epoch(0)))
        run_logger.close()
    assert [record["kind"] for record in read_records(run.metrics)] == ["run", "step", "epoch"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics = Path("/dev/full")
    run_logger = RunLogger(run, 0)
    with pytest.raises(RunError, match=r"cannot write /dev/full: No space left on device; make room"):
        run_logger.write(TrainStep(**step(0)))
    run_logger.close()


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
