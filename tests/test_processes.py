"""Threads and gloo processes give the same bits, so that what is tested on threads is known of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oktopk import Dense
from tests.cases import COVER, DTYPES, Case, algorithms, trace
from tests.harness import Processes, on_threads
from tests.laws import check_every_law, same_bits, same_run

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", COVER)
def test_threads_and_processes_give_the_same_bits(processes: Processes, name: str) -> None:
    """One run of each algorithm; of a vector shorter than the ranks are many, too."""
    algorithm = algorithms(0.03, rethreshold_every=2, repartition_every=3)[name]
    dtype = DTYPES[COVER.index(name) % 4]
    for size, numel, kind in ((3, 3001, "skew"), (4, 3 * (COVER.index(name) % 2), "heavy tails")):
        case = Case(algorithm, size, numel, kind, dtype, steps=5)
        real = processes.run(size, trace, case)
        check_every_law(case, real)
        same_run(real, on_threads(size, trace, case))


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4))])
def test_a_long_dense_vector_has_the_same_bits(processes: Processes, size: int) -> None:
    """Long enough for gloo to cut its ring's pieces at their largest size, and not a multiple of anything."""
    case = Case(Dense(), size, numel=3_000_001, steps=1)
    real, threads = processes.run(size, checksum, case), on_threads(size, checksum, case)
    assert all(same_bits(a, b) for a, b in zip(real, threads, strict=True))


def checksum(comm: Any, case: Case) -> Tensor:
    """Return the sum's bits in a form that is quick to send: the whole vector would take longer than its reduction."""
    mean = trace(comm, case)[0].mean
    bits = mean.view(torch.int32).long()
    place = torch.arange(1, len(bits) + 1)
    return torch.stack([bits.sum(), (bits * place).sum(), (bits * place % 1_000_003).sum()])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_of_many_lengths_have_the_same_bits(processes: Processes, size: int) -> None:
    for ours, theirs in zip(processes.run(size, sums), on_threads(size, sums), strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


def sums(comm: Any) -> list[Tensor]:
    lengths = [*range(10), 15, 16, 17, 31, 63, 64, 65, 100, 127, 255, 1000, 4097, 65_537, 300_001]
    generator = torch.Generator().manual_seed(comm.rank)
    return [
        comm.all_reduce(torch.randn(length, generator=generator, dtype=dtype))
        for length in lengths
        for dtype in (torch.float32, torch.float64)
    ]
