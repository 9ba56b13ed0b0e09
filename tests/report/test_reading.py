"""A file that is being written, cut off, of another version, empty or of a failed run: a report of it, and a banner."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk import JsonlSink, StepRecord
from oktopk.errors import SettingError
from oktopk.report.report import RunReport, as_json, make_report
from oktopk.telemetry.reader import read_records
from oktopk.telemetry.run import load_run
from tests.commands import invoke
from tests.report.synthetic import Record, make_event, make_run


def text_of(records: list[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


RECORDS = make_run(steps=6, dense_steps=2, steps_per_epoch=3)
STEPS = [record for record in RECORDS if record["kind"] == "step"]
TEXT = text_of(RECORDS)


def report_of(folder: Path, content: str | bytes | list[Record], name: str = "metrics.jsonl") -> RunReport:
    content = text_of(content) if isinstance(content, list) else content
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    made = make_report([load_run(folder / name)])
    json.dumps(as_json(made), allow_nan=False)
    return made.runs[0]


def banners(report: RunReport) -> str:
    return " ".join(f"{note.level}: {note.text}" for note in report.notes)


@given(st.integers(0, len(TEXT) - 1))
def test_cut_off_anywhere_it_is_what_is_there(tmp_path: Path, kept: int) -> None:
    report = report_of(tmp_path, TEXT[:kept])
    whole = [json.loads(line) for line in TEXT[:kept].split("\n")[:-1]]
    last = TEXT[:kept].rpartition("\n")[2]
    cut = bool(last) and TEXT[kept] != "\n"
    whole += [json.loads(last)] if last and not cut else []
    assert report.run.num_steps == sum(record["kind"] == "step" for record in whole)
    assert ("ends amid a line" in banners(report)) == cut
    assert report.run.state == (
        "ended" if report.run.num_steps == 6 else "running" if kept >= len(FIRST) - 1 else "unfinished"
    )
    assert bool(report.notes) == (cut or report.run.num_steps < 6)


FIRST, *REST = TEXT.splitlines(keepends=True)
LEFT_OUT = "warning: Left out, being no records"
NOISE = random.Random(1).randbytes(2000)
FAILED = make_event("failed", 0, "ended by a <b>flood</b>")
LATER = [{**RECORDS[0], "version": 2}, {"kind": "wonder", "of": "the future"}, *RECORDS[1:]]


@pytest.mark.parametrize(("content", "steps", "state", "banner"), [
    (RECORDS, 6, "ended", ""),
    *((text, 0, "unfinished", "warning: The file holds no record yet") for text in ("", " \n\n", "null\n", "\0\0")),
    (f"{FIRST}garbage\n[1]\n{''.join(REST)}\xff\xfe\n", 6, "ended", f"{LEFT_OUT}: 3 lines (2, 3, 14)"),
    (NOISE + b"\n" + TEXT.encode(), 6, "ended", LEFT_OUT),
    ([*RECORDS[:-3], FAILED], 5, "failed", "error: The run failed after 5 of 6 steps: ended by a <b>flood</b>"),
    ([RECORDS[0], FAILED, *RECORDS[1:]], 6, "ended", ""),
    ([RECORDS[0], FAILED, *RECORDS[1:4]], 3, "running", "info: The run is still going on: 3 of 6 steps so far"),
    ([*RECORDS[:4], make_event("stopped", 3, "")], 3, "stopped", "warning: The run was stopped by Ctrl-C after 3 of 6"),
    ([*RECORDS, *RECORDS], 12, "ended", "warning: Step numbers repeat"),
    (make_run(steps=6, dense_steps=2, skipped=(3, 4)), 6, "ended", "warning: Skipped 2 steps"),
    (make_run(steps=6, dense_steps=6), 6, "ended", "info: No step was sparse: compression was not active"),
    (LATER, 6, "ended", "warning: The file is of version 2, this report knows version 1"),
])  # fmt: skip
def test_its_state_and_its_banner(tmp_path: Path, content: Any, steps: int, state: str, banner: str) -> None:
    report = report_of(tmp_path, content)
    assert (report.run.num_steps, report.run.state) == (steps, state)
    assert banners(report).startswith(banner)
    assert bool(banner) == bool(report.notes)
    assert steps or all(card.value in (None, 0) for card in report.cards)


def test_an_earlier_version_lacks_what_it_lacks(tmp_path: Path) -> None:
    """As runs were recorded before there was a report."""
    new = {"collectives", "world_size", "dense_tail_numel", "nnz_by_owner", "residual_norm", "sparse_numel"}
    kept = [{name: value for name, value in record.items() if name not in new} for record in RECORDS[:-1]]
    old: list[Record] = json.loads(json.dumps(kept))
    for rank in (rank for record in old for rank in record.get("ranks", [])):
        for name in ("messages", "residual_norm", "seconds", "sent_by_phase"):
            rank.pop(name)
    report = report_of(tmp_path, old)
    assert report.run.state == "ended"
    assert "has no phases of every rank and no message sizes: an earlier version" in banners(report)
    bytes_sent = {row[0]: row[1] for row in report.table("bytes").rows}
    assert bytes_sent["all that was sent"] == sum(step["sent_bytes"] for step in STEPS)
    assert bytes_sent["the bound 5k(P-1)/P, sparse steps"] is None
    assert report.table("messages").rows == report.table("regions").rows == []
    assert report.table("ranks").rows[1][3] is None


def test_what_a_jsonl_sink_wrote(tmp_path: Path) -> None:
    """A DDP script's own file, of steps and losses: cards, charts and series without figures are left out."""
    figures: dict[str, Any] = {
        "phase": "sparse", "numel": 100, "wanted": 10, "selected": 9, "nnz": 8, "sparsity": 0.92, "world_size": 2,
        "compression_ratio": 12.5, "nominal_bytes": 64, "sent_bytes": 50, "received_bytes": 50, "messages": 1,
        "seconds": {"select": 0.1, "exchange": 0.3}, "sent_by_phase": {"exchange": 50}, "dense_tail_numel": 0,
    }  # fmt: skip
    sink = JsonlSink(tmp_path / "written.jsonl")
    for number in range(3):
        sink.write(StepRecord(step=number, **figures))
        sink.log({"kind": "log", "step": number, "figures": {"loss": 3.0 - number}})
    sink.close()
    report = report_of(tmp_path, (tmp_path / "written.jsonl").read_text(), "mine.jsonl")
    assert report.run.name == "mine"
    cards = {card.name: card.value for card in report.cards}
    assert (cards["steps"], cards["sent, of dense"]) == (3, 150 / (3 * 400))
    assert None not in cards.values()
    charts = {chart.name: chart for charts in report.charts.values() for chart in charts}
    assert charts.keys() >= {"bytes", "phases", "communication"}
    assert [series.name for group in charts["loss"].groups for series in group.series] == ["loss"]
    assert "settings are not known" in banners(report)


