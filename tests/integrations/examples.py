"""Run an example as its user would, in processes of its own, and read what it printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 200
"""What a run of some ten seconds may take on a machine that is busy with other things."""


@dataclass
class Ran:
    """What an example printed: everything, and what all of them print."""

    output: str
    losses: tuple[float, float]
    active: int
    steps: int
    weights: dict[int, str]


def run(*arguments: object, seconds: float = SECONDS, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python, stdout and stderr together; at the deadline end it and whatever it started."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def run_example(*arguments: object) -> Ran:
    """Run an example that has to succeed."""
    done = run(*arguments)
    assert done.returncode == 0, done.stdout
    loss = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)", done.stdout)  # no match for nan or inf
    active = re.search(r"compression was active on (\d+) of (\d+) steps", done.stdout)
    assert loss, done.stdout
    assert active, done.stdout
    weights = re.findall(r"rank (\d): weights ([0-9a-f]{16})", done.stdout)
    return Ran(
        done.stdout,
        losses=(float(loss[1]), float(loss[2])),
        active=int(active[1]),
        steps=int(active[2]),
        weights={int(rank): digest for rank, digest in weights},
    )
