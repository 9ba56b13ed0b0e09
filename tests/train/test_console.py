"""The progress line on terminals of several widths."""

import io
from types import SimpleNamespace

import pytest
import rich.console

from oktopk.train.console import Console

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
