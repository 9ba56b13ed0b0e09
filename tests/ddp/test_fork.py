"""A process forked from one that is attached, as a DataLoader's worker is: it ends at once, and disturbs nobody."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import oktopk
from tests.ddp.harness import attach, run_script

pytestmark = pytest.mark.processes


def forked(child: Callable[[], Any]) -> None:
    """Run `child` in a fork; fail unless it ends in time."""
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)  # as children of multiprocessing do: sys.exit() would wait for threads of torch's own world group
    give_up = time.monotonic() + 20
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > give_up:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.02)


def fork_in_every_way(folder: str) -> None:
    """Train, fork between steps, and print the numbers of steps and records."""
    path = Path(folder) / "records.jsonl"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    model = DDP(torch.nn.Linear(200, 200))
    kept = {"handle": attach(model, oktopk.OkTopk(density=0.01), dense_steps=1, sinks=[oktopk.JsonlSink(path)])}

    def step(inputs: torch.Tensor) -> None:
        model(inputs).square().mean().backward()

    def collect() -> None:
        nonlocal model
        kept.clear()
        del model
        gc.collect()

    for child in (atexit._run_exitfuncs, lambda: kept["handle"].detach(), collect):
        step(torch.randn(4, 200))
        forked(child)
    worker = multiprocessing.get_context("fork").Process(target=sys.exit)
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0
    for inputs in DataLoader(torch.randn(2, 200), num_workers=1, multiprocessing_context="fork", timeout=20):  # type: ignore[arg-type]
        step(inputs)
    assert kept["handle"].active
    kept["handle"].detach()
    sys.stdout.write(f"{kept['handle'].summary().steps} {len(path.read_text().splitlines())}")


def test_a_forked_child_leaves_threads_and_groups_to_its_parent(tmp_path: Path) -> None:
    source = "import sys; from tests.ddp.test_fork import fork_in_every_way; fork_in_every_way(sys.argv[1])"
    script = run_script(source, str(tmp_path))
    assert script.returncode == 0, script.stderr
    assert script.stdout == "5 5"
