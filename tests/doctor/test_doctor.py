"""Does the doctor see what is here, say what could be better, and find a kernel that is wrong?"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from oktopk import __main__
from oktopk.cuda import reference
from oktopk.doctor import here, selftest, speed
from oktopk.doctor.report import FAIL, NOTE
from oktopk.kernels import NUMPY
from oktopk.kernels.numba_cpu import NumbaKernels
from oktopk.kernels.numpy_cpu import NumpyKernels
from tests.commands import invoke
from tests.ddp.harness import check_words

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(speed, "LSTM_NUMEL", 100_000)
    monkeypatch.setattr(speed, "SLOW", 0.0)


def examined(*arguments):
    return invoke("doctor", *arguments)


def test_all_is_well_here():
    result = examined("--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["ok"]) == (0, True)
    found = {(each["about"], each["name"]): each for each in report["findings"]}
    assert found["versions", "torch"]["found"].startswith(torch.__version__)
    assert found["device", "cpu"]["figures"]["threads"] == torch.get_num_threads()
    assert "gloo" in found["backends", "torch.distributed"]["found"]
    assert "numba" in found["kernels", "cpu"]["found"]
    assert {each["status"] for (about, _), each in found.items() if about == "self-test"} == {"ok"}
    assert found["speed", "add and select, cpu"]["figures"]["seconds"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU triton is wanted")
def test_the_table_says_the_same_without_triton_and_the_help_teaches(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises
    said = examined()
    assert said.exit_code == 0
    check_words(said.stdout, "all is well", "exchange, cpu")
    assert "FAIL is wrong" in examined("--help").stdout


@pytest.mark.parametrize("kernels", [NumpyKernels, NumbaKernels])
def test_a_wrong_kernel_is_found(monkeypatch, kernels):
    right = kernels.kth_largest
    monkeypatch.setattr(kernels, "kth_largest", lambda self, score, k: right(self, score, k) * (1 + 1e-6))
    (failed,) = selftest.kernels(CPU)
    assert failed.status == FAIL
    check_words(failed.found, "kth_largest at ", f"seed {failed.figures['seed']}")


def test_a_kernel_that_raises_is_a_finding_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(NumpyKernels, "pack_", lambda *_: 1 / 0)
    table, report = examined(), examined("--json")
    assert (table.exit_code, report.exit_code) == (1, 1)
    check_words(table.stdout, "ZeroDivisionError", "add and select")
    assert table.stdout.splitlines()[-1] == "something is wrong here: see the lines that say FAIL"
    assert not json.loads(report.stdout)["ok"]


def test_the_kernels_of_a_gpu_are_called_as_they_want_to_be():
    """Plain torch against itself, on the CPU: the calls are those of triton's, which are made on a GPU alone."""
    sizes, wrong = selftest.GPU_SIZES[:3], SimpleNamespace(**vars(reference))
    assert [line for size in sizes for line in selftest.triton_differences(reference, size, 1, CPU)] == []
    wrong.scatter_add = lambda block, capacity, region: reference.scatter_add(block, capacity, region.neg_())
    assert any("scatter_add at" in line for line in selftest.triton_differences(wrong, 3000, 1, CPU))


def test_an_exchange_that_loses_something_is_found(monkeypatch):
    class Losing(selftest.Reducer):
        def all_reduce(self, grad, *, out=None):
            return super().all_reduce(grad, out=out) * 0.99

    monkeypatch.setattr(selftest, "Reducer", Losing)
    (finding,) = selftest.exchange(CPU)
    assert finding.status == FAIL
    assert "is missing" in finding.found


def test_without_numba_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("oktopk.kernels._compiled", lambda: NUMPY)
    monkeypatch.setitem(sys.modules, "oktopk.kernels.numba_cpu", None)
    (finding,) = here.kernels(CPU)
    assert (finding.status, finding.advice) == (NOTE, "pip install 'oktopk[cpu]'")
    assert "numba cannot be imported" in finding.found


def test_it_runs_without_typer_and_rich_as_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["oktopk", "doctor"])
    for name in ("typer", "rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("info  versions   oktopk  ")
    assert lines[-1].startswith("all is well")
