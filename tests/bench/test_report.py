"""The files that results become, from made-up results."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from oktopk.bench import report
from oktopk.bench.breakeven import verdicts_of
from oktopk.bench.machine import provenance
from oktopk.bench.plot import plots_of

ROWS = (("dense", None), ("bf16", None), ("oktopk", 0.01), ("oktopk", 0.05))


def row(method: str, density: float | None, seconds: float) -> dict[str, Any]:
    ratio = {"median": 1.0 / seconds, "min": 0.5 / seconds, "max": 2.0 / seconds}
    return {
        "name": method if density is None else f"{method} {density:g}",
        "method": method,
        "density": density,
        "seconds": {"median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds},
        "rounds_s": [seconds],
        "sent_bytes": None,
        "record_bytes": 8000.0,
        "parts_s": {"forward": 0.1, "backward": 0.2, "wait": 0.05, "select": 0.01},
        "x_dense": ratio,
        "x_bf16": None,
        "predicted_s": None,
        "error_percent": None,
    }


def result_of(bench: str) -> dict[str, Any]:
    settings = [
        {
            "ranks": ranks,
            "mbit": mbit,
            "delay_ms": 0.0,
            "rounds": 1,
            "rows": [row(*entry, seconds=ranks * (i + 1) / 10) for i, entry in enumerate(ROWS)],
        }
        for ranks in (2, 4)
        for mbit in (100.0, 0.0)
    ]
    about = {"bench": bench, "numel": 1000, "notes": ["a <note>"], "model": "wide", "batch": 2}
    return {**about, **provenance(), "settings": settings, "pays": verdicts_of(settings)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder, result = tmp_path_factory.mktemp("results") / "new", result_of("step")
    report.write_report(result, folder)
    return folder, result


def test_json_holds_everything(written: tuple[Path, dict[str, Any]]) -> None:
    folder, result = written
    assert json.loads((folder / report.JSON).read_text()) == result


def test_csv_has_a_row_for_each_method_and_setting(written: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = written
    with (folder / report.CSV).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(ROWS)
    assert rows[2]["method"] == "oktopk"
    assert (rows[2]["ranks"], rows[2]["mbit"], rows[2]["density"]) == ("2", "100.0", "0.01")
    assert float(rows[2]["median_s"]) == pytest.approx(0.6)
    assert rows[2]["sent_bytes"] == rows[2]["x_bf16"] == ""


def test_what_was_varied_is_plotted(written: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = written
    names = {"links-p2", "links-p4", "ranks-100mbit", "ranks-unlimited"} | {
        f"densities-p{ranks}-{link}" for ranks in (2, 4) for link in ("100mbit", "unlimited")
    }
    assert {file.stem for file in folder.glob("*.svg")} == {file.stem for file in folder.glob("*.png")} == names
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_curves_have_a_point_for_each_setting() -> None:
    links, *_, densities = plots_of(result_of("exchange"))
    assert links.labels == ["100 Mbit/s", "unlimited link"]
    assert list(links.curves) == ["dense", "bf16", "oktopk 0.01", "oktopk 0.05"]
    assert links.curves["dense"] == pytest.approx([200.0, 200.0])
    assert (list(densities.curves), densities.places) == (["dense", "bf16", "oktopk"], [0.01, 0.05])
    assert densities.curves["dense"] == pytest.approx([400.0, 400.0])
    assert densities.curves["oktopk"] == pytest.approx([1200.0, 1600.0])


def test_nothing_is_plotted_that_was_not_varied() -> None:
    result = result_of("exchange")
    (first, *_), kept = result["settings"], [0, 1, 2]
    assert plots_of({**result, "settings": [{**first, "rows": [first["rows"][i] for i in kept]}]}) == []


class Counter(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [value for name, value in attrs if name == "src"], "the page loads something"


def test_the_page_stands_alone(written: tuple[Path, dict[str, Any]]) -> None:
    folder, result = written
    page = (folder / report.PAGE).read_text()
    counter = Counter()
    counter.feed(page)
    assert counter.tags.count("svg") == len(list(folder.glob("*.svg")))
    assert counter.tags.count("table") == 4
    assert not {"script", "link", "img"} & set(counter.tags)
    assert "a &lt;note&gt;" in page
    assert all(verdict["sentence"] in page for verdict in result["pays"])
    assert "backward 200, 50 of it waiting for the exchange: select 10" in page
