"""The DDP benchmarks run, at tiny sizes, so that they cannot rot."""

from __future__ import annotations

import math

import pytest

from benchmarks import overlap, step

TINY = ["--width", "64", "--layers", "3", "--batch", "8", "--rounds", "2"]


@pytest.mark.processes
def test_step_times_plain_dense_and_sparse() -> None:
    result = step.main(TINY)
    assert set(result["seconds"]) == {"plain DDP", "torch's hook", "dense phase", "sparse phase"}
    assert all(math.isfinite(row["median"]) and row["median"] > 0 for row in result["seconds"].values())
    assert all(result[key]["median"] > 0 for key in step.OVER.values())


@pytest.mark.parametrize(("dense", "holds"), [([1.0, 2.08, 9.0], True), ([1.1, 2.12, 2.0], False)])
def test_the_dense_phase_is_held_to_105_percent_of_plain_ddp_round_by_round(dense: list[float], holds: bool) -> None:
    """The slowest rank of each round counts, and the median of the rounds' ratios, not the ratio of two medians."""
    plain, quick = [1.0, 2.0, 2.0], [0.1, 0.1, 0.1]
    others = {"torch's hook": plain, "sparse phase": plain}
    summary = step.summary(
        [{"plain DDP": plain, "dense phase": quick, **others}, {"plain DDP": quick, "dense phase": dense, **others}]
    )
    assert summary["dense_over_plain"]["median"] == pytest.approx(dense[1] / 2)
    assert summary["dense_holds"] == holds


@pytest.mark.slow
@pytest.mark.processes
def test_overlap_times_backward_exchange_and_both() -> None:
    result = overlap.main([*TINY, "--mbit", "0"])
    seconds = result["seconds"]
    assert set(seconds) == {"backward", "serial", "overlapped", "exchange"}
    assert all(0 < seconds[kind]["min"] <= seconds[kind]["median"] for kind in ("backward", "serial", "overlapped"))
    assert result["buckets"] > 1  # one alone has nothing to overlap; that they do is tested in tests/ddp
