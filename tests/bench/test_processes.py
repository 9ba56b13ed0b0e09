"""Processes that end badly are named, and those that end well leave nothing to their exit."""

import os
import signal
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

from oktopk.bench.processes import run_processes
from oktopk.errors import PeerError


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "killed, most likely for want of memory"), (signal.SIGTERM, "ended by SIGTERM")],
)
def test_a_rank_that_a_signal_ends_is_named(number: int, said: str) -> None:
    with pytest.raises(PeerError, match=rf"rank \d was {said}"):
        run_processes(end_by, 1, int(number))


class Cycle:
    def __init__(self, path: str) -> None:
        self.me = self
        weakref.finalize(self, lambda: Path(path).write_text(str(dist.is_initialized())))


def leave_a_cycle(path: str) -> None:
    Cycle(path)


def test_reference_cycles_are_collected_before_the_group_is_destroyed(tmp_path: Path) -> None:
    run_processes(leave_a_cycle, 1, str(tmp_path / "initialized"))
    assert (tmp_path / "initialized").read_text() == "True"
