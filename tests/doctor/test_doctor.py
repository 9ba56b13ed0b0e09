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
from oktopk.cuda import reference as blocks
from oktopk.doctor import FAIL, NOTE, Finding, here, selftest, speed
from oktopk.doctor import __main__ as plain
from oktopk.kernels import numba_cpu, numpy_cpu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time a short vector."""
    monkeypatch.setattr(speed, "LSTM_NUMEL", 100_000)
    monkeypatch.setattr(speed, "SLOW", 0.0)


def examined(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def findings(result: Result, about: str) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(result.stdout)["findings"] if each["about"] == about}


def test_all_is_well_here() -> None:
    result = examined("--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"]
    assert findings(result, "versions")["torch"]["found"].startswith(torch.__version__)
    assert findings(result, "device")["cpu"]["figures"]["threads"] == torch.get_num_threads()
    assert "gloo" in findings(result, "backends")["torch.distributed"]["found"]
    assert "numba" in findings(result, "kernels")["cpu"]["found"]
    assert {each["status"] for each in findings(result, "self-test").values()} == {"ok"}
    assert findings(result, "speed")["add and select, cpu"]["figures"]["seconds"] > 0


def test_the_table_says_the_same_and_the_help_teaches() -> None:
    said = examined()
    assert said.exit_code == 0
    assert "all is well" in said.stdout
    assert "exchange, cpu" in said.stdout
    assert "FAIL is wrong" in examined("--help").stdout


@pytest.mark.parametrize("kernels", [numpy_cpu, numba_cpu], ids=["numpy", "numba"])
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    right = kernels.kth_largest
    monkeypatch.setattr(kernels, "kth_largest", lambda score, k: right(score, k) * (1 + 1e-6))
    result = examined("--json")
    assert result.exit_code == 1
    failed = findings(result, "self-test")["kernels, cpu"]
    assert failed["status"] == FAIL
    assert "kth_largest at " in failed["found"]
    assert f"seed {failed['figures']['seed']}" in failed["found"]


def test_a_kernel_that_raises_is_a_finding_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_cpu, "pack", lambda *_: 1 / 0)
    result = examined()
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stdout
    assert "add and select" in result.stdout


def test_the_kernels_of_a_gpu_are_called_as_they_want_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch against itself, on the CPU: the calls are those of triton's, which are made on a GPU alone."""
    tried = [line for size in selftest.GPU_SIZES for line in selftest.triton_differences(blocks, size, 1, CPU)]
    assert tried == []

    class Wrong:
        sample_threshold, accumulate_compact = blocks.sample_threshold, blocks.accumulate_compact
        pack_blocks = blocks.pack_blocks

        @staticmethod
        def scatter_add(block: torch.Tensor, capacity: int, region: torch.Tensor) -> None:
            blocks.scatter_add(block, capacity, region.neg_())

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU triton is wanted")
def test_triton_is_not_imported_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises
    assert examined().exit_code == 0


def test_it_runs_where_the_command_line_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "oktopk.cli.root")
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["oktopk", "doctor"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all is well")


def test_plain_json_is_the_same_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plain, "examine", lambda: [Finding("speed", "copy", "1 GB/s", FAIL, "why?", {"a": 1})])
    with pytest.raises(SystemExit) as ended:
        plain.main(["--json"])
    assert ended.value.code == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["figures"] == {"a": 1}
