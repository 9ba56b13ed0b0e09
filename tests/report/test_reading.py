"""A file that is being written, cut off, of another version, empty or of a failed run: what is there, and a banner."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from oktopk import JsonlSink, StepRecord
from oktopk.cli.root import app
from oktopk.report.report import RunReport, as_json, make_report
from oktopk.telemetry.reader import MetricsReader, NoRunError, read_records
from oktopk.telemetry.run import load_run
from tests.report.synthetic import Record, make_run, write_run

RECORDS = make_run(steps=6, dense_steps=2, steps_per_epoch=3)
TEXT = "".join(json.dumps(record) + "\n" for record in RECORDS)


def report_of(path: Path) -> RunReport:
    made = make_report([load_run(path)])
    json.dumps(as_json(made), allow_nan=False)
    return made.runs[0]


def report_of_text(folder: Path, text: str | bytes) -> RunReport:
    (folder / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return report_of(folder)


def banners(report: RunReport) -> str:
    return " ".join(f"{note.level}: {note.text}" for note in report.notes)


def test_a_run_that_reached_its_end_needs_no_banner(tmp_path: Path) -> None:
    report = report_of_text(tmp_path, TEXT)
    assert (report.run.state, report.notes) == ("ended", [])


@given(st.integers(0, len(TEXT) - 1))
def test_cut_off_anywhere_it_is_what_is_there(tmp_path: Path, kept: int) -> None:
    report = report_of_text(tmp_path, TEXT[:kept])
    whole = [json.loads(line) for line in TEXT[:kept].split("\n")[:-1]]
    last = TEXT[:kept].rpartition("\n")[2]
    cut = bool(last) and TEXT[kept] != "\n"
    whole += [json.loads(last)] if last and not cut else []
    assert report.run.num_steps == sum(record["kind"] == "step" for record in whole)
    assert ("ends amid a line" in banners(report)) == cut
    assert report.run.state == ("unfinished" if report.run.num_steps < 6 else "ended")
    assert report.notes


def test_empty(tmp_path: Path) -> None:
    for text in ("", "\n", " \n\n"):
        report = report_of_text(tmp_path, text)
        assert "no record yet" in banners(report)
        assert all(card.value in (None, 0) for card in report.cards)


def test_lines_that_are_no_records_are_named(tmp_path: Path) -> None:
    first, *rest = TEXT.splitlines(keepends=True)
    report = report_of_text(tmp_path, first + "garbage\n[1]\n" + "".join(rest) + "\xff\xfe\n")
    assert report.run.num_steps == 6
    assert "3 lines (2, 3, 14)" in banners(report)
    report = report_of_text(tmp_path, random.Random(1).randbytes(2000) + b"\n" + TEXT.encode())
    assert report.run.num_steps == 6
    assert "no records" in banners(report)
    for text in ("null\n", "{}\n", "\0\0\0"):
        assert report_of_text(tmp_path, text).run.num_steps == 0


def test_a_later_version_is_named(tmp_path: Path) -> None:
    header, *rest = RECORDS
    later = [{**header, "version": 2}, {"kind": "wonder", "of": "the future"}, *rest]
    report = report_of(write_run(tmp_path, later))
    assert "version 2, this report knows version 1" in banners(report)
    assert report.run.num_steps == 6


def test_an_earlier_version_lacks_what_it_lacks(tmp_path: Path) -> None:
    """As runs were recorded before there was a report."""
    old = json.loads(json.dumps(RECORDS))
    for record in (record for record in old if record["kind"] == "step"):
        for name in ("collectives", "world_size", "dense_tail_numel", "nnz_by_owner", "residual_norm"):
            del record[name]
        for rank in record["ranks"]:
            for name in ("messages", "residual_norm", "seconds", "sent_by_phase"):
                del rank[name]
    del old[0]["sparse_numel"], old[-1]
    report = report_of(write_run(tmp_path, old))
    assert report.run.state == "ended"
    assert "has no phases of every rank and no message sizes: an earlier version" in banners(report)
    bytes_sent = {row[0]: row[1] for row in report.table("bytes").rows}
    assert bytes_sent["all that was sent"] == sum(r["sent_bytes"] for r in RECORDS if r["kind"] == "step")
    assert bytes_sent["the bound 6k(P-1)/P, sparse steps"] is None
    assert report.table("messages").rows == report.table("regions").rows == []
    assert report.table("ranks").rows[1][3] is None


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    failed = [*RECORDS[:-3], {"kind": "event", "event": "failed", "step": 4, "message": "ended by a <b>flood</b>"}]
    report = report_of(write_run(tmp_path, failed))
    assert report.run.state == "failed"
    assert report.notes[0].level == "error"
    assert "of 6 steps: ended by a <b>flood</b>" in report.notes[0].text


def test_the_end_of_a_run_skipped_steps_and_repeated_ones_are_told(tmp_path: Path) -> None:
    failed = {"kind": "event", "event": "failed", "step": 0, "message": "no luck"}
    assert report_of(write_run(tmp_path, [RECORDS[0], failed, *RECORDS[1:]])).run.state == "ended"
    assert report_of(write_run(tmp_path, [RECORDS[0], failed, *RECORDS[1:4]])).run.state == "unfinished"
    for records, banner in (
        ([*RECORDS, *RECORDS], "Step numbers repeat"),
        (make_run(steps=6, dense_steps=2, skipped=(3, 4)), "2 steps were skipped"),
        (make_run(steps=6, dense_steps=6), "compression was not active"),
    ):
        assert banner in banners(report_of(write_run(tmp_path, records)))


def test_what_a_jsonl_sink_wrote(tmp_path: Path) -> None:
    """A DDP script's own file: steps alone, no losses."""
    sink = JsonlSink(tmp_path / "mine.jsonl")
    for number in range(3):
        sink.write(
            StepRecord(
                step=number, phase="sparse", numel=100, wanted=10, selected=9, nnz=8, sparsity=0.92, world_size=2,
                compression_ratio=12.5, nominal_bytes=64, sent_bytes=50, received_bytes=50, messages=1,
                seconds={"select": 0.1, "exchange": 0.3}, sent_by_phase={"exchange": 50}, dense_tail_numel=0,
            )
        )  # fmt: skip
    sink.close()
    report = report_of(tmp_path / "mine.jsonl")
    assert report.run.name == "mine"
    cards = {card.name: card.value for card in report.cards}
    assert (cards["steps"], cards["train loss"]) == (3, None)
    assert cards["sent, of dense"] == 150 / (3 * 400)
    assert {chart.name for charts in report.charts.values() for chart in charts} >= {"bytes", "phases", "communication"}
    assert "settings are not known" in banners(report)


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
    report = report_of_text(tmp_path, "".join(json.dumps(record) + "\n" for record in broken))
    assert report.run.num_steps == sum(record["kind"] == "step" for record in broken)


