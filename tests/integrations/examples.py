"""Run an example as its user would, in processes of its own, and read what it printed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 200  # that a run of some ten seconds may take on a machine that is busy with other things


def run(*arguments: object, seconds: float = SECONDS, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python, stdout and stderr together; at the deadline end it and whatever it started."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    command, streams = [sys.executable, *map(str, arguments)], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, start_new_session=True, **streams)
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def run_example(*arguments: object) -> SimpleNamespace:
    """Run an example that has to succeed; return what it printed: everything, and what all examples print."""
    done = run(*arguments)
    output = done.stdout
    assert done.returncode == 0, output
    loss = re.search(r"loss (\d+\.\d+) -> (\d+\.\d+)", output)  # no match for nan or inf
    active = re.search(r"compression was active on (\d+) of (\d+) steps", output)
    assert loss, output
    assert active, output
    weights = dict(re.findall(r"rank (\d): weights ([0-9a-f]{16})", output))
    losses, active_of_steps = [float(each) for each in loss.groups()], tuple(map(int, active.groups()))
    return SimpleNamespace(output=output, losses=losses, active_of_steps=active_of_steps, weights=weights)
