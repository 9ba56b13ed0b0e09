"""A process forked from one that is attached, as a DataLoader's worker is: it ends at once, and disturbs nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddp.harness import run_script

pytestmark = pytest.mark.processes

SCRIPT = """
import atexit
import gc
import os
import sys
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
import oktopk

store, how = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
model = DDP(torch.nn.Linear(200, 200))
sink = oktopk.JsonlSink(store + ".jsonl")
handle = oktopk.attach(model, oktopk.OkTopk(density=0.01), dense_steps=1, sinks=[sink], timeout=30)


class Inputs(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        if how == "worker exits":
            sys.exit(1)  # not 0: of that DataLoader hears only when its timeout is over
        return torch.randn(200)


def child():
    global handle, model
    if how == "detaches":
        handle.detach()
    elif how == "collects":
        del handle, model
        gc.collect()
    else:
        atexit._run_exitfuncs()
    os._exit(0)  # as children of multiprocessing do: sys.exit() would wait for threads of torch's own world group


def ended(pid, seconds=20):
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    os.kill(pid, 9)
    return False


def step(inputs):
    model(inputs).square().mean().backward()


step(torch.randn(4, 200))
if how.startswith("worker"):
    try:
        for inputs in DataLoader(Inputs(), num_workers=1, multiprocessing_context="fork", timeout=20):
            step(inputs)
    except RuntimeError as error:
        assert "exited unexpectedly" in str(error), error
else:
    pid = os.fork()
    if pid == 0:
        child()
    assert ended(pid), "the child hangs"
step(torch.randn(4, 200))
assert handle.active
handle.detach()
print(handle.summary().steps, len(open(store + ".jsonl").readlines()))
"""


@pytest.mark.parametrize(
    ("how", "steps"),
    [("exits", 2), ("detaches", 2), ("collects", 2), ("worker ends", 4), ("worker exits", 2)],
)
def test_a_forked_child_leaves_threads_and_groups_to_its_parent(tmp_path: Path, how: str, steps: int) -> None:
    script = run_script(SCRIPT, str(tmp_path / "store"), how)
    assert script.returncode == 0, script.stderr
    assert script.stdout.split() == [str(steps)] * 2
