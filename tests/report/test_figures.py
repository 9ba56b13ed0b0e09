"""Every number of the report, computed once more from the raw records, by hand."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oktopk.cli.root import app
from oktopk.report.charts import charts_of, comparison_charts
from oktopk.report.compare import common_goal, comparison_table
from oktopk.report.report import RunReport, as_json, make_report
from oktopk.report.tables import Table, step_table
from oktopk.telemetry.format import format_value
from oktopk.telemetry.run import Run
from tests.report.synthetic import SIDE, SPLIT, Record, make_run, write_run

RECORDS = make_run(steps=30, ranks=3, dense_steps=8, skipped=(12, 20), density_change=25)
STEPS = [record for record in RECORDS if record["kind"] == "step"]
EPOCHS = [record for record in RECORDS if record["kind"] == "epoch"]
PHASES = {phase: [step for step in STEPS if step["phase"] == phase] for phase in ("dense", "sparse")}
HEADER = 16


@pytest.fixture(scope="module")
def report() -> RunReport:
    return make_report([Run.of(RECORDS, "one")]).runs[0]


def rows(table: Table) -> dict[Any, dict[str, Any]]:
    """Return the rows by their first cell."""
    names = [column.name for column in table.columns]
    return {row[0]: dict(zip(names, row, strict=True)) for row in table.rows}


def average(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def seconds_of(step: Record) -> float:
    return sum(step["split"].values())


def test_the_cards(report: RunReport) -> None:
    cards = {card.name: card.value for card in report.cards}
    delivered = [step for step in PHASES["sparse"] if not step["skipped"]]
    sent = sum(step["sent_bytes"] for step in STEPS)
    assert cards == {
        "train loss": EPOCHS[-1]["train_loss"],
        "validation loss": EPOCHS[-1]["val_loss"],
        "WER": EPOCHS[-1]["wer"],
        "steps": 30,
        "sent, of dense": pytest.approx(sent / (30 * RECORDS[0]["dense_bytes"])),
        "compression ratio": pytest.approx(average([step["compression_ratio"] for step in delivered])),
        "dense step": pytest.approx(average([seconds_of(step) for step in PHASES["dense"]])),
        "sparse step": pytest.approx(average([seconds_of(step) for step in PHASES["sparse"]])),
    }
    notes = {card.name: card.note for card in report.cards}
    assert notes["steps"] == "8 dense, 22 sparse, 2 skipped"
    assert f"best {min(epoch['wer'] for epoch in EPOCHS):.4g}" in notes["WER"]
    assert f"{sent / 1e6:.3g} MB" in notes["sent, of dense"]


def test_dense_and_sparse_steps(report: RunReport) -> None:
    for phase, row in rows(report.table("phases")).items():
        steps, dense = PHASES[phase], RECORDS[0]["dense_bytes"]
        kept = [step for step in steps if not step["skipped"]]
        sent, selected = (
            sum(step[name] for step in made) for name, made in (("sent_bytes", steps), ("selected", kept))
        )
        assert row == {
            "phase": phase,
            "steps": len(steps),
            "skipped": len(steps) - len(kept),
            "sparsity": pytest.approx(average([step["sparsity"] for step in kept])),
            "ratio": pytest.approx(average([step["compression_ratio"] for step in kept])),
            "selected / k": pytest.approx(selected / sum(step["wanted"] for step in kept)),
            "sent": sent,
            "sent a step": pytest.approx(sent / len(steps)),
            "of a dense step": pytest.approx(sent / len(steps) / dense),
            "seconds a step": pytest.approx(average([seconds_of(step) for step in steps])),
        }


def part_of(step: Record, part: str) -> int:
    """Return the bytes of a phase without its headers, or all headers."""
    headers = {
        phase: sum(
            min(size, HEADER) * count
            for name, made in step["collectives"].items()
            if name.startswith(phase)
            for size, count in made["sizes"]
        )
        for phase in ("exchange", "gather")
    }
    return sum(headers.values()) if part == "headers" else step["sent_by_phase"].get(part, 0) - headers.get(part, 0)


def bound_of(step: Record) -> float:
    """Return 6k(P-1)/P words, and 2(P-1)/P for what travels dense."""
    return 4 * (6 * (step["wanted"] - SIDE) + 2 * SIDE) * 2 / 3


def test_bytes_by_phase_of_the_algorithm(report: RunReport) -> None:
    table = rows(report.table("bytes"))
    sent = sum(step["sent_bytes"] for step in STEPS)
    parts = ("exchange", "gather", "dense_tail", "agree", "headers")
    for part in parts:
        by_step = {phase: [part_of(step, part) for step in steps] for phase, steps in PHASES.items()}
        assert table[part]["sent"] == sum(map(sum, by_step.values()))
        assert table[part]["share"] == pytest.approx(table[part]["sent"] / sent)
        assert table[part]["a dense step"] == pytest.approx(average(by_step["dense"]))
        assert table[part]["a sparse step"] == pytest.approx(average(by_step["sparse"]))
    assert sum(table[part]["sent"] for part in parts) == table["all that was sent"]["sent"] == sent
    assert table["if every step were dense"]["sent"] == 30 * RECORDS[0]["dense_bytes"]
    bound = table["the bound 6k(P-1)/P, sparse steps"]
    assert bound["a dense step"] is None
    assert bound["a sparse step"] == pytest.approx(average([bound_of(step) for step in PHASES["sparse"]]))


def test_time(report: RunReport) -> None:
    whole = sum(map(seconds_of, STEPS))
    names = {"data": "data", "compute": "forward and backward", "wait": "wait for the exchange", "update": "update"}
    cells = {(row[0], row[1]): row[2:] for row in report.table("time").rows}
    expected = {("training", names[name]): [step["split"][name] for step in STEPS] for name in SPLIT}
    phases = sorted({name for step in STEPS for name in step["seconds"]})
    expected |= {("exchange", name): [step["seconds"].get(name, 0.0) for step in STEPS] for name in phases}
    assert cells.keys() == expected.keys()
    for key, values in expected.items():
        total, share, dense, sparse = cells[key]
        assert total == pytest.approx(sum(values))
        assert share == pytest.approx(sum(values) / whole)
        assert dense == pytest.approx(average(values[:8]))
        assert sparse == pytest.approx(average(values[8:]))


def communication_of(rank: Record) -> tuple[float, float]:
    travels = ("exchange", "gather", "agree", "dense_tail")
    communication = sum(seconds for name, seconds in rank["seconds"].items() if name in travels)
    computing = sum(seconds for name, seconds in rank["seconds"].items() if name not in travels)
    return communication, computing + rank["compute"] + rank["update"]


def test_by_rank(report: RunReport) -> None:
    table = rows(report.table("ranks"))
    sent = [sum(step["ranks"][rank]["sent_bytes"] for step in STEPS) for rank in range(3)]
    for rank, row in enumerate(table.values()):
        figures = [step["ranks"][rank] for step in STEPS]
        communication, computation = map(sum, zip(*map(communication_of, figures), strict=True))
        assert row == {
            "rank": f"rank {rank}",
            "sent": sent[rank],
            "received": sum(each["received_bytes"] for each in figures),
            **{name: sum(each[name] for each in figures) for name in ("messages", "selected")},
            "sent / mean": pytest.approx(3 * sent[rank] / sum(sent)),
            **{name: pytest.approx(sum(each[name] for each in figures)) for name in SPLIT},
            "communication": pytest.approx(communication),
            "computation": pytest.approx(computation),
            "communicating": pytest.approx(communication / (communication + computation)),
        }
    assert len(table) == 3


def test_messages_by_collective(report: RunReport) -> None:
    for phase, collective, calls, count, total, least, median, most in report.table("messages").rows:
        key = f"{phase}/{collective}"
        made = [step["collectives"][key] for step in STEPS if key in step["collectives"]]
        sizes = [size for each in made for size, times in each["sizes"] for _ in range(times)]
        assert calls == sum(each["calls"] for each in made)
        assert (count, total) == (len(sizes), sum(sizes))
        assert (least, median, most) == (min(sizes), statistics.median(sizes), max(sizes))


def test_the_histogram_of_messages_counts_every_message(report: RunReport) -> None:
    chart = next(chart for chart in report.charts["Traffic"] if chart.name == "messages")
    for group in chart.groups:
        (bars,) = group.series
        key = bars.name.replace(": ", "/")
        sizes = Counter[int]()
        for step in STEPS:
            for size, count in step["collectives"].get(key, {"sizes": []})["sizes"]:
                sizes[int(math.log2(size)) + 1] += count
        assert dict(zip(group.x["step"].tolist(), bars.y.tolist(), strict=True)) == {
            place: sizes[int(place)] for place in group.x["step"]
        }


def test_regions(report: RunReport) -> None:
    owned = [sum(step["nnz_by_owner"][owner] for step in STEPS if step["nnz_by_owner"]) for owner in range(3)]
    for owner, row in enumerate(rows(report.table("regions")).values()):
        assert row["delivered"] == owned[owner]
        assert row["share"] == pytest.approx(owned[owner] / sum(owned))
        assert row["delivered / mean"] == pytest.approx(3 * owned[owner] / sum(owned))


def test_epochs(report: RunReport) -> None:
    table = report.table("epochs").rows
    assert len(table) == len(EPOCHS) == 5
    for row, epoch in zip(table, EPOCHS, strict=True):
        number, step, seconds, sent, *rest = row
        before = STEPS[: epoch["step"]]
        assert (number, step) == (epoch["epoch"], epoch["step"])
        assert seconds == pytest.approx(sum(map(seconds_of, before)))
        assert sent == sum(each["sent_bytes"] for each in before)
        assert rest == [epoch[name] for name in ("lr", "train_loss", "val_loss", "wer", "cer")]


def test_events_and_what_follows_from_the_steps(report: RunReport) -> None:
    told = [(row[0], row[1]) for row in report.table("events").rows]
    assert told == [(8, "first-sparse"), (25, "density"), (30, "end")]
    k = STEPS[24]["wanted"] - SIDE
    assert f"{k + SIDE:,} to {2 * k + SIDE:,}" in report.table("events").rows[1][2]


def curve(report: RunReport, chart: str, series: str, axis: str = "step") -> dict[float, float]:
    """Return a curve's points, as a chart has them before it is thinned."""
    found = next(each for charts in report.charts.values() for each in charts if each.name == chart)
    for group in found.groups:
        for each in group.series:
            if each.name == series:
                return {x: y for x, y in zip(group.x[axis].tolist(), each.y.tolist(), strict=True) if y == y}
    raise AssertionError(f"{chart} has no {series}")


