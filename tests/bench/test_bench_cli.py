"""The commands, with tiny sizes: what they print, what they leave behind, and what they refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import CliRunner

from oktopk.bench import report, settings, suite
from oktopk.bench.methods import METHODS
from oktopk.bench.netlab import LabError
from oktopk.cli.root import app

NUMEL = 20_000
HEADER_SHARE = 0.05
"""Of the bytes on a link, for TCP/IP's headers and acknowledgements of large messages."""
LAP_BYTES = 2000
"""Of headers, however little a lap sends."""


def why_no_lab() -> str:
    try:
        settings.check_possible()
    except LabError as error:
        return str(error)
    return ""


needs_a_lab = pytest.mark.skipif(bool(why := why_no_lab()), reason=why)


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def results(out: Path, *words: Any) -> dict[str, Any]:
    done = invoke(*words, "--out", out)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((out / report.JSON).read_text())
    return found


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise LabError("there is none here")

    monkeypatch.setattr(settings, "check_possible", refuse)


def check_rows(setting: dict[str, Any], names: list[str], rounds: int) -> None:
    rows = {row["name"]: row for row in setting["rows"]}
    assert list(rows) == names
    for row in rows.values():
        assert len(row["rounds_s"]) == setting["rounds"] == rounds
        assert row["seconds"]["median"] == median(row["rounds_s"])
        assert row["seconds"]["min"] == min(row["rounds_s"]) > 0
        for rival in ("dense", "bf16"):
            ratios = [their / our for their, our in zip(rows[rival]["rounds_s"], row["rounds_s"], strict=True)]
            assert row[f"x_{rival}"]["median"] == pytest.approx(median(ratios))


@pytest.mark.processes
@pytest.mark.usefixtures("no_lab")
@pytest.mark.slow
def test_an_exchange_over_the_loopback_by_every_method(tmp_path: Path) -> None:
    words = ["--numel", NUMEL, "--ranks", 2, "--rounds", 2, "--methods", "all"]
    result = results(tmp_path, "exchange", *words)
    (setting,) = result["settings"]
    check_rows(setting, list(METHODS), rounds=2)
    check_probe(setting["probe"], set(METHODS))
    assert setting["mbit"] is None
    assert "loopback" in result["notes"][0]
    rows = {row["name"]: row for row in setting["rows"]}
    assert all(row["sent_bytes"] is None for row in rows.values())
    assert rows["dense"]["record_bytes"] == 2 * rows["bf16"]["record_bytes"] == 4 * NUMEL
    assert {name for name, row in rows.items() if row["predicted_s"] is None} == {
        f"powersgd-{rank}" for rank in (1, 2, 4)
    }
    assert rows["oktopk"]["error_percent"] == pytest.approx(
        100 * (rows["oktopk"]["predicted_s"] / rows["oktopk"]["seconds"]["median"] - 1)
    )
    assert result["bench"] == "exchange"
    assert {"date", "command", "hardware", "versions", "numel", "pays"} <= set(result)


