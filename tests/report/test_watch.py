"""`oktopk watch`: what is there now, and what comes."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from oktopk.cli.root import app
from oktopk.report.watch import Watched, follow, view
from tests.report.synthetic import make_run, write_run

RECORDS = make_run(steps=12, dense_steps=4)


def told(run: object) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(view(run))  # type: ignore[arg-type]
    return console.export_text()


def test_one_look(tmp_path: Path) -> None:
    invoked = CliRunner().invoke(app, ["watch", str(write_run(tmp_path / "mine", RECORDS))])
    assert invoked.exit_code == 0, invoked.output
    steps = [record for record in RECORDS if record["kind"] == "step"]
    assert "mine: ended" in invoked.stdout
    assert "step 12 of 12" in invoked.stdout
    loss = sum(step["loss"] for step in steps) / 12
    assert f"{loss:.4g}" in invoked.stdout
    assert f"{sum(step['sent_bytes'] for step in steps) / 1e6:.3g} MB so far" in invoked.stdout


def test_added_records_are_taken_and_a_resumed_run_is_read_anew(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert "no record yet" in told(watched.look())
    write_run(tmp_path, RECORDS[:5])
    assert "step 4 of 12" in told(watched.look())
    with (tmp_path / "metrics.jsonl").open("a") as file:
        line = json.dumps(RECORDS[5]) + "\n"
        file.write(line[:40])
        file.flush()
        assert watched.look().num_steps == 4
        file.write(line[40:])
    assert watched.look().num_steps == 5
    (write_run(tmp_path / "anew", RECORDS[:3]) / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")
    assert watched.look().num_steps == 2


def test_it_follows_to_the_end(tmp_path: Path) -> None:
    write_run(tmp_path, RECORDS[:3])

    def write() -> None:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            for record in RECORDS[3:]:
                time.sleep(0.005)
                file.write(json.dumps(record) + "\n")
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    run = follow(tmp_path, Console(file=io.StringIO()), every_s=0.01)
    writer.join()
    assert (run.num_steps, run.state) == (12, "ended")


def test_it_stops_at_a_failure(tmp_path: Path) -> None:
    failed = [*RECORDS[:5], {"kind": "event", "event": "failed", "step": 4, "message": "a flood"}]
    run = follow(write_run(tmp_path, failed), Console(file=io.StringIO()), every_s=0.01)
    assert run.state == "failed"
    assert "a flood" in told(run)