def test_curves_of_steps(report: RunReport) -> None:
    for chart, series, name in (
        ("loss", "training, each step", "loss"),
        ("sparsity", "sparsity", "sparsity"),
        ("ratio", "compression ratio", "compression_ratio"),
        ("thresholds", "local", "threshold"),
        ("thresholds", "global", "global_threshold"),
        ("norms", "gradient delivered", "grad_norm"),
        ("norms", "residual of rank 0", "residual_norm"),
    ):
        assert curve(report, chart, series) == {step["step"]: step[name] for step in STEPS if step[name] is not None}


def test_curves_that_are_quotients(report: RunReport) -> None:
    assert curve(report, "selected", "selected by rank 0 / k") == pytest.approx(
        {step["step"]: step["selected"] / step["wanted"] for step in STEPS}
    )
    expected = {}
    for step in STEPS:
        communication, computation = communication_of(step["ranks"][2])
        expected[step["step"]] = 100 * communication / (communication + computation)
    assert curve(report, "communication", "rank 2") == pytest.approx(expected)
    owned = {s["step"]: 3 * s["nnz_by_owner"][1] / sum(s["nnz_by_owner"]) for s in STEPS if s["nnz_by_owner"]}
    assert curve(report, "owners", "region of rank 1") == pytest.approx(owned)