@pytest.mark.slow
@needs_a_lab
@pytest.mark.processes
def test_an_exchange_in_the_lab_leaves_files_and_counts_bytes(tmp_path: Path) -> None:
    """The interface sees what the record says, and headers: a size at which they are the lesser part."""
    words = ["--numel", 20 * NUMEL, "--ranks", 2, "--mbit", 1000, "--density", 0.1, "--rounds", 2]
    done = invoke("exchange", *words, "--methods", "dense,bf16,oktopk", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "P = 2, 1000 Mbit/s, n = 400,000, density 0.1, 2 rounds" in done.stdout
    (setting,) = json.loads((tmp_path / report.JSON).read_text())["settings"]
    check_rows(setting, ["dense", "bf16", "oktopk"], rounds=2)
    for row in setting["rows"]:
        assert row["record_bytes"] < row["sent_bytes"] < (1 + HEADER_SHARE) * row["record_bytes"] + LAP_BYTES
    assert {file.name for file in tmp_path.iterdir()} == {report.JSON, report.CSV, report.PAGE}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("no_lab")
def test_a_step_of_a_model_of_ones_own(tmp_path: Path) -> None:
    words = ["--model", "examples.bench_factory:make", "--ranks", 2, "--rounds", 2]
    result = results(tmp_path, "step", *words, "--methods", "dense,bf16,fp16,powersgd-1,topka,oktopk")
    (setting,) = result["settings"]
    check_rows(setting, ["no exchange", "dense", "bf16", "fp16", "powersgd-1", "topka", "oktopk"], rounds=2)
    rows = {row["name"]: row for row in setting["rows"]}
    assert all({"forward", "backward"} <= set(row["parts_s"]) for row in rows.values())
    assert {"wait", "select"} <= set(rows["oktopk"]["parts_s"])
    assert rows["no exchange"]["record_bytes"] == 0
    assert rows["oktopk"]["record_bytes"] > 0
    assert "no exchange" not in {verdict["name"] for verdict in result["pays"]}


@needs_a_lab
@pytest.mark.processes
@pytest.mark.slow
def test_a_step_in_the_lab_shows_its_split_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "MOST_SECONDS", 0.0)
    words = ["--model", "an4-small", "--ranks", 2, "--mbit", 100, "--rounds", 9]
    done = invoke("step", *words, "--methods", "dense,oktopk")
    assert done.exit_code == 0, done.output
    assert "density 0.01, 1 round\n" in "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert "no exchange: forward" in done.stdout
    assert "of it waiting for the exchange: accumulate" in done.stdout


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("no_lab")
def test_a_probe_by_itself(tmp_path: Path) -> None:
    words = ["--numel", NUMEL, "--ranks", 2, "--methods", "dense,bf16,topka"]
    done = invoke("probe", *words, "--out", tmp_path)
    assert "all_reduce bfloat16" in done.stdout
    probed = json.loads((tmp_path / report.JSON).read_text())["settings"][0]["probe"]
    check_probe(probed, {"dense", "bf16", "topka"})


def check_probe(probe: dict[str, Any], methods: set[str]) -> None:
    assert {"all_gather", "all_to_all", "sendrecv", "all_reduce", "all_reduce bfloat16"} <= set(probe["alpha_s"])
    assert set(probe["beta_s_per_word"]) == set(probe["alpha_s"])
    assert all(seconds > 0 for seconds in probe["alpha_s"].values())
    computing = {row["method"]: row["seconds"] for row in probe["computing_s_per_element"]}
    assert set(computing) == methods
    assert computing["dense"] == 0
    assert computing["topka"] > 0


@pytest.mark.parametrize("command", ["exchange", "step", "probe"])
def test_help_names_the_methods(command: str) -> None:
    done = invoke(command, "--help")
    assert done.exit_code == 0
    assert "oktopk-bf16" in done.stdout
    assert "--mbit" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exchange", "--methods", "oktop"], "Did you mean 'oktopk'"),
        (["exchange", "--mbit", "fast"], "--mbit wants a number"),
        (["exchange", "--mbit", "-1"], "--mbit must be at least 0"),
        (["exchange", "--ranks", "1"], "--ranks must be at least 2"),
        (["exchange", "--density", "2"], "--density must be above 0 and at most 1"),
        (["exchange", "--delay-ms", "-1"], "--delay-ms must be at least 0"),
        (["step", "--model", "lstm"], "Did you mean 'lstman4'"),
        (["step", "--model", "no.such:thing"], "cannot find the model no.such:thing"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words: list[str], said: str) -> None:
    done = invoke(*words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_lab")
def test_a_link_that_cannot_be_made_is_refused_in_a_line() -> None:
    done = invoke("exchange", "--mbit", "100,0")
    assert done.exit_code == 2
    assert "wanted links of 100 Mbit/s, but there is none here; --mbit 0" in done.stderr


def test_without_the_report_extra_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke("exchange", "--out", tmp_path / "results")
    assert done.exit_code == 2
    assert "pip install 'oktopk[report]'" in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    done = invoke("exchange", "--out", tmp_path / "results")
    assert done.exit_code == 2
    assert "--out wants a folder" in done.stderr