def test_a_file_that_several_ranks_wrote_is_told(tmp_path: Path) -> None:
    header, *steps = RECORDS[:4]
    mixed = [{**header, "rank": 0}, {**header, "rank": 1}, *steps, *steps]
    report = report_of(tmp_path, "".join(json.dumps(each) + "\n" for each in mixed))
    assert "give each rank a file of its own" in banners(report)


THINGS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)


@given(st.data())
def test_whatever_stands_in_a_field_there_is_a_report(tmp_path: Path, data: st.DataObject) -> None:
    broken: list[Record] = json.loads(json.dumps(RECORDS[:5]))
    for _ in range(3):
        record = data.draw(st.sampled_from(broken))
        record[data.draw(st.sampled_from([key for key in record if key != "kind"]))] = data.draw(THINGS)
    report = report_of(tmp_path, broken)
    assert report.run.num_steps == sum(record["kind"] == "step" for record in broken)


def test_numbers_that_nobody_measured_are_none(tmp_path: Path) -> None:
    broken: list[Record] = json.loads(json.dumps(RECORDS))
    for i, value in enumerate((float("nan"), float("inf"), 1e308, -1e308, 10**400, "7")):
        broken[1 + i] |= {"sent_bytes": value, "loss": value}
        for made in broken[1 + i].get("collectives", {}).values():
            made["sizes"].append([10**400, 1])
    report = report_of(tmp_path, broken)
    known = [record["sent_bytes"] for record in broken[7:] if record["kind"] == "step"]
    assert report.table("bytes").rows[-3][1] == sum(known)


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_run_that_is_not_there(tmp_path: Path, command: str) -> None:
    assert list(read_records(tmp_path / "none.jsonl")) == []
    with pytest.raises(SettingError, match="wanted a run's folder"):
        load_run(tmp_path)
    invoked = invoke(command, str(tmp_path / "none" / "at-all"))
    assert invoked.exit_code == 2
    assert "wanted a run's folder or its metrics.jsonl" in invoked.stderr
    assert "Traceback" not in invoked.output