def test_curves_over_seconds_and_bytes(report: RunReport) -> None:
    seconds = [sum(map(seconds_of, STEPS[: i + 1])) for i in range(30)]
    losses = [step["loss"] for step in STEPS]
    known = {x: y for x, y in zip(seconds, losses, strict=True) if y is not None}
    found = curve(report, "loss", "training, each step", "seconds")
    assert list(found) == pytest.approx(list(known))
    assert list(found.values()) == list(known.values())
    sent = [sum(step["sent_bytes"] for step in STEPS[: epoch["step"]]) for epoch in EPOCHS]
    wer = dict(zip(sent, (epoch["wer"] for epoch in EPOCHS), strict=True))
    assert curve(report, "errors", "WER", "bytes") == wer


def test_the_boundary_is_where_the_first_sparse_step_begins(report: RunReport) -> None:
    chart = next(chart for chart in report.charts["Learning"] if chart.name == "loss")
    ((at, name),) = chart.marks
    assert (at["step"], name) == (8, "first sparse step")
    assert at["seconds"] == pytest.approx(sum(map(seconds_of, STEPS[:8])))
    assert at["bytes"] == sum(step["sent_bytes"] for step in STEPS[:8])


def test_stacks_by_rank(report: RunReport) -> None:
    chart = next(chart for chart in report.charts["Time"] if chart.name == "split")
    for group in (group for group in chart.groups if group.thin == "mean"):
        for name, series in zip(SPLIT, group.series, strict=True):
            assert series.y.tolist() == [step["ranks"][group.rank][name] for step in STEPS]
    assert [group.rank for group in chart.groups] == [0, 0, 1, 1, 2, 2]