def test_numbers_that_nobody_measured_are_none(tmp_path: Path) -> None:
    broken: list[Record] = json.loads(json.dumps(RECORDS))
    for i, value in enumerate((float("nan"), float("inf"), 1e308, -1e308, 10**400, "7")):
        broken[1 + i] |= {"sent_bytes": value, "loss": value}
        for made in broken[1 + i].get("collectives", {}).values():
            made["sizes"].append([10**400, 1])
    report = report_of(write_run(tmp_path, broken))
    known = [record["sent_bytes"] for record in broken[7:] if record["kind"] == "step"]
    assert report.table("bytes").rows[-3][1] == sum(known)
    assert report.table("phases").rows


def test_a_reader_takes_added_records_and_reads_a_file_written_anew_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(TEXT[:100])
    reader, found = MetricsReader(path), list[Any]()
    for end in (100, 1500, 1501, 4000, len(TEXT)):
        path.write_text(TEXT[:end])
        assert not reader.has_begun_again()
        found += reader.new()
    assert found == RECORDS
    anew = tmp_path / "anew"
    anew.write_text(TEXT[:3000])
    anew.replace(path)
    assert reader.has_begun_again()
    assert list(reader.new()) == list(read_records(path))
    assert list(read_records(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_run_that_is_not_there(tmp_path: Path, command: str) -> None:
    with pytest.raises(NoRunError, match="wanted a run's folder"):
        load_run(tmp_path)
    invoked = CliRunner().invoke(app, [command, str(tmp_path / "none" / "at-all")])
    assert invoked.exit_code == 2
    assert "wanted a run's folder or its metrics.jsonl" in invoked.stderr
    assert "Traceback" not in invoked.output
