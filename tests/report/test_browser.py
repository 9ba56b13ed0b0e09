"""The page in a real browser, offline: no complaint, no request, what is clicked is shown, nothing is cut."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oktopk.bench.report import write_report
from oktopk.report.page import make_page
from oktopk.report.report import make_report
from oktopk.telemetry.run import Run, load_run
from tests.bench.test_report import RESULT
from tests.report.synthetic import SIDE, Record, make_event, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--disable-quic",
]  # fmt: skip
EVIL = "</script><script>throw 1</script>"
MOST_OPENING_S = 3.0
PATIENCE_S = 30.0

FIRST = make_run(steps=60, ranks=3, dense_steps=20, skipped=(33,))
SECOND = make_run(steps=60, ranks=3, dense_steps=60, seed=7)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; where there is none, that is seen: a failure on a build machine, a skip with a reason elsewhere."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or CHROMIUM is None:
        missing = "these tests need playwright and Chromium: apt-get install chromium"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@dataclass
class Opened:
    """A page, and what it complained of and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def plot(self, chart: str) -> dict[str, dict[str, Any]]:
        """Return the traces of a chart by name: whether each is visible, and its points."""
        self.page.locator(f'[data-chart="{chart}"]').scroll_into_view_if_needed()
        self.until(f"{_DATA.format(chart)} !== undefined")
        self.page.wait_for_timeout(150)
        trace = "[t.name, {visible: t.visible, x: Array.from(t.x), y: Array.from(t.y)}]"
        return dict(self.page.evaluate(f"{_DATA.format(chart)}.map(t => {trace})"))

    def until(self, condition: str) -> None:
        """Wait until it holds; playwright's own way evaluates texts, which the page forbids."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"not so after {PATIENCE_S:g} s: {condition}"
            self.page.wait_for_timeout(20)

    def click(self, chart: str, what: str) -> None:
        self.page.locator(f'[data-chart="{chart}"] button[{what}]').click()


_DATA = "document.querySelector('[data-chart=\"{}\"] .plot').data"


def opened(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> Opened:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    result = Opened(context.new_page())
    result.page.on("console", lambda message: result.complaints.append(f"{message.type}: {message.text}"))
    result.page.on("pageerror", lambda error: result.complaints.append(str(error)))
    result.page.on("request", lambda request: result.requests.append(request.url))
    result.page.goto(path.as_uri())
    return result


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, one = tmp_path_factory.mktemp("pages"), Run(FIRST, "one")
    both = [Run(FIRST, EVIL), Run(SECOND, "a-run-with-a-long-name-" * 4)]
    damaged = Run([*FIRST[:9], make_event("failed", 7, EVIL * 9)], "damaged")
    for name, runs in {"one": [one], "both": both, "damaged": [damaged], "empty": [Run([], "empty")]}.items():
        (folder / f"{name}.html").write_text(make_page(make_report(runs)))
    return folder


@pytest.mark.parametrize(("name", "width", "scheme"), [
    ("one", 400, "light"), ("both", 1280, "dark"), ("damaged", 400, "dark"), ("empty", 1280, "light"),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (("one", 1280, "dark"), ("both", 400, "light"))),
])  # fmt: skip
def test_it_opens_offline_and_nothing_is_cut(browser: Any, pages: Path, name: str, width: int, scheme: str) -> None:
    seen = opened(browser, pages / f"{name}.html", width, scheme)
    seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    shown = "article:not([hidden]) .plot, #comparison-section .plot"
    seen.until(f"Array.from(document.querySelectorAll('{shown}')).every(plot => plot.data !== undefined)")
    seen.page.wait_for_timeout(500)
    assert seen.complaints == []
    assert seen.requests == [(pages / f"{name}.html").as_uri()]
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    assert seen.page.evaluate(_CUT) == []
    assert seen.page.evaluate(_UNTITLED) == []


_CUT = """() => {
  const cut = [];
  for (const plot of document.querySelectorAll(".plot")) {
    const room = plot.getBoundingClientRect();
    for (const text of plot.querySelectorAll("svg text")) {
      const box = text.getBoundingClientRect();
      if (box.width && (box.left < room.left - 1 || box.right > room.right + 1 || box.bottom > room.bottom + 1
          || box.top < room.top - 1)) cut.push(plot.closest("figure").dataset.chart + ": " + text.textContent);
    }
  }
  for (const one of document.querySelectorAll(".card, .note, h1, h2, h3, button, figcaption")) {
    if (one.scrollWidth > one.clientWidth + 1 && one.clientWidth) cut.push(one.textContent);
  }
  return cut;
}"""
"""What is wider than its place; tables may be scrolled."""

_UNTITLED = """() => Array.from(document.querySelectorAll(".plot")).filter((plot) => plot.data)
  .filter((plot) => ![".xtitle", ".ytitle"].every((title) => plot.querySelector(title)?.textContent))
  .map((plot) => plot.ariaLabel)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_either_page(browser: Any, pages: Path, tmp_path: Path, scheme: str) -> None:
    axe = (files("axe_core_python") / "axe.min.js").read_text("utf-8")
    write_report(RESULT, tmp_path)
    for path in (pages / "one.html", pages / "both.html", tmp_path / "index.html"):
        seen = opened(browser, path, scheme=scheme)
        seen.page.add_script_tag(content=axe)
        found = seen.page.evaluate("axe.run()")
        assert len(found["passes"]) > 20
        serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
        assert serious == [], path.name


