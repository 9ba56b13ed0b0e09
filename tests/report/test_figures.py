"""Every number of the report, computed once more from the raw records, by hand."""

import csv
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from oktopk.report.charts import Chart, charts_of, comparison_charts
from oktopk.report.report import RunReport, as_json, make_report
from oktopk.report.tables import Table, common_goal, comparison_table, step_table
from oktopk.telemetry.format import format_value
from oktopk.telemetry.run import Run
from tests.commands import invoke
from tests.report.synthetic import SIDE, SPLIT, Record, make_run, write_run


def of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


RECORDS = make_run(steps=30, ranks=3, dense_steps=8, skipped=(12, 20), density_change=25)
STEPS, EPOCHS = of_kind(RECORDS, "step"), of_kind(RECORDS, "epoch")
PHASES = {"dense": STEPS[:8], "sparse": STEPS[8:]}
DENSE_BYTES = RECORDS[0]["dense_bytes"]
HEADER = 16


@pytest.fixture(scope="module")
def report() -> RunReport:
    return make_report([Run(RECORDS, "one")]).runs[0]


def rows(table: Table) -> dict[Any, dict[str, Any]]:
    """Return the rows by their first cell."""
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def near(values: list[Any]) -> list[Any]:
    return [pytest.approx(value) if isinstance(value, float) else value for value in values]


def total(name: str, steps: list[Record] = STEPS) -> Any:
    return sum(step[name] for step in steps)


