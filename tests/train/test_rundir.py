import json
import os
import random
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import SettingError
from oktopk.telemetry.reader import read_records
from oktopk.telemetry.schema import EpochRecord, TrainStep
from oktopk.train.config import Config
from oktopk.train.rundir import RunDir, RunError, RunLogger, forget_from, write_text
from tests.report.synthetic import make_epoch, make_step


@given(st.floats(1e-9, 1e3), st.integers(1, 10**6), st.booleans(), st.text(max_size=20))
def test_a_written_config_is_read_again(tmp_path, lr, epochs, augment, folder):
    config = Config(lr=lr, max_epochs=epochs, augment=augment, data_dir=folder, compressor="gtopk")
    RunDir(tmp_path).write_config(config)
    assert RunDir.open(tmp_path).load_config() == config


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"lr": 0.1', '{"lr": 0}'])
def test_a_file_that_is_no_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingError, match=rf"{tmp_path}/config\.json is no config of a run"):
        RunDir.open(tmp_path).load_config()


def test_a_name_again_gets_a_number(tmp_path):
    made = [RunDir.create(tmp_path, "a", Config()).path.name for _ in range(3)]
    assert made == ["a", "a-2", "a-3"]


step = partial(make_step, random.Random(0), ranks=2, sparse=False, skipped=False, k=100, epoch=0)


def epoch(number):
    return make_epoch(random.Random(number), number, 2 * number + 2)


def test_records_made_again_are_forgotten(tmp_path):
    """Resumed at step 5, amid the third epoch of two steps each; an epoch that a limit cut short is made again."""
    path = tmp_path / "metrics.jsonl"
    event = {"kind": "event", "event": "warning", "message": ""}
    kept = [{"kind": "run"}, {**event, "step": 0}, step(0), step(1), epoch(0), step(2), step(3), epoch(1), step(4)]
    again = [{**event, "step": 5}, step(5), {**epoch(2), "step": 5}, step(6)]
    path.write_text("\n".join(map(json.dumps, [*kept, *again])) + '\n{"kind": "st')
    for _ in range(2):
        forget_from(path, 5, 2)
        assert list(read_records(path)) == kept


def test_a_start_that_was_killed_is_forgotten(tmp_path):
    """The workers are started again before there was a checkpoint: no step may be counted twice."""
    run = RunDir(tmp_path)
    run.logs.mkdir()
    for _ in range(2):
        with closing(RunLogger(run, 0)) as run_logger:
            run_logger.start(workers=2)
            run_logger.event("warning", 0, "no step will be sparse")
            run_logger.write(TrainStep(**step(0)))
            run_logger.write(EpochRecord(**epoch(0)))
    lines = run.metrics.read_text().splitlines()  # each is a record, without a blank line
    assert [json.loads(line)["kind"] for line in lines] == ["run", "event", "step", "epoch"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_with_the_files_name(tmp_path):
    run = RunDir(tmp_path)
    run.metrics, said = Path("/dev/full"), "cannot write /dev/full: No space left on device; make room"
    with closing(RunLogger(run, 0)) as run_logger, pytest.raises(RunError, match=said):
        run_logger.write(TrainStep(**step(0)))


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "last"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(RunError, match=r"cannot write .*/last: No space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
