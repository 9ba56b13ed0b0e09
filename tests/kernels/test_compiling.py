"""Kernels are compiled before the first step, never inside one."""

import pytest
import torch

from oktopk import Reducer, run_local
from oktopk.kernels import WORTH_COMPILING
from oktopk.reducer import compile_kernels
from tests.cases import COVER, algorithms

numba_cpu = pytest.importorskip("oktopk.kernels.numba_cpu")


def compiled() -> dict[str, int]:
    """Return the number of types for which each kernel is compiled."""
    return {name: len(kernel.signatures) for name, kernel in vars(numba_cpu).items() if hasattr(kernel, "signatures")}


def test_no_step_compiles_a_kernel_after_they_were_made_ready() -> None:
    """More ranks, elements and steps than the set-up makes, with sweeps, new scales and new thresholds."""

    def work(comm) -> None:
        reducer = Reducer(algorithm, comm)
        for number in range(18):
            reducer.all_reduce(torch.randn(WORTH_COMPILING + 5, generator=torch.Generator().manual_seed(number)))

    for algorithm in (algorithms(0.03)[name] for name in (COVER[1], *COVER[-2:])):
        compile_kernels(algorithm, torch.float32)
        before = compiled()
        run_local(3, work)
        assert compiled() == before, algorithm
    assert any(before.values())
