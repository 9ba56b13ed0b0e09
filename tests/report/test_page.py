"""The page as a text: whole, safe, small; and the charts' data, thinned but never by its extremes."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from oktopk.cli.root import app
from oktopk.errors import SettingError
from oktopk.report import page
from oktopk.report.charts import charts_of, extremes, thinned
from oktopk.report.page import anchor, chart_data, definitions, make_page, packed
from oktopk.report.report import make_report
from oktopk.report.tables import tables_of
from oktopk.telemetry.format import format_value
from oktopk.telemetry.run import Run
from tests.report.synthetic import make_run, write_run


def unpacked(text: str) -> list[float]:
    """Return the values that `packed` packed."""
    return list(np.frombuffer(base64.b64decode(text), dtype="<f4").tolist())


EVIL = "</script><img src=x onerror=alert(1)>&\"'"
MOST_BYTES = 6_000_000


class Seen(HTMLParser):
    """What a page consists of: its tags with their attributes, the texts of its cells, its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def made() -> str:
    runs = [Run.of(make_run(ranks=2), EVIL), Run.of(make_run(ranks=2, seed=3, dense_steps=30), "second")]
    runs[0].events.append({"step": 3, "event": EVIL, "message": EVIL})
    return make_page(make_report(runs))


def test_names_and_messages_stay_texts(made: str) -> None:
    assert "<img" not in made.replace(page._own("page.html"), "")
    seen = Seen(made)
    assert EVIL in seen.texts
    assert [tag for tag, _ in seen.tags].count("script") == 3
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', made, re.S)
    assert data is not None
    charts = json.loads(data[1])
    assert charts["all-wer"]["groups"][0]["series"][0]["name"] == EVIL


def test_it_needs_nothing_from_anywhere(made: str) -> None:
    for _, attributes in Seen(made).tags:
        for name in ("src", "href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert "default-src 'none'" in made


def test_it_is_small(made: str) -> None:
    assert len(made.encode()) < MOST_BYTES
    many = [Run.of(make_run(steps=400, ranks=8, seed=seed), f"run {seed}") for seed in range(3)]
    assert len(make_page(make_report(many)).encode()) < MOST_BYTES


def test_every_cell_and_card_is_in_it(made: str) -> None:
    texts = {text.strip() for text in Seen(made).texts}
    run = Run.of(make_run(ranks=2), EVIL)
    for table in tables_of(run):
        for row in table.rows:
            for column, value in zip(table.columns, row, strict=True):
                assert format_value(value, column.kind) in texts
    for card in make_report([run]).runs[0].cards:
        assert {card.name, format_value(card.value, card.kind)} <= texts


def test_every_definition_that_is_linked_is_there(made: str) -> None:
    seen = Seen(made)
    ids = {attributes.get("id") for _, attributes in seen.tags}
    links = {attributes["href"] for _, attributes in seen.tags if attributes.get("class") == "definition"}
    assert len(links) >= 4
    assert {str(link)[1:] for link in links} <= ids


def test_the_definitions_are_those_of_the_docs() -> None:
    docs, html = Path(__file__).parents[2] / "docs" / "accounting.md", definitions()
    for heading in re.findall(r"^#+ (.*)$", docs.read_text(), re.M):
        assert f'id="{anchor(heading)}"' in html
    assert "<code>nominal_bytes</code>" in html


def test_charts_have_titles_units_and_data() -> None:
    single = thinned(charts_of(Run.of(make_run(steps=1, dense_steps=0)))["Learning"][0], 10)
    assert single.groups[0].series[0].y.size == 1
    for charts in charts_of(Run.of(make_run())).values():
        assert charts
        for chart in charts:
            assert chart.title
            assert chart.about.endswith(".")
            assert chart.y_title
            assert not chart.is_empty


COLUMN = st.lists(st.one_of(st.just(np.nan), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


@given(COLUMN, st.integers(1, 100))
def test_thinning_keeps_extremes_and_ends(values: list[float], points: int) -> None:
    column = np.array(values)
    kept = extremes([column], points)
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all()
    if not np.isnan(column).all():
        assert np.nanmax(column[kept]) == np.nanmax(column)
        assert np.nanmin(column[kept]) == np.nanmin(column)
    assert len(kept) <= max(points, 16) + 2


def test_every_stretch_keeps_its_extremes() -> None:
    column = np.sin(np.arange(10_000.0)) * np.arange(10_000.0)
    kept = extremes([column], 100)
    for stretch in np.array_split(np.arange(10_000), 50):
        inside = kept[(kept >= stretch[0]) & (kept <= stretch[-1])]
        assert column[inside].max() == column[stretch].max()
        assert column[inside].min() == column[stretch].min()


def test_stacks_become_means_and_the_longest() -> None:
    run = Run.of(make_run(steps=1000, steps_per_epoch=100, dense_steps=100))
    chart = next(chart for chart in charts_of(run)["Time"] if chart.name == "split")
    parts, longest = thinned(chart, 100).groups[:2]
    stretches = np.array_split(np.arange(1000), 100)
    compute = run.column("ranks.0.compute")
    whole = sum(run.column(f"ranks.0.{name}") for name in ("data", "compute", "wait", "update"))
    assert parts.series[1].y == pytest.approx([compute[stretch].mean() for stretch in stretches])
    assert longest.series[0].y == pytest.approx([whole[stretch].max() for stretch in stretches])
    assert parts.x["step"].tolist() == [stretch[-1] for stretch in stretches]


def test_a_change_of_phase_stays_sharp() -> None:
    run = Run.of(make_run(steps=1500, dense_steps=777, steps_per_epoch=1000))
    chart = next(chart for chart in charts_of(run)["Traffic"] if chart.name == "bytes")
    assert {776.0, 777.0} <= set(thinned(chart, 60).groups[0].x["step"].tolist())


def test_totals_are_not_thinned() -> None:
    records = make_run(steps=1500, steps_per_epoch=1000)
    report = make_report([Run.of(records)]).runs[0]
    sent = sum(record["sent_bytes"] for record in records if record["kind"] == "step")
    assert report.table("bytes").rows[-3][1] == sent
    encoded = chart_data(make_report([Run.of(records)]))
    assert len(unpacked(encoded["loss-0"]["groups"][0]["series"][0]["y"])) <= page.MOST_POINTS + 4


@given(st.lists(st.floats(width=32, allow_infinity=False), max_size=20))
def test_numbers_survive_packing(values: list[float]) -> None:
    assert (unpacked(packed(np.array(values)))) == pytest.approx(values, nan_ok=True)


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", make_run())
    invoked = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "a" / "b.html")])
    assert invoked.exit_code == 0, invoked.output
    assert (tmp_path / "a" / "b.html").read_text().startswith("<!DOCTYPE html>")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", str(folder / "metrics.jsonl")]).exit_code == 0
    assert "<h1>run</h1>" in (tmp_path / "report.html").read_text()


def test_runs_of_one_name_are_told_apart_and_text_does_not_mix_with_json(tmp_path: Path) -> None:
    folder = str(write_run(tmp_path / "run", make_run()))
    invoked = CliRunner().invoke(app, ["report", folder, folder, "--json"])
    assert [run["name"] for run in json.loads(invoked.stdout)["runs"]] == ["run", "run (2)"]
    invoked = CliRunner().invoke(app, ["report", folder, "--text", "--json"])
    assert (invoked.exit_code, "choose one" in invoked.stderr) == (2, True)


def test_without_what_makes_the_page_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "NEEDED", ("there_is_no_such_module",))
    with pytest.raises(SettingError, match=r"pip install 'oktopk\[report\]'"):
        page.check_possible()