def average(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def spread(values: list[float | None], whole: float) -> list[Any]:
    """Return the sum of the steps' values, its share of the whole, and the means of dense and of sparse steps."""
    added = sum(value for value in values if value is not None)
    return near([added, added / whole, average(values[:8]), average(values[8:])])


def seconds_of(step: Record) -> float:
    return sum(step["split"].values())


def test_the_cards_and_dense_and_sparse_steps(report: RunReport) -> None:
    table, last = rows(report.table("phases")), EPOCHS[-1]
    per_step = [table[phase]["seconds a step"] for phase in PHASES]
    best, sent = min(epoch["wer"] for epoch in EPOCHS), total("sent_bytes")
    assert [(card.name, card.value) for card in report.cards] == [
        ("train loss", last["train_loss"]), ("validation loss", last["val_loss"]), ("WER", last["wer"]), ("steps", 30),
        ("sent, of dense", pytest.approx(sent / (30 * DENSE_BYTES))), ("compression ratio", table["sparse"]["ratio"]),
        ("dense step", per_step[0]), ("sparse step", per_step[1]),
    ]  # fmt: skip
    notes = {card.name: card.note for card in report.cards}
    assert notes["steps"] == "8 dense, 22 sparse, 2 skipped"
    assert f"best {best:.4g}" in notes["WER"]
    assert f"{sent / 1e6:.3g} MB" in notes["sent, of dense"]
    for phase, row in table.items():
        steps, kept = PHASES[phase], [step for step in PHASES[phase] if not step["skipped"]]
        sent = total("sent_bytes", steps)
        assert row == {
            "phase": phase, "steps": len(steps), "skipped": len(steps) - len(kept), "sent": sent,
            "sparsity": pytest.approx(average([step["sparsity"] for step in kept])),
            "ratio": pytest.approx(average([step["compression_ratio"] for step in kept])),
            "selected / k": pytest.approx(total("selected", kept) / total("wanted", kept)),
            "sent a step": pytest.approx(sent / len(steps)),
            "of a dense step": pytest.approx(sent / len(steps) / DENSE_BYTES),
            "seconds a step": pytest.approx(statistics.median(seconds_of(step) for step in steps)),
        }  # fmt: skip


def part_of(step: Record, part: str) -> int:
    """Return the bytes of a phase without its headers, or all headers."""
    headers = Counter[str]()
    for name, made in step["collectives"].items():
        if name.startswith(("exchange", "gather")):
            headers[name.split("/")[0]] += sum(min(size, HEADER) * count for size, count in made["sizes"])
    return headers.total() if part == "headers" else step["sent_by_phase"].get(part, 0) - headers[part]


def test_bytes_by_phase_of_the_algorithm(report: RunReport) -> None:
    sent = total("sent_bytes")
    parts = {part: [part_of(step, part) for step in STEPS]
             for part in ("exchange", "gather", "dense_tail", "agree", "headers")}  # fmt: skip
    assert sum(map(sum, parts.values())) == sent
    parts["all that was sent"] = [step["sent_bytes"] for step in STEPS]
    parts["if every step were dense"] = [DENSE_BYTES] * 30
    bounds = [4 * (5 * (step["wanted"] - SIDE) + 2 * SIDE) * 2 / 3 for step in PHASES["sparse"]]
    parts["the bound 5k(P-1)/P, sparse steps"] = [None] * 8 + bounds
    expected = {part: spread(values, sent) for part, values in parts.items()}
    assert {row[0]: row[1:] for row in report.table("bytes").rows} == expected


def test_time(report: RunReport) -> None:
    names = {"data": "data", "compute": "forward and backward", "wait": "wait for the exchange", "update": "update"}
    values = {("training", names[name]): [step["split"][name] for step in STEPS] for name in SPLIT}
    phases = sorted({name for step in STEPS for name in step["seconds"]})
    values |= {("exchange", name): [step["seconds"].get(name, 0.0) for step in STEPS] for name in phases}
    expected = {key: spread(each, sum(map(seconds_of, STEPS))) for key, each in values.items()}
    assert {(row[0], row[1]): row[2:] for row in report.table("time").rows} == expected


def communication_of(rank: Record) -> tuple[float, float]:
    travels = ("exchange", "gather", "agree", "dense_tail")
    communication = sum(seconds for name, seconds in rank["seconds"].items() if name in travels)
    computing = sum(seconds for name, seconds in rank["seconds"].items() if name not in travels)
    return communication, computing + rank["compute"] + rank["update"]


def test_by_rank(report: RunReport) -> None:
    table = rows(report.table("ranks"))
    by_rank = [[step["ranks"][rank] for step in STEPS] for rank in range(3)]
    sent = [total("sent_bytes", figures) for figures in by_rank]
    for rank, (row, figures) in enumerate(zip(table.values(), by_rank, strict=True)):
        communication, computation = map(sum, zip(*map(communication_of, figures), strict=True))
        assert row == {
            "rank": f"rank {rank}", "sent": sent[rank], "received": total("received_bytes", figures),
            **{name: total(name, figures) for name in ("messages", "selected")},
            "sent / mean": pytest.approx(3 * sent[rank] / sum(sent)),
            **{name: pytest.approx(total(name, figures)) for name in SPLIT},
            "communication": pytest.approx(communication), "computation": pytest.approx(computation),
            "communicating": pytest.approx(communication / (communication + computation)),
        }  # fmt: skip


def test_messages_by_collective_and_their_histogram(report: RunReport) -> None:
    chart = chart_of(report, "messages")
    for row, group in zip(report.table("messages").rows, chart.groups, strict=True):
        made = [step["collectives"][key] for step in STEPS if (key := f"{row[0]}/{row[1]}") in step["collectives"]]
        sizes = sorted(size for each in made for size, times in each["sizes"] for _ in range(times))
        middle = statistics.median(sizes)
        assert row[2:] == [total("calls", made), len(sizes), sum(sizes), sizes[0], middle, sizes[-1]]
        counts = Counter(size.bit_length() for size in sizes)
        (bars,) = group.series
        assert bars.name == f"{row[0]}: {row[1]}"
        assert bars.y.tolist() == [counts[int(place)] for place in group.x["step"]]
        assert bars.y.sum() == len(sizes)


def test_regions_epochs_and_events(report: RunReport) -> None:
    owned = [sum(step["nnz_by_owner"][owner] for step in STEPS if step["nnz_by_owner"]) for owner in range(3)]
    expected = [[f"rank {i}", each, each / sum(owned), 3 * each / sum(owned)] for i, each in enumerate(owned)]
    assert report.table("regions").rows == list(map(near, expected))
    for row, epoch in zip(report.table("epochs").rows, EPOCHS, strict=True):
        before = STEPS[: epoch["step"]]
        figures = [epoch[name] for name in ("lr", "train_loss", "val_loss", "wer", "cer")]
        so_far = [pytest.approx(sum(map(seconds_of, before))), total("sent_bytes", before)]
        assert row == [epoch["epoch"] + 1, epoch["step"], *so_far, *figures]
    table = report.table("events").rows
    assert [(row[0], row[1]) for row in table] == [(8, "first-sparse"), (25, "density"), (30, "end")]
    k = STEPS[24]["wanted"] - SIDE
    assert f"{k + SIDE:,} to {2 * k + SIDE:,}" in table[1][2]


def chart_of(report: RunReport, name: str) -> Chart:
    return next(chart for charts in report.charts.values() for chart in charts if chart.name == name)


def curve(report: RunReport, chart: str, name: str, axis: str = "step") -> list[tuple[float, float]]:
    """Return a curve's points, as a chart has them before it is thinned."""
    groups = chart_of(report, chart).groups
    ((x, y),) = [(group.x[axis], each.y) for group in groups for each in group.series if each.name == name]
    return [point for point in zip(x.tolist(), y.tolist(), strict=True) if point[1] == point[1]]


def test_curves(report: RunReport) -> None:
    expected: dict[tuple[str, ...], dict[float, Any]] = {
        curve: {step["step"]: step[name] for step in STEPS}
        for curve, name in {
            ("loss", "training, each step"): "loss", ("sparsity", "sparsity"): "sparsity",
            ("ratio", "compression ratio"): "compression_ratio", ("thresholds", "local"): "threshold",
            ("thresholds", "global"): "global_threshold", ("norms", "gradient delivered"): "grad_norm",
            ("norms", "residual of rank 0"): "residual_norm",
        }.items()
    }  # fmt: skip
    for name, series in {"selected": "selected by rank 0 / k", "nnz": "delivered / k"}.items():
        expected["selected", series] = {step["step"]: step[name] / step["wanted"] for step in STEPS}
    seconds = {step["step"]: communication_of(step["ranks"][2]) for step in STEPS}
    expected["communication", "rank 2"] = {step: 100 * part / (part + rest) for step, (part, rest) in seconds.items()}
    owned = {step["step"]: step["nnz_by_owner"] for step in STEPS if step["nnz_by_owner"]}
    expected["owners", "region of rank 1"] = {step: 3 * parts[1] / sum(parts) for step, parts in owned.items()}
    ends = [sum(map(seconds_of, STEPS[: i + 1])) for i in range(30)]
    losses = [step["loss"] for step in STEPS]
    expected["loss", "training, each step", "seconds"] = dict(zip(ends, losses, strict=True))
    expected["errors", "WER", "bytes"] = {total("sent_bytes", STEPS[: each["step"]]): each["wer"] for each in EPOCHS}
    for key, points in expected.items():
        known = [near([x, y]) for x, y in points.items() if y is not None]
        assert list(map(list, curve(report, *key))) == known, key


def test_the_mark_of_the_first_sparse_step_and_the_stacks_of_a_rank(report: RunReport) -> None:
    ((at, name),) = chart_of(report, "loss").marks
    seconds = pytest.approx(sum(map(seconds_of, STEPS[:8])))
    assert (at, name) == ({"step": 8, "seconds": seconds, "bytes": total("sent_bytes", STEPS[:8])}, "first sparse step")
    chart = chart_of(report, "split")
    for group in (group for group in chart.groups if group.thin == "mean"):
        for name, series in zip(SPLIT, group.series, strict=True):
            assert series.y.tolist() == [step["ranks"][group.rank][name] for step in STEPS]
    assert [group.rank for group in chart.groups] == [0, 0, 1, 1, 2, 2]


SECOND = make_run(steps=24, ranks=3, dense_steps=24, seed=5)
RUNS = [Run(RECORDS, "one"), Run(SECOND, "two")]


def test_several_runs_side_by_side_and_over_each_other() -> None:
    table = comparison_table(RUNS)
    one, two = rows(table).values()
    steps, epochs = of_kind(SECOND, "step"), of_kind(SECOND, "epoch")
    assert two["sent"] == total("sent_bytes", steps)
    assert two["bytes, against the first"] == pytest.approx(one["sent"] / two["sent"])
    per_step = [sum(map(seconds_of, made)) / len(made) for made in (STEPS, steps)]
    assert two["speed, against the first"] == pytest.approx(per_step[0] / per_step[1])
    goal = max(min(epoch["wer"] for epoch in made) for made in (EPOCHS, epochs))
    assert common_goal(RUNS) == goal
    for row, made, all_steps in ((one, EPOCHS, STEPS), (two, epochs, steps)):
        before = all_steps[: next(epoch for epoch in made if epoch["wer"] <= goal)["step"]]
        assert row[f"seconds to WER {goal:.4g}"] == pytest.approx(sum(map(seconds_of, before)))
        assert row[f"bytes to WER {goal:.4g}"] == total("sent_bytes", before)
    assert one["bytes, against the first"] == one["speed, against the first"] == 1.0
    for heading, better in (("sent", min), ("speed, against the first", max), ("best WER", min)):
        column = list(table.columns).index(heading)
        best = better(row[column] for row in table.rows)
        marked = {row for row, place in table.best if place == column}
        assert marked == {i for i, row in enumerate(table.rows) if row[column] == best}
    charts = {chart.name: chart for chart in comparison_charts(RUNS)}
    assert "all-loss" not in charts, "a trainer's runs have their loss by epoch"
    assert {"all-wer", "all-val-loss", "all-sent"} <= charts.keys()
    assert {"seconds", "bytes", "step"} == set(charts["all-wer"].axes)
    for run, group in zip(RUNS, charts["all-wer"].groups, strict=True):
        own = next(chart for chart in charts_of(run)["Learning"] if chart.name == "errors").groups[0]
        assert group.series[0].y.tolist() == own.series[0].y.tolist()
        assert group.x["bytes"].tolist() == own.x["bytes"].tolist()


def test_losses_that_scripts_logged_are_over_each_other() -> None:
    steps = [{name: value for name, value in step.items() if name not in ("loss", "epoch")} for step in STEPS]
    logs = [{"kind": "log", "step": step["step"], "figures": {"loss": 9.0 - step["step"] / 9}} for step in STEPS]
    (chart,) = (
        each for each in comparison_charts([Run([*steps, *logs], name) for name in "ab"]) if "loss" in each.name
    )
    assert [series.name for group in chart.groups for series in group.series] == ["a", "b"]
    assert chart.groups[1].series[0].y.tolist() == [log["figures"]["loss"] for log in logs]  # type: ignore[index]


def test_text_csv_and_json_have_the_same_numbers_and_csv_every_step(tmp_path: Path, report: RunReport) -> None:
    folder = write_run(tmp_path / "one", RECORDS)
    invoked = invoke("report", str(folder), "--json", "--csv", str(tmp_path / "csv"))
    assert invoked.exit_code == 0, invoked.output
    told = json.loads(invoked.stdout)
    assert told == json.loads(json.dumps(as_json(make_report([Run(RECORDS, "one")]))))
    text = invoke("report", str(folder), "--text", columns=250).stdout

    def lines_of(name: str) -> list[dict[str, str]]:
        with (tmp_path / "csv" / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    for table in report.tables:
        objects = told["runs"][0]["tables"][table.name]
        for row, line, thing in zip(table.rows, lines_of(table.name), objects, strict=True):
            assert thing == dict(zip(table.columns, row, strict=True))
            assert line == {name: "" if value is None else str(value) for name, value in thing.items()}
            assert all(format_value(value, table.columns[name]) in text for name, value in thing.items())
    lines = lines_of("steps")
    for line, step in zip(lines, STEPS, strict=True):
        assert (int(line["sent_bytes"]), line["phase"]) == (step["sent_bytes"], step["phase"])
        assert line["loss"] == ("" if step["loss"] is None else repr(step["loss"]))
        assert float(line["split.wait"]) == step["split"]["wait"]
    assert list(step_table(RUNS[0]).columns) == list(lines[0])