def test_the_benchmarks_page_fits_a_phone_and_follows_the_dark(browser: Any, tmp_path: Path) -> None:
    write_report(RESULT, tmp_path)
    ground = "getComputedStyle(document.body).backgroundColor"
    grounds = set()
    for scheme in ("light", "dark"):
        seen = opened(browser, tmp_path / "index.html", 390, scheme)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert seen.requests == [(tmp_path / "index.html").as_uri()]
        texts = "Array.from(document.querySelectorAll('svg text'), each => getComputedStyle(each).fill)"
        grounds.add((seen.page.evaluate(ground), *set(seen.page.evaluate(texts))))
    assert len(grounds) == 2, "ground and texts of the plots are others in the dark"
    assert all(len(set(each)) == 2 for each in grounds), "one colour of texts, and not the ground's"


def test_paper_is_light_for_a_reader_in_the_dark(browser: Any, pages: Path, tmp_path: Path) -> None:
    ink = "getComputedStyle(document.querySelector('[data-chart=\"loss-0\"] .xtitle')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    found = {}
    for scheme in ("light", "dark"):
        seen = opened(browser, pages / "one.html", scheme=scheme)
        seen.plot("loss-0")
        found[scheme] = seen.page.evaluate(ink), seen.page.evaluate(ground)
    assert found["dark"] != found["light"]
    seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    seen.until(f"{ink} === '{found['light'][0]}'")
    assert seen.page.evaluate(ground) == found["light"][1]
    seen.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    seen.until(f"{ink} === '{found['dark'][0]}'")
    write_report(RESULT, tmp_path)
    seen = opened(browser, tmp_path / "index.html", scheme="dark")
    assert seen.page.evaluate(ground) == found["dark"][1]
    seen.page.emulate_media(media="print", color_scheme="dark")
    assert seen.page.evaluate(ground) == found["light"][1]


def steps_of(records: list[Record]) -> list[Record]:
    return [record for record in records if record["kind"] == "step"]


def near(values: Iterable[float]) -> Any:
    return pytest.approx(list(values), rel=1e-6)


def test_plots_have_the_data_of_the_rank_that_is_chosen(browser: Any, pages: Path) -> None:
    seen, steps = opened(browser, pages / "one.html"), steps_of(FIRST)
    shown = seen.plot("loss-0")["training, each step"]
    points = [(x, y) for x, y in zip(shown["x"], shown["y"], strict=True) if y is not None and y == y]
    known = [(step["step"], near([step["loss"]])) for step in steps if step["loss"] is not None]
    assert [(x, [y]) for x, y in points] == known
    assert seen.plot("bytes-0")["dense_tail"]["y"] == near(step["sent_by_phase"]["dense_tail"] for step in steps)
    for rank in (0, 2, 1):
        seen.page.locator(f'.ranks button[data-rank="{rank}"]').click()
        figures = [step["ranks"][rank] for step in steps]
        assert seen.plot("split-0")["forward and backward"]["y"] == near(each["compute"] for each in figures)
        assert seen.plot("phases-0")["select"]["y"] == near(each["seconds"].get("select", 0) for each in figures)
    assert seen.complaints == []


