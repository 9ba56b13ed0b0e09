"""The DDP benchmarks run, at tiny sizes, so that they cannot rot."""

from __future__ import annotations

import math

import pytest

from bench import overlap, step

TINY = ["--width", "64", "--layers", "3", "--batch", "8", "--rounds", "2"]


@pytest.mark.processes
def test_step_times_plain_dense_and_sparse() -> None:
    result = step.main(TINY)
    assert set(result["seconds"]) == {"plain DDP", "torch's hook", "dense phase", "sparse phase"}
    assert all(math.isfinite(row["median"]) and row["median"] > 0 for row in result["seconds"].values())
    assert result["dense_over_plain"]["min"] <= result["dense_over_plain"]["median"]


@pytest.mark.slow
@pytest.mark.processes
def test_overlap_times_backward_exchange_and_both() -> None:
    result = overlap.main([*TINY, "--mbit", "0"])
    assert set(result["seconds"]) == {"backward", "serial", "overlapped", "exchange"}
    assert result["buckets"] >= 1
