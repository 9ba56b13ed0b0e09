"""The commands, with tiny sizes: what they print, what they leave behind, and what they refuse."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from oktopk.bench import report, rounds
from oktopk.bench.methods import METHODS
from oktopk.bench.processes import Setting
from tests.commands import invoke

NUMEL = 20_000
HEADER_SHARE = 0.05  # of the bytes on a link, for TCP/IP's headers and acknowledgements of large messages
TURN_BYTES = 2000  # of headers, however little a turn sends
needs_a_lab = pytest.mark.usefixtures("lab_works")


def results(out: Path, *words: Any) -> dict[str, Any]:
    done = invoke("bench", *words, "--ranks", 2, "--out", out)
    assert done.exit_code == 0, done.output
    return {**json.loads((out / report.JSON).read_text()), "stdout": done.stdout}


def check_rows(setting: dict[str, Any], names: list[str]) -> dict[str, Any]:
    rows = {row["name"]: row for row in setting["rows"]}
    assert list(rows) == names
    for row in rows.values():
        assert len(row["rounds_s"]) == setting["rounds"] == 2
        assert row["seconds"]["min"] == min(row["rounds_s"]) > 0
        assert row["x_bf16"]["min"] > 0
    return rows


def check_probe(probe: dict[str, Any], methods: set[str]) -> None:
    assert {"all_gather", "all_to_all", "sendrecv", "all_reduce", "all_reduce bfloat16"} <= set(probe["alpha_s"])
    assert set(probe["beta_s_per_word"]) == set(probe["alpha_s"])
    assert all(seconds > 0 for seconds in probe["alpha_s"].values())
    computing = {row["method"]: row["seconds"] for row in probe["computing_s_per_element"]}
    assert set(computing) == methods
    assert computing["dense"] == 0
    assert computing["topka"] > 0


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("no_lab")
def test_an_exchange_over_the_loopback_by_every_method(tmp_path: Path) -> None:
    result = results(tmp_path, "exchange", "--numel", NUMEL, "--rounds", 2, "--methods", "all")
    (setting,) = result["settings"]
    rows = check_rows(setting, list(METHODS))
    check_probe(setting["probe"], set(METHODS))
    assert setting["mbit"] is None
    assert "loopback" in result["notes"][0]
    assert all(row["sent_bytes"] is None for row in rows.values())
    assert rows["dense"]["record_bytes"] == 2 * rows["bf16"]["record_bytes"] == 4 * NUMEL
    unknown = {name for name, row in rows.items() if row["predicted_s"] is None}
    assert unknown == {"powersgd-1", "powersgd-2", "powersgd-4"}
    ours = rows["oktopk"]
    assert ours["error_percent"] == pytest.approx(100 * (ours["predicted_s"] / ours["seconds"]["median"] - 1))
    assert result["bench"] == "exchange"
    assert {"date", "command", "hardware", "versions", "numel", "pays"} <= set(result)


@pytest.mark.slow
@needs_a_lab
@pytest.mark.processes
def test_an_exchange_in_the_lab_leaves_files_and_counts_bytes(tmp_path: Path) -> None:
    """The interface sees what the record says, and headers: a size at which they are the lesser part."""
    words = ["--numel", 20 * NUMEL, "--mbit", 1000, "--density", 0.1, "--rounds", 2, "--methods", "dense,bf16,oktopk"]
    result = results(tmp_path, "exchange", *words)
    assert "P = 2, 1000 Mbit/s, n = 400,000, density 0.1, 2 rounds" in result["stdout"]
    for row in check_rows(*result["settings"], ["dense", "bf16", "oktopk"]).values():
        assert row["record_bytes"] < row["sent_bytes"] < (1 + HEADER_SHARE) * row["record_bytes"] + TURN_BYTES
    files = {report.JSON, report.CSV, report.PAGE, "methods.png", "methods.svg"}
    assert {file.name for file in tmp_path.iterdir()} == files


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("no_lab")
def test_a_step_of_a_model_of_ones_own(tmp_path: Path) -> None:
    methods = ["dense", "bf16", "fp16", "powersgd-1", "topka", "oktopk"]
    words = ["--model", "examples.bench_factory:make", "--rounds", 2, "--methods", ",".join(methods)]
    result = results(tmp_path, "step", *words)
    rows = check_rows(*result["settings"], ["no exchange", *methods])
    assert all({"forward", "backward"} <= set(row["parts_s"]) for row in rows.values())
    assert {"wait", "select"} <= set(rows["oktopk"]["parts_s"])
    assert rows["no exchange"]["record_bytes"] == 0
    assert rows["oktopk"]["record_bytes"] > 0
    assert "no exchange" not in {verdict["name"] for verdict in result["pays"]}


@pytest.mark.slow
@needs_a_lab
@pytest.mark.processes
def test_a_sharded_step_sends_sparsely_between_the_nodes(tmp_path: Path) -> None:
    words = ["--model", "examples.bench_factory:make", "--ranks", 4, "--shard", 2, "--mbit", 1000, "--rounds", 2]
    done = invoke("bench", "step", *words, "--methods", "dense,bf16,oktopk", "--out", tmp_path)
    assert "P = 2 x 2, 1000 Mbit/s" in done.stdout, done.output
    (setting,) = json.loads((tmp_path / report.JSON).read_text())["settings"]
    rows = {row["name"]: row for row in setting["rows"]}
    assert rows["no exchange"]["sent_bytes"] < rows["oktopk"]["sent_bytes"] < rows["bf16"]["sent_bytes"]
    assert 1.8 * rows["bf16"]["sent_bytes"] < rows["dense"]["sent_bytes"]


@pytest.mark.slow
@needs_a_lab
@pytest.mark.processes
def test_a_step_in_the_lab_shows_its_split_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_SECONDS", 0.0)
    words = ["--model", "an4-small", "--ranks", 2, "--mbit", 100, "--rounds", 9]
    done = invoke("bench", "step", *words, "--methods", "dense,oktopk")
    assert done.exit_code == 0, done.output
    assert "density 0.01, 1 round\n" in "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert "no exchange: forward" in done.stdout
    assert "of it waiting for the exchange: accumulate" in done.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("no_lab")
def test_a_probe_by_itself(tmp_path: Path) -> None:
    result = results(tmp_path, "probe", "--numel", NUMEL, "--methods", "dense,bf16,topka")
    assert "all_reduce bfloat16" in result["stdout"]
    check_probe(result["settings"][0]["probe"], {"dense", "bf16", "topka"})


@pytest.mark.usefixtures("no_lab")
def test_a_narrow_terminal_shows_a_bar_of_turns_and_whole_names(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = {"seconds": 1.0, "sent_bytes": None, "record_bytes": None, "parts": {"forward": 1.0, "backward": 1.0}}

    def run(_: Setting, *args: Any, show: Any) -> Any:
        *_, entries, samples = args
        Path(samples.turns_file).write_bytes(b"....")
        show()
        return [[[sample] * 5 for _ in entries]] * 2

    monkeypatch.setattr(Setting, "run", run)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    names = ["dense", "oktopk-bf16", "oktopk-int8"]
    words = ["--model", "examples.bench_factory:make", "--rounds", 2, "--methods", ",".join(names)]
    done = invoke("bench", "step", *words, columns=70)
    assert "4/20" in done.stderr
    table = done.stdout.partition("forward")[0]
    assert [name for name in names if name not in table] == []
    assert "…" not in table


@pytest.mark.parametrize(("words", "said"), [
    (["exchange", "--methods", "oktop"], "Did you mean 'oktopk'"),
    (["exchange", "--mbit", "fast"], "--mbit wants a number"),
    (["exchange", "--mbit", "-1"], "--mbit must be at least 0"),
    (["exchange", "--ranks", "1"], "--ranks must be at least 2"),
    (["probe", "--density", "2"], "--density must be above 0 and at most 1"),
    (["exchange", "--delay-ms", "-1"], "--delay-ms must be at least 0"),
    (["exchange", "--out", __file__], "--out wants a folder"),
    (["step", "--model", "lstm"], "Did you mean 'lstman4'"),
    (["step", "--shard", "2", "--methods", "powersgd-1"], "powersgd-1 is a hook of DDP"),
    (["step", "--shard", "4", "--model", "an4-small"], "--shard 4 wants --ranks of several times 4, such as 8, not 4"),
    (["step", "--model", "no.such:thing"], "cannot find the model no.such:thing"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line_before_anything_is_measured(words: list[str], said: str) -> None:
    done = invoke("bench", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_the_bench_extra_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke("bench", "exchange", "--out", tmp_path / "results")
    assert done.exit_code == 2
    assert "pip install 'oktopk[bench]'" in done.stderr
    assert not (tmp_path / "results").exists()


@needs_a_lab
@pytest.mark.slow
@pytest.mark.processes
def test_local_steps_in_the_lab(tmp_path: Path) -> None:
    words = ("--numel", 100_000, "--mbit", 20, "--delay-ms", 5, "--every", 4, "--compute-s", 0.05, "--rounds", 1)
    result = results(tmp_path, "local", *words)
    rows = {row["method"]: row for row in result["settings"][0]["rows"]}
    assert list(rows) == ["ddp", "dense", "int8", "oktopk", "streamed"]
    assert all(0 < row["utilisation"] <= 1 for row in rows.values())
    assert rows["ddp"]["steps"] == 1
    assert rows["oktopk"]["steps"] == 4
    assert rows["dense"]["down_bytes"] > 3 * rows["int8"]["down_bytes"]
    assert rows["ddp"]["down_bytes"] > 3 * rows["dense"]["down_bytes"] > 30 * rows["oktopk"]["down_bytes"]
    assert "OkTopk in 4 fragments" in result["stdout"]
