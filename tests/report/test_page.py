"""The page as a text: whole, safe, small; and the charts' data, thinned but never by its extremes."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import SettingError
from oktopk.report import page
from oktopk.report.charts import Chart, charts_of, extremes, thinned
from oktopk.report.page import anchor, chart_data, definitions, make_page, packed
from oktopk.report.report import make_report
from oktopk.telemetry.format import format_value
from oktopk.telemetry.run import Run
from tests.commands import invoke
from tests.report.synthetic import make_event, make_run, write_run

EVIL = "</script><img src=x onerror=alert(1)>&\"'"
MOST_BYTES = 6_000_000


class Seen(HTMLParser):
    """A page's tags with their attributes, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


RUNS = [
    Run([*make_run(ranks=2), make_event(EVIL, 3, EVIL)], EVIL),
    Run(make_run(ranks=2, seed=3, dense_steps=30), "second"),
]


@pytest.fixture(scope="module")
def made() -> str:
    return make_page(make_report(RUNS))


def test_names_and_messages_stay_texts(made: str) -> None:
    assert "<img" not in made
    seen = Seen(made)
    assert EVIL in seen.texts
    assert [tag for tag, _ in seen.tags].count("script") == 3
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', made, re.S)
    assert data is not None
    assert json.loads(data[1])["all-wer"]["groups"][0]["series"][0]["name"] == EVIL


def test_it_is_small_and_needs_nothing_from_anywhere(made: str) -> None:
    for _, attributes in Seen(made).tags:
        for name in ("src", "href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert "default-src 'none'" in made
    many = [Run(make_run(steps=400, ranks=8, seed=seed), f"run {seed}") for seed in range(3)]
    assert max(len(text.encode()) for text in (made, make_page(make_report(many)))) < MOST_BYTES


def test_every_cell_and_card_is_in_it(made: str) -> None:
    texts = {text.strip() for text in Seen(made).texts}
    report = make_report(RUNS).runs[0]
    for table in report.tables:
        for row in table.rows:
            assert set(map(format_value, row, table.columns.values())) <= texts
    for card in report.cards:
        assert {card.name, format_value(card.value, card.kind)} <= texts


def test_every_definition_that_is_linked_is_there_as_in_the_docs(made: str) -> None:
    seen, docs, html = Seen(made), Path(__file__).parents[2] / "docs" / "accounting.md", definitions()
    ids = {attributes.get("id") for _, attributes in seen.tags}
    links = {attributes["href"] for _, attributes in seen.tags if attributes.get("class") == "definition"}
    assert len(links) >= 4
    assert {str(link)[1:] for link in links} <= ids
    for heading in re.findall(r"^#+ (.*)$", docs.read_text(), re.M):
        assert f'id="{anchor(heading)}"' in html
    assert "<code>nominal_bytes</code>" in html


def chart_of(run: Run, section: str, name: str) -> Chart:
    return next(chart for chart in charts_of(run)[section] if chart.name == name)


def test_charts_have_titles_units_and_data() -> None:
    single = thinned(chart_of(Run(make_run(steps=1, dense_steps=0)), "Learning", "loss"), 10)
    assert single.groups[0].series[0].y.size == 1
    for charts in charts_of(RUNS[0]).values():
        assert charts
        for chart in charts:
            assert chart.title
            assert chart.about.endswith(".")
            assert chart.y_title
    assert not any(charts_of(Run()).values())


def test_members_are_drawn_if_they_came_and_went() -> None:
    records = make_run(steps=6, dense_steps=2)
    assert not any(chart.name == "members" for chart in charts_of(Run(records))["Balance"])
    sizes = [2, 3, 3, 2, 4, 4]
    for size, step in zip(sizes, (record for record in records if record["kind"] == "step"), strict=True):
        step["world_size"] = size
    assert chart_of(Run(records), "Balance", "members").groups[0].series[0].y.tolist() == sizes


COLUMN = st.lists(st.one_of(st.just(np.nan), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(COLUMN, st.integers(1, 100))
def test_thinning_keeps_the_ends_and_the_extremes_of_every_stretch(values: list[float], points: int) -> None:
    column = np.array(values)
    kept = extremes([column], points)
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= max(points, 16) + 2
    width = -(-len(values) // max(points // 2, 8))
    for start in range(0, len(values), width):
        inside = kept[(kept >= start) & (kept < start + width)]
        stretch = column[start : start + width]
        if not np.isnan(stretch).all():
            assert np.nanmax(column[inside]) == np.nanmax(stretch)
            assert np.nanmin(column[inside]) == np.nanmin(stretch)


def test_long_charts_keep_means_longest_steps_and_sharp_changes_and_totals_are_of_all_steps() -> None:
    records = make_run(steps=1500, dense_steps=777, steps_per_epoch=1000)
    run = Run(records)
    parts, longest = thinned(chart_of(run, "Time", "split"), 100).groups[:2]
    stretches = np.array_split(np.arange(1500), 100)
    compute = run.column("ranks.0.compute")
    whole = sum(run.column(f"ranks.0.{name}") for name in ("data", "compute", "wait", "update"))
    assert parts.series[1].y == pytest.approx([compute[stretch].mean() for stretch in stretches])
    assert longest.series[0].y == pytest.approx([whole[stretch].max() for stretch in stretches])
    assert parts.x["step"].tolist() == [stretch[-1] for stretch in stretches]
    assert {776.0, 777.0} <= set(thinned(chart_of(run, "Traffic", "bytes"), 60).groups[0].x["step"].tolist())
    report = make_report([run])
    sent = sum(record["sent_bytes"] for record in records if record["kind"] == "step")
    assert report.runs[0].table("bytes").rows[-3][1] == sent
    assert len(chart_data(report)["loss-0"].groups[0].series[0].y) <= page.MOST_POINTS + 4


@given(st.lists(st.floats(width=32, allow_infinity=False), max_size=20))
def test_numbers_survive_packing(values: list[float]) -> None:
    unpacked = np.frombuffer(base64.b64decode(packed(np.array(values))), dtype="<f4")
    assert unpacked.tolist() == pytest.approx(values, nan_ok=True)


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_run(tmp_path / "run", make_run()))
    invoked = invoke("report", folder, "-o", str(tmp_path / "a" / "b.html"))
    assert invoked.exit_code == 0, invoked.output
    assert (tmp_path / "a" / "b.html").read_text().startswith("<!DOCTYPE html>")
    monkeypatch.chdir(tmp_path)
    assert "wrote" in invoked.stderr
    assert "replaced the report" in invoke("report", folder, "-o", str(tmp_path / "a" / "b.html")).stderr
    (tmp_path / "mine.html").write_text("<p>mine")
    refused = invoke("report", folder, "-o", str(tmp_path / "mine.html"))
    assert (refused.exit_code, (tmp_path / "mine.html").read_text()) == (2, "<p>mine")
    assert "is no report of oktopk: choose another name with -o" in refused.stderr
    assert invoke("report", f"{folder}/metrics.jsonl").exit_code == 0
    assert "<h1>run</h1>" in (tmp_path / "report.html").read_text()
    invoked = invoke("report", folder, folder, "--json")
    assert [run["name"] for run in json.loads(invoked.stdout)["runs"]] == ["run", "run (2)"]
    invoked = invoke("report", folder, "--text", "--json")
    assert (invoked.exit_code, "choose one" in invoked.stderr) == (2, True)


def test_without_what_makes_the_page_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "NEEDED", ("there_is_no_such_module",))
    with pytest.raises(SettingError, match=r"pip install 'oktopk\[report\]'"):
        page.check_possible()