SECOND = make_run(steps=24, ranks=3, dense_steps=24, seed=5)


def test_several_runs_side_by_side() -> None:
    runs = [Run.of(RECORDS, "one"), Run.of(SECOND, "two")]
    table = comparison_table(runs)
    one, two = rows(table).values()
    steps = [record for record in SECOND if record["kind"] == "step"]
    epochs = [record for record in SECOND if record["kind"] == "epoch"]
    assert two["sent"] == sum(step["sent_bytes"] for step in steps)
    assert two["x fewer bytes"] == pytest.approx(one["sent"] / two["sent"])
    per_step = [sum(map(seconds_of, made)) / len(made) for made in (STEPS, steps)]
    assert two["x faster"] == pytest.approx(per_step[0] / per_step[1])
    goal = max(min(epoch["wer"] for epoch in made) for made in (EPOCHS, epochs))
    assert common_goal(runs) == goal
    for row, made, all_steps in ((one, EPOCHS, STEPS), (two, epochs, steps)):
        reached = next(epoch for epoch in made if epoch["wer"] <= goal)["step"]
        assert row[f"seconds to WER {goal:.4g}"] == pytest.approx(sum(map(seconds_of, all_steps[:reached])))
        assert row[f"bytes to WER {goal:.4g}"] == sum(step["sent_bytes"] for step in all_steps[:reached])
    assert one["x fewer bytes"] == one["x faster"] == 1.0
    headings = [column.name for column in table.columns]
    for heading, better in (("sent", min), ("x faster", max), ("best WER", min)):
        column = headings.index(heading)
        best = better(row[column] for row in table.rows)
        marked = {row for row, place in table.best if place == column}
        assert marked == {i for i, row in enumerate(table.rows) if row[column] == best}


def test_overlays_are_the_runs_own_curves() -> None:
    runs = [Run.of(RECORDS, "one"), Run.of(SECOND, "two")]
    charts = {chart.name: chart for chart in comparison_charts(runs)}
    assert {"all-wer", "all-val-loss", "all-sent"} <= charts.keys()
    assert {"seconds", "bytes", "step"} == set(charts["all-wer"].axes)
    for run, group in zip(runs, charts["all-wer"].groups, strict=True):
        own = next(chart for chart in charts_of(run)["Learning"] if chart.name == "errors")
        assert group.series[0].y.tolist() == own.groups[0].series[0].y.tolist()
        assert group.x["bytes"].tolist() == own.groups[0].x["bytes"].tolist()


def test_text_csv_and_json_have_the_same_numbers_and_csv_every_step(tmp_path: Path, report: RunReport) -> None:
    folder = write_run(tmp_path / "one", RECORDS)
    invoked = CliRunner().invoke(app, ["report", str(folder), "--json", "--csv", str(tmp_path / "csv")])
    assert invoked.exit_code == 0, invoked.output
    told = json.loads(invoked.stdout)
    assert told == json.loads(json.dumps(as_json(make_report([Run.of(RECORDS, "one")]))))
    text = CliRunner().invoke(app, ["report", str(folder), "--text"], env={"COLUMNS": "250"}).stdout
    for table in report.tables:
        objects = told["runs"][0]["tables"][table.name]
        with (tmp_path / "csv" / f"{table.name}.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        assert len(lines) == len(objects) == len(table.rows)
        for row, line, thing in zip(table.rows, lines, objects, strict=True):
            for column, value in zip(table.columns, row, strict=True):
                assert thing[column.name] == value
                assert line[column.name] == ("" if value is None else str(value))
                assert format_value(value, column.kind) in text
    with (tmp_path / "csv" / "steps.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    for line, step in zip(lines, STEPS, strict=True):
        assert int(line["sent_bytes"]) == step["sent_bytes"]
        assert line["loss"] == ("" if step["loss"] is None else repr(step["loss"]))
        assert float(line["split.wait"]) == step["split"]["wait"]
        assert line["phase"] == step["phase"]
    assert [column.name for column in step_table(Run.of(RECORDS)).columns] == list(lines[0])
