"""Do the examples run, and do they show what they promise?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 55

SABOTAGE = """
import tempfile

import demo

def sabotaged(rank, *args):
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    demo.worker(rank, *args)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        demo.run_workers(sabotaged, 2, folder, 4, 2, None)
"""


def run(*command):
    """Run Python with the examples importable; nothing here may take longer than a test may."""
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    done = run(EXAMPLES / "demo.py", "--steps", 60, "--json", file)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


@pytest.mark.processes
def test_the_demo_says_what_it_does_before_and_after(demo):
    output, result = demo
    first, *_, last = output.strip().splitlines()
    assert f"{result['parameters']:,} parameters on 4 workers" in first
    assert "30 dense steps, then 30 steps of Ok-Topk" in output
    assert "first sparse step: sparsity 99." in output
    assert "bit for bit: yes" in output
    assert "compression was active on 30 of 60 steps" in output
    assert last.startswith("read next:")
    assert not re.search(r"\b(nan|inf|None)\b", output, re.IGNORECASE)


@pytest.mark.processes
def test_the_demo_learns(demo):
    _, result = demo
    dense, sparse = result["phases"]["dense"], result["phases"]["sparse"]
    assert result["first_loss"] > dense["loss_at_end"] > sparse["loss_at_end"]
    assert result["accuracy_after"] > result["accuracy_before"] + 0.2
    assert result["same_weights"]


@pytest.mark.processes
def test_the_demo_sends_less(demo):
    _, result = demo
    dense, sparse = result["phases"]["dense"], result["phases"]["sparse"]
    assert result["compressed_steps"] == sparse["steps"] == 30
    assert sparse["sparsity"] > 0.98
    assert dense["sparsity"] == 0
    assert sparse["sent_bytes"] < 0.05 * dense["sent_bytes"]
    assert {"accumulate", "select", "pack", "exchange", "reduce", "gather", "apply"} <= set(sparse["seconds"])


@pytest.mark.processes
def test_a_worker_that_fails_ends_the_demo_with_its_error(tmp_path):
    script = tmp_path / "sabotage.py"
    script.write_text(SABOTAGE)
    done = run(script)
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stderr


def test_the_demo_wants_a_step_of_each_kind():
    done = run(EXAMPLES / "demo.py", "--steps", 1)
    assert done.returncode == 2
    assert "at least 2" in done.stderr


@pytest.mark.processes
def test_the_readmes_lines_run_under_torchrun():
    """The README's diff, as a program: its two lines are in it, dense steps come first, the loss falls."""
    program = EXAMPLES / "ddp_minimal.py"
    (added,) = re.findall(r"^\+ (.*attach.*)$", (EXAMPLES.parent / "README.md").read_text(), re.MULTILINE)
    assert added.split("(")[0] in program.read_text()
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < 0.9 * losses[0]
    assert re.findall(r"(dense|sparse) +sparsity", done.stdout) == ["dense"] * 2 + ["sparse"] * 4
    assert "compression was active on 40 of 60 steps" in done.stdout