@pytest.mark.long
def test_series_definitions_and_the_colour_scheme_are_switched(browser: Any, pages: Path) -> None:
    seen = opened(browser, pages / "one.html")
    for wanted in (False, True):
        seen.click("bytes-0", 'data-series="dense would send"')
        visible = {name: trace["visible"] for name, trace in seen.plot("bytes-0").items()}
        assert visible.pop("dense would send") is wanted
        assert all(visible.values())
    gather = seen.page.locator('[data-chart="bytes-0"] button[data-series="gather"]')
    assert gather.get_attribute("aria-pressed") == "true"
    seen.plot("loss-0")
    color = "getComputedStyle(document.querySelector('[data-chart=\"loss-0\"] .xtitle')).fill"
    light = seen.page.evaluate(color)
    seen.page.emulate_media(color_scheme="dark")
    seen.until(f"{color} !== '{light}'")
    seen.page.locator('[data-chart="loss-0"] a.definition').click()
    assert seen.page.locator("#def-a-training-run").is_visible()


def test_the_axis_is_chosen(browser: Any, pages: Path) -> None:
    seen = opened(browser, pages / "one.html")
    seconds = np.cumsum([sum(step["split"].values()) for step in steps_of(FIRST)])
    sent = np.cumsum([step["sent_bytes"] for step in steps_of(FIRST)])
    for axis, places in (("seconds", seconds), ("bytes", sent), ("step", np.arange(60))):
        seen.click("loss-0", f'data-axis="{axis}"')
        assert seen.plot("loss-0")["training, each step"]["x"] == near(places)
    seen.click("bytes-0", 'data-zoom="near"')
    seen.plot("bytes-0")
    top = seen.page.evaluate("document.querySelector('[data-chart=\"bytes-0\"] .plot').layout.yaxis.range[1]")
    bounds = [4 * (5 * (step["wanted"] - SIDE) + 2 * SIDE) * 2 / 3 for step in steps_of(FIRST)[20:]]
    assert top == pytest.approx(1.3 * max(bounds))


def test_another_run_is_chosen_and_names_are_texts(browser: Any, pages: Path) -> None:
    seen = opened(browser, pages / "both.html")
    assert seen.page.locator("h2.name").first.text_content() == EVIL
    ends = [trace["y"][-1] for trace in seen.plot("all-sent").values()]
    assert ends == near(sum(step["sent_bytes"] for step in steps_of(records)) for records in (FIRST, SECOND))
    seen.page.locator('nav.runs button[data-run="1"]').click()
    assert [seen.page.locator(f'article[data-run="{i}"]').is_visible() for i in (0, 1)] == [False, True]
    assert seen.plot("loss-1")["training, each step"]["y"] == near(step["loss"] for step in steps_of(SECOND))
    assert seen.complaints == []


@pytest.mark.long
@pytest.mark.alone
def test_a_run_of_100_000_steps_opens_in_less_than_3_seconds(browser: Any, tmp_path: Path) -> None:
    steps, made = 100_000, steps_of(make_run(steps=200, ranks=2, dense_steps=0))
    lines = [json.dumps({**step, "step": "@"}) for step in made]
    with (tmp_path / "metrics.jsonl").open("w") as file:  # 200 lines that differ, again and again
        file.write(json.dumps({**FIRST[0], "steps": steps}) + "\n")
        file.writelines(lines[number % 200].replace('"@"', str(number)) + "\n" for number in range(steps))
    report = make_report([load_run(tmp_path)])
    page = tmp_path / "long.html"
    page.write_text(make_page(report))
    assert page.stat().st_size < 6_000_000
    assert report.runs[0].table("ranks").rows[0][1] == sum(step["sent_bytes"] for step in made) * (steps // 200)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        seen = opened(browser, page)
        seen.until(f"{_DATA.format('loss-0')} !== undefined")
        seconds.append(time.perf_counter() - start)
        assert seen.complaints == []
        seen.page.context.close()
    print(f"opened in {min(seconds):.2f} to {max(seconds):.2f} s")
    assert min(seconds) < MOST_OPENING_S
