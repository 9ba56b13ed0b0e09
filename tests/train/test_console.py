"""The progress line on terminals of several widths."""

import io
from types import SimpleNamespace

import pytest
import rich.console

from oktopk.train.console import Console, end_table

STEP = SimpleNamespace(
    epoch=0, step=0, loss=123.4, phase="sparse", sent_bytes=99_000, utterances=16,
    split={"data": 0.1, "compute": 0.5, "wait": 0.2, "update": 0.1},
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_progress_line_keeps_bar_count_and_the_runs_time_left(width, monkeypatch):
    monkeypatch.setattr("oktopk.train.console._figure", lambda _, name: f"{name} 123.4")
    console = Console(0, epochs=14, steps=1448)
    console.progress.start_task(console._task)
    console.begin_epoch(0, 32, 1000)
    for _ in range(3):
        console.step(STEP)
    out = rich.console.Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    out.print(console.progress.make_tasks_table(console.progress.tasks))
    (line,) = out.file.getvalue().splitlines()
    assert len(line) <= width
    assert "━" * 8 in line
    assert "1003/1448" in line
    assert ":" in line.split("1003/1448")[1][:9]
    assert "epoch 1/14" in line
    assert ("utt/s" in line) == (width == 100)


SUMMARY = {
    "first_loss": 9.0, "train_loss": 9.0, "val_loss": 8.0, "wer": 1.0, "cer": 0.5, "best_wer": 1.0, "epochs": 1,
    "bits_per_byte": None, "steps": 1, "sparse_steps": 0, "skipped_steps": 0, "sparsity": None,
    "compression_ratio": None, "verdict": None, "sent_bytes": 4e6, "dense_bytes": 4e6, "sent_of_dense": 1.0,
    "sent_bytes_per_step": {"dense": 4e6, "sparse": None},
    "seconds": {"data": 0.1, "compute": 1.0}, "seconds_per_step": {"dense": 0.15, "sparse": None},
}  # fmt: skip


def rows_of(**figures):
    table = end_table(SUMMARY | figures, 2, is_dense="sparse_steps" not in figures)
    return dict(zip(*(column.cells for column in table.columns), strict=True))


def test_the_end_of_a_dense_run_does_not_speak_of_sparse_steps():
    rows = rows_of()
    assert (rows["steps"], rows["bytes sent"]) == ("1, all dense", "4 MB by rank 0")
    assert rows["a step took"] == "150 ms dense (median), on 2 workers"
    assert not any("sparse" in text or "n/a" in text for text in [*rows, *rows.values()])


def test_the_end_of_a_sparse_run_has_its_bytes_and_verdict():
    per_step = {
        "sent_bytes_per_step": {"dense": 4e6, "sparse": 1e6},
        "seconds_per_step": {"dense": 0.15, "sparse": 0.1},
    }
    rows = rows_of(steps=4, dense_bytes=16e6, sent_of_dense=0.44, sparse_steps=3, verdict="it pays", **per_step)
    assert rows["steps"] == "compression was active on 3 of 4 steps"
    assert "44 % of the 16 MB" in rows["bytes sent"]
    assert "a sparse step 25 % of a dense one" in rows["bytes sent"]
    assert (rows["verdict"], rows["a step took"]) == ("it pays", "150 ms dense, 100 ms sparse (median), on 2 workers")
