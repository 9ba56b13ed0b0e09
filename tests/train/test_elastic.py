"""Runs whose members come and go: the data in exact order whatever the membership, kills, joining, and refusals."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import SettingError, StateError
from oktopk.telemetry.reader import read_records
from oktopk.train import checkpoint
from oktopk.train.config import make_config
from oktopk.train.data.loader import Batches
from oktopk.train.data.manifest import Utterance
from oktopk.train.data.text import Windows
from oktopk.train.elastic import elastic_part, share_of
from oktopk.train.folder import FolderRecords, give_number
from oktopk.train.rundir import RunDir
from oktopk.train.supervisor import bounds_of, check_possible

SMALL = ("--batch-size", "2", "--dense-steps", "3", "--set", "utterances=49", "--set", "val_utterances=4")
SMALL += ("--set", "grammar=commands")


@given(
    total=st.integers(1, 200),
    each=st.integers(1, 8),
    memberships=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20),
)
def test_every_sample_of_an_epoch_comes_once_whatever_the_membership(total, each, memberships):
    seen, cursor, turn = Counter(), 0, 0
    while cursor < total:
        size, commits = memberships[turn % len(memberships)]
        turn += 1
        shares = [share_of(total - cursor, each, size, rank) for rank in range(size)]
        assert len({count for count, _ in shares}) == 1
        assert all(len(mine) <= each for _, mine in shares)
        if commits or turn > 3 * len(memberships) + total:  # an uncommitted step takes the same samples again
            seen.update(cursor + i for _, mine in shares for i in mine)
            cursor += shares[0][0]
    assert seen == Counter(range(total))


def test_an_epochs_order_has_every_sample_once_and_knows_no_ranks(tmp_path):
    utterances = [Utterance(tmp_path / f"{i}.wav", "a", 1.0 + i % 7) for i in range(23)]
    orders = [
        Batches(utterances, batch_size=4, world_size=size, rank=rank, seed=5).order(2)
        for size, rank in ((1, 0), (2, 1), (3, 0))
    ]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == list(range(23))
    assert orders[0] != Batches(utterances, batch_size=4, seed=5).order(3)
    windows = Windows(torch.arange(900) % 251, context=8, samples=30, batch_size=2, seed=1)
    parts = [windows.batch(1, [*windows.order(1)][at : at + 5]).texts for at in range(0, 30, 5)]
    assert torch.equal(torch.cat(parts), torch.cat([each.texts for each in windows.epoch(1)]))


def test_what_cannot_run_is_refused(tmp_path):
    for text in ("2", "0:3", "4:2", "a:b"):
        with pytest.raises(SettingError, match="such as 2:4, not"):
            bounds_of(text)
    with pytest.raises(SettingError, match=r"--nproc 5 is more than --elastic 2:4 allows|oktopk\[torchft\]"):
        check_possible(make_config({}), bounds_of("2:4"), 5)
    for name, value in {"local_steps": 30, "clip_place": "local", "precision": "bf16", "device": "cuda"}.items():
        with pytest.raises(SettingError, match=f"--elastic cannot have {name} {value}, but "):
            check_possible(make_config({name: value, "dense_steps": 0}), bounds_of("2:4"), 2)
    with pytest.raises(SettingError, match=r"wanted an address as HOST:PORT|oktopk\[torchft\]"):
        check_possible(make_config({}), bounds_of("2:4"), 2, "somewhere")
    run = RunDir.create(tmp_path, "a", make_config({}))
    folder = checkpoint.save_shared(run, 3, {"elastic": {}}, 2)
    with pytest.raises(StateError, match="go on with it with --elastic"):
        checkpoint.load(folder, 0, 2)
    with pytest.raises(StateError, match="a run without --elastic: go on with it without"):
        elastic_part({"trainer": {}}, folder)


def steps_in(run):
    return [record["step"] for record in read_records(run.metrics) if record["kind"] == "step"]


def test_when_the_writer_dies_another_member_goes_on_with_every_step_once(tmp_path):
    run = RunDir.create(tmp_path, "a", make_config({}))
    give_number(run)
    run.metrics.write_text('{"kind": "run", "step": 0}\n')
    writer, other, late = (FolderRecords(run) for _ in range(3))

    def make(step, writing=(), silent=()):
        record = {"kind": "step", "step": step, "epoch": step // 4}
        for member, writes in [*((each, True) for each in writing), *((each, False) for each in silent)]:
            member.add(record, writes=writes)
            if step % 4 == 3:
                member.add({"kind": "epoch", "step": step + 1, "epoch": step // 4}, writes=writes)

    for step in range(14):
        make(step, [writer], [other])
    make(14, [], [other])  # the writer was killed between the step and its record
    make(15, [other])
    with run.metrics.open("a") as file:
        file.write('{"kind": "st')  # and so was the next one
    make(16, [], [late])
    make(17, [late])
    assert steps_in(run) == [*range(16), 16, 17]
    assert [record["epoch"] for record in read_records(run.metrics) if record["kind"] == "epoch"] == [0, 1, 2, 3]
    again = FolderRecords(run)  # all were killed, and went on from the checkpoint of step 9
    make(9, [again])
    assert steps_in(run) == list(range(10))
    assert next(iter(read_records(run.metrics)))["kind"] == "run"
    give_number(run)  # as on --resume: it stays
    elsewhere = RunDir.create(tmp_path, "b", make_config({}))
    give_number(elsewhere)
    assert FolderRecords(elsewhere).number != FolderRecords(run).number == writer.number


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_run_outlives_a_kill_takes_the_member_back_and_leaves_no_utterance_out(tmp_path):
    pytest.importorskip("torchft", reason="oktopk[torchft] is not installed")
    command = [sys.executable, "-m", "oktopk", "train", "--elastic", "1:3", "--nproc", "2", "--max-restarts", "1"]
    command += ["--max-epochs", "2", "--runs", str(tmp_path), "--name", "run", *SMALL]
    metrics, said = tmp_path / "run" / "metrics.jsonl", tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        _wait_for(metrics, lambda steps: any(step["world_size"] == 2 for step in steps), process)
        os.kill(_worker_of(process.pid), signal.SIGKILL)
        assert process.wait(150) == 0, said.read_text()
    finally:
        process.terminate()
        process.wait(20)
    records = list(read_records(metrics))
    steps = [record for record in records if record["kind"] == "step"]
    for epoch in range(2):
        assert sum(step["utterances"] for step in steps if step["epoch"] == epoch) == 49
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert any(record["kind"] == "event" and record["event"] == "members" for record in records)
    assert any(step["lost_mass"] is not None for step in steps)  # the killed one is known to be gone
    assert "was killed by signal 9, and starts again" in said.read_text()
    assert "torchft::" not in said.read_text()  # which tells of each quorum


def _wait_for(path, condition, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None
        if path.exists() and condition([each for each in read_records(path) if each["kind"] == "step"]):
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} did not get there")


def _worker_of(parent):
    """Return a worker that the process started."""
    found = subprocess.run(
        ["pgrep", "-P", str(parent), "-f", "oktopk worker"], capture_output=True, text=True, check=True
    )
    return int(found.stdout.split()[0])
