"""The command: what it prints, what it leaves behind, and what it refuses."""

import json
from pathlib import Path

import pytest

from oktopk.plan import show
from tests.commands import call, invoke, refused

SIZE = "--numel 1000000 --compute-ms 50 --ranks 4"
METHOD_KEYS = {
    "name", "step_s", "exchange_s", "hidden_s", "than_dense", "sent_bytes", "outer_bytes", "memory_bytes", "learning",
    "to_loss_s", "hours", "cost", "code",
}  # fmt: skip


def test_a_plan_is_a_table_a_sentence_and_a_line_to_paste() -> None:
    done = call("plan", SIZE)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "4 x host (1000 Mbit/s, 0.1 ms)"
    assert lines[-2].startswith(("Use ", "Do not compress"))
    assert "oktopk.attach" in lines[-1] or "register_comm_hook" in lines[-1] or "DistributedDataParallel" in lines[-1]


def test_json_has_every_method_the_verdict_and_the_plot() -> None:
    plan = json.loads(call("plan", f"{SIZE} --json").stdout)
    assert set(plan) == {"version", "model", "ranks", "levels", "methods", "verdict", "plot"}
    assert (plan["version"], plan["ranks"], plan["model"]["numel"]) == (show.VERSION, 4, 1_000_000)
    assert all(set(row) == METHOD_KEYS for row in plan["methods"])
    assert set(plan["verdict"]) == {"sentence", "use", "code", "gain", "low", "high", "break_even_mbit"}
    assert all(len(seconds) == len(plan["plot"]["mbit"]) for seconds in plan["plot"]["seconds"].values())
    assert {"dense", plan["verdict"]["use"]} <= set(plan["plot"]["seconds"])


def test_a_file_with_levels_and_a_price_makes_two_levels_hours_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "[model]\nnumel = 1000000\ncompute_ms = 50\n[[level]]\nname = 'GPU'\nsize = 2\nmbit = 1e6\n"
        "[[level]]\nname = 'node'\nsize = 2\nmbit = 100\n[training]\nsteps = 1000\n"
        "[money]\nrank_hour = 2\ngigabyte = 1\n"
    )
    done = invoke("plan", tmp_path / "c.toml", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    plan = json.loads((tmp_path / "out" / show.JSON).read_text())
    dense = plan["methods"][0]
    assert dense["hours"] == pytest.approx(1000 * dense["step_s"] / 3600)
    gigabytes = 1e-9 * dense["outer_bytes"] * 2 * 1000
    assert dense["cost"] == pytest.approx(4 * 2 * dense["hours"] + gigabytes)
    assert any(row["name"].endswith("two levels") for row in plan["methods"])
    assert (tmp_path / "out" / show.PLOT).stat().st_size > 0


@pytest.mark.parametrize(("words", "says"), [
    ("--numel 5 --compute-ms 1", "say how many ranks there are"),
    ("--ranks 4", "say what trains"),
    ("--ranks 4 --numel 5", "--compute-ms must be above 0"),
    ("--ranks 4 --numel 5 --compute-ms 1 --optimizer adan", "unknown optimizer 'adan'"),
    ("--ranks 4 --numel 5 --model wide", "name one of them"),
    ("--ranks 5000 --numel 5 --compute-ms 1", "at most 4096"),
    ("nowhere.toml", "No such file"),
])  # fmt: skip
def test_a_plan_without_its_facts_is_refused(words: str, says: str) -> None:
    assert says in refused("plan", words)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_model_is_profiled_here() -> None:
    plan = json.loads(call("plan", "--model gpt-tiny --batch 2 --ranks 4 --json").stdout)
    assert plan["model"]["numel"] == 426_624
    assert plan["model"]["forward_s"] > 0
    assert {"all_reduce", "all_to_all", "all_gather"} <= set(plan["model"]["host"]["word_s"])
    assert {"OkTopk()", "bf16", "powersgd-1"} <= set(plan["model"]["host"]["computing"])
