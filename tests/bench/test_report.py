"""The files that results become, from made-up results."""

import csv
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from oktopk.bench import report
from oktopk.bench.machine import provenance
from oktopk.bench.summary import verdicts_of
from oktopk.errors import SettingError

ROWS = (("dense", None), ("bf16", None), ("oktopk", 0.01), ("oktopk", 0.05))


def row(method: str, density: float | None, seconds: float) -> dict[str, Any]:
    return {
        "name": method if density is None else f"{method} {density:g}",
        "method": method,
        "density": density,
        "seconds": {"median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds},
        "record_bytes": 8000.0,
        "parts_s": {"forward": 0.1, "backward": 0.2, "wait": 0.05, "select": 0.01},
        "x_dense": {"median": 1.0 / seconds, "low": 0.9 / seconds, "high": 1.1 / seconds},
        **dict.fromkeys(("sent_bytes", "x_bf16", "predicted_s", "error_percent")),
    }


SETTINGS = [
    {"ranks": ranks, "mbit": mbit, "delay_ms": 0.0, "shard": 1, "rounds": 1}
    | {"rows": [row(*entry, seconds=ranks * (i + 1) / 10) for i, entry in enumerate(ROWS)]}
    for ranks in (2, 4)
    for mbit in (100.0, 0.0)
]
ABOUT = {"bench": "step", "numel": 1000, "densities": [0.01, 0.05], "model": "wide", "batch": 2, "notes": ["a <note>"]}
RESULT = {**ABOUT, **provenance(), "settings": SETTINGS, "pays": verdicts_of(SETTINGS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    report.write_report(RESULT, folder)
    return folder


def test_json_holds_everything_and_csv_a_row_for_each_method_and_setting(folder: Path) -> None:
    assert json.loads((folder / report.JSON).read_text()) == RESULT
    with (folder / report.CSV).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * len(ROWS)
    assert {"method": "oktopk", "ranks": "2", "mbit": "100.0", "density": "0.01"}.items() <= rows[2].items()
    assert float(rows[2]["median_s"]) == pytest.approx(0.6)
    assert rows[2]["sent_bytes"] == rows[2]["x_bf16"] == ""


def test_what_was_varied_is_plotted(folder: Path) -> None:
    densities = {f"densities-p{ranks}-{link}" for ranks in (2, 4) for link in ("100mbit", "unlimited")}
    names = {"links-p2", "links-p4", "ranks-100mbit", "ranks-unlimited"} | densities
    assert {file.stem for file in folder.glob("*.svg")} == {file.stem for file in folder.glob("*.png")} == names
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_one_setting_has_bars_of_its_methods(tmp_path: Path) -> None:
    (bars,) = report.plots_of([{**SETTINGS[0], "rows": SETTINGS[0]["rows"][:3]}])
    assert bars.curves["bf16"] == pytest.approx([400.0, 360.0, 440.0])
    svg = report.draw(bars, tmp_path)
    assert all(name in svg for name in ("dense", "bf16", "oktopk 0.01", "100 Mbit/s", "fill: var(--blue)"))


def test_plots_have_the_colours_of_the_page_so_that_they_follow_its_scheme(folder: Path) -> None:
    page = (folder / report.PAGE).read_text()
    assert "prefers-color-scheme: dark" in page
    svgs = page[page.index("<svg") : page.rindex("</svg>")]
    assert {"var(--ink)", "var(--blue)", "var(--orange)"} <= set(re.findall(r"var\(--\w+\)", svgs))
    assert set(re.findall(r"(?:fill|stroke): #(\w+)", svgs)) <= {"b0b0b0"}  # of the grid, which is faint on both


def test_earlier_results_are_not_overwritten(folder: Path) -> None:
    with pytest.raises(SettingError, match="results of an earlier benchmark: name another folder"):
        report.check_possible(folder)


def test_curves_have_a_point_for_each_setting() -> None:
    links, *_, densities = report.plots_of(SETTINGS)
    assert links.labels == ["100 Mbit/s", "unlimited link"]
    assert list(links.curves) == ["dense", "bf16", "oktopk 0.01", "oktopk 0.05"]
    assert links.curves["dense"] == pytest.approx([200.0, 200.0])
    assert (list(densities.curves), densities.places) == (["dense", "bf16", "oktopk"], [0.01, 0.05])
    assert densities.curves["dense"] == pytest.approx([400.0, 400.0])
    assert densities.curves["oktopk"] == pytest.approx([1200.0, 1600.0])


def test_the_page_stands_alone(folder: Path) -> None:
    page = (folder / report.PAGE).read_text()
    assert page.count("<svg") == len(list(folder.glob("*.svg")))
    assert page.count("<table") == 4
    assert not re.search(r"<(script|link|img)\b|\ssrc=", page)
    assert "a &lt;note&gt;" in page
    assert all(verdict["sentence"] in page for verdict in RESULT["pays"])
    assert "backward 200, 50 of it waiting for the exchange: select 10" in page
