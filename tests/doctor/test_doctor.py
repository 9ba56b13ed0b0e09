"""Does the doctor see what is here, say what could be better, and find a kernel that is wrong?"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from oktopk import __main__
from oktopk.cli.root import app
from oktopk.cuda import reference
from oktopk.doctor import FAIL, NOTE, Finding, here, report, selftest, speed
from oktopk.kernels import numba_cpu, numpy_cpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time a short vector."""
    monkeypatch.setattr(speed, "LSTM_NUMEL", 100_000)
    monkeypatch.setattr(speed, "SLOW", 0.0)


def examined(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_all_is_well_here() -> None:
    result = examined("--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["ok"]
    found = {(each["about"], each["name"]): each for each in report["findings"]}
    assert found["versions", "torch"]["found"].startswith(torch.__version__)
    assert found["device", "cpu"]["figures"]["threads"] == torch.get_num_threads()
    assert "gloo" in found["backends", "torch.distributed"]["found"]
    assert "numba" in found["kernels", "cpu"]["found"]
    assert {each["status"] for (about, _), each in found.items() if about == "self-test"} == {"ok"}
    assert found["speed", "add and select, cpu"]["figures"]["seconds"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU triton is wanted")
def test_the_table_says_the_same_without_triton_and_the_help_teaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises
    said = examined()
    assert said.exit_code == 0
    assert "all is well" in said.stdout
    assert "exchange, cpu" in said.stdout
    assert "FAIL is wrong" in examined("--help").stdout


@pytest.mark.parametrize("kernels", [numpy_cpu, numba_cpu], ids=["numpy", "numba"])
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    right = kernels.kth_largest
    monkeypatch.setattr(kernels, "kth_largest", lambda score, k: right(score, k) * (1 + 1e-6))
    (failed,) = selftest.kernels(CPU)
    assert failed.status == FAIL
    assert "kth_largest at " in failed.found
    assert f"seed {failed.figures['seed']}" in failed.found


def test_a_kernel_that_raises_is_a_finding_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_cpu, "pack", lambda *_: 1 / 0)
    result = examined()
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stdout
    assert "add and select" in result.stdout


def test_the_kernels_of_a_gpu_are_called_as_they_want_to_be() -> None:
    """Plain torch against itself, on the CPU: the calls are those of triton's, which are made on a GPU alone."""
    sizes = selftest.GPU_SIZES[:3]
    assert [line for size in sizes for line in selftest.triton_differences(reference, size, 1, CPU)] == []

    class Wrong:
        sample_threshold, accumulate_compact = reference.sample_threshold, reference.accumulate_compact
        pack_blocks = reference.pack_blocks

        @staticmethod
        def scatter_add(block: torch.Tensor, capacity: int, region: torch.Tensor) -> None:
            reference.scatter_add(block, capacity, region.neg_())

    assert any("scatter_add at" in line for line in selftest.triton_differences(Wrong, 3000, 1, CPU))


def test_an_exchange_that_loses_something_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing(selftest.Reducer):
        def all_reduce(self, grad: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
            return super().all_reduce(grad, out=out) * 0.99

    monkeypatch.setattr(selftest, "Reducer", Losing)
    (finding,) = selftest.exchange(CPU)
    assert finding.status == FAIL
    assert "is missing" in finding.found


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.kernels._compiled", lambda: numpy_cpu)
    monkeypatch.setattr(here, "version_of", lambda _: None)
    (finding,) = here.kernels(CPU)
    assert finding.status == NOTE
    assert "numba is not installed" in finding.found
    assert finding.advice == "pip install 'oktopk[cpu]'"


def test_it_runs_without_typer_and_rich_as_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "oktopk.cli.root")
    monkeypatch.setattr(sys, "argv", ["oktopk", "doctor"])
    for name in ("typer", "rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("info  versions   oktopk: ")
    assert lines[-1].startswith("all is well")


def test_a_failure_is_told_in_the_last_line_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("speed", "copy", "1 GB/s", FAIL, "why?", {"a": 1})]
    report.print_report(findings)
    assert capsys.readouterr().out.splitlines()[-1] == "something is wrong here: see the lines that say FAIL"
    report.print_report(findings, as_object=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["findings"][0]["figures"]) == (False, {"a": 1})
