"""The harness of these tests: a run that hangs is named by it, before pytest ends the test."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.train import runs


def say_and_hang(rank: int) -> None:
    print(f"worker {rank} waits", flush=True)
    time.sleep(600)


@pytest.mark.processes
def test_a_run_that_hangs_is_named_with_what_it_printed(tmp_path: Path, tiny: dict[str, Any]) -> None:
    def until_it_waits(_: list[Any]) -> None:
        deadline = time.monotonic() + runs.seconds_left()
        while not any("waits" in path.read_text() for path in tmp_path.glob(".store-*-out0")):
            assert time.monotonic() < deadline, "the worker did not begin"
            time.sleep(0.05)
        runs.set_deadline(0.5)

    with pytest.raises(AssertionError, match=r"rank 0 did not end in \d+ s\nworker 0 waits"):
        runs.train(tmp_path / "run", **tiny, prepare=say_and_hang, watch=until_it_waits)


@pytest.mark.timeout(280)
def test_the_deadline_of_a_run_is_before_that_of_its_test() -> None:
    assert 200 < runs.seconds_left() <= 280 - runs.MARGIN_S
