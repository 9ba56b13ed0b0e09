"""`oktopk watch`: the records that are there, and those that come."""

import io
import json
import os
import threading
import time
from pathlib import Path

from rich.console import Console

from oktopk.report.watch import follow, looks, view
from oktopk.telemetry.format import format_value
from oktopk.telemetry.run import Run
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import JsonlSink
from tests.commands import invoke
from tests.report.synthetic import make_event, make_run, write_run

RECORDS = make_run(steps=12, dense_steps=4)
STEPS = [record for record in RECORDS if record["kind"] == "step"]


def told(run: Run) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view(run))
    return console.export_text()


def test_one_look(tmp_path: Path) -> None:
    invoked = invoke("watch", str(write_run(tmp_path / "mine", RECORDS)))
    assert invoked.exit_code == 0, invoked.output
    loss = f"{sum(step['loss'] for step in STEPS) / 12:.4g}"
    sent = f"{sum(step['sent_bytes'] for step in STEPS) / 1e6:.3g} MB so far"
    assert all(text in invoked.stdout for text in ("mine: ended", "step 12 of 12", loss, sent))


def test_added_records_are_taken_and_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    looking = looks(tmp_path)
    assert "no record yet" in told(next(looking))
    write_run(tmp_path, RECORDS[:5])
    assert all(text in told(next(looking)) for text in ("step 4 of 12", ": running"))
    os.utime(tmp_path / "metrics.jsonl", (0, 0))
    assert all(text in told(next(looking)) for text in (": unfinished", "The run was killed"))
    rest = "".join(json.dumps(record) + "\n" for record in RECORDS[5:])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for cut, steps in ((rest[:40], 4), (rest[40:2000], None), (rest[2000:], 12)):
            file.write(cut)
            file.flush()
            assert next(looking).num_steps == steps or steps is None
    run = next(looking)
    assert (run.state, run.bad_lines, run.steps.tolist()) == ("ended", [], list(range(12)))
    (write_run(tmp_path / "anew", RECORDS[:3]) / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")
    assert next(looking).num_steps == 2


def test_figures_of_now_are_of_one_phase_and_a_run_that_stopped_has_no_time_left() -> None:
    records = [RECORDS[0], *STEPS[:6]]  # four dense steps and two sparse ones
    shown = told(Run(records, "mine"))
    sent = sum(step["sent_bytes"] for step in STEPS[4:6]) / 2
    assert f"{format_value(sent, 'bytes')} a step" in shown
    assert " left" in shown
    assert " left" not in told(Run([*records, make_event("stopped", 6, "Ctrl-C")], "mine"))


def test_a_scripts_record_is_shown_without_figures_that_it_has_not(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for number in range(3):
        sink.write(StepRecord(step=number, phase="sparse", numel=100, wanted=10, selected=9, nnz=8, sparsity=0.92,
                              compression_ratio=12.5, nominal_bytes=64, sent_bytes=50, received_bytes=50, messages=1,
                              seconds={}, sent_by_phase={"exchange": 50}, world_size=2, step_seconds=0.25))  # fmt: skip
    sink.close()
    shown = told(next(looks(tmp_path)))
    assert "250 ms a step " in shown
    assert not any(word in shown for word in ("n/a", "validation", "loss", "verdict"))


def test_it_follows_to_the_end_and_stops_at_a_failure(tmp_path: Path) -> None:
    def write() -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for record in RECORDS[3:]:
                time.sleep(0.005)
                file.write(json.dumps(record) + "\n")
                file.flush()

    write_run(tmp_path, RECORDS[:3])
    writer = threading.Thread(target=write)
    writer.start()
    run = follow(tmp_path, Console(file=io.StringIO()), every_s=0.01)
    writer.join()
    assert (run.num_steps, run.state) == (12, "ended")
    write_run(tmp_path, [*RECORDS[:5], make_event("failed", 4, "a flood")])
    run = follow(tmp_path, Console(file=io.StringIO()), every_s=0.01)
    assert run.state == "failed"
    assert "a flood" in told(run)
