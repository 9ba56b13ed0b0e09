"""Do the examples run, and do they show what they promise?"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 55


def run(*command, cwd=None, seconds=SECONDS):
    """Run Python with the examples importable; nothing here may take longer than a test may."""
    path = os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.processes
def test_the_first_hours_script_prints_the_figures_of_its_page(tmp_path):
    """Times differ from run to run. The rows of counts and bytes do not, but for the processor's rounding."""
    page = (EXAMPLES.parent / "docs" / "first-hour.md").read_text()
    (tmp_path / "ddp.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ddp.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown, printed = (figures_of(text) for text in (page, done.stdout))
    assert len(shown) == 4
    for name, figures in shown.items():
        assert printed[name] == pytest.approx(figures, rel=0.02), name
    for line in ("compression was active on 100 of 120 steps", "oktopk: OkTopk(density=0.03) on 2 ranks: 20 dense"):
        assert line in page
        assert line in done.stdout + done.stderr
    report = run("-m", "oktopk", "report", "--text", tmp_path / "metrics.jsonl")
    assert report.returncode == 0, report.stderr
    for row in (r"│ loss +│ +0\.1", r"│ steps +│ +120 │ 20 dense, 100 sparse", r"│ sent, of dense +│ +18\.\d %"):
        assert re.search(row, page)
        assert re.search(row, report.stdout)


def figures_of(text):
    """Return the summary's rows that do not depend on the machine: its dense and its sparse figure, by name."""
    rows = re.findall(r"^(steps|sparsity|sent_bytes_per_step|sent, of a dense step) {2,}(\S+).*? {2,}(\S+)", text, re.M)
    return {name: [float(figure.replace(",", "")) for figure in figures] for name, *figures in rows}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(150)
def test_local_steps_run_resume_and_can_be_reported(tmp_path):
    program = EXAMPLES / "local_steps.py"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, "--folder", tmp_path)
    losses = []
    for _ in range(2):  # the second run goes on from the first one's checkpoint
        done = run(*torchrun)
        assert done.returncode == 0, done.stderr
        losses += [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
        assert "compression was active on 30 of 30 steps" in done.stdout
    first, *_, resumed, _, _, _, _, last = losses
    assert max(resumed, last) < 0.7 * first
    report = run("-m", "oktopk", "report", "--text", tmp_path / "metrics.jsonl")
    assert report.returncode == 0, report.stderr
    assert "sent, of dense" in report.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_the_sharded_example_runs_on_two_replicas_of_two_shards():
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", EXAMPLES / "fsdp2_hsdp.py")
    assert done.returncode == 0, done.stderr
    assert "on 2 replicas of 2 shards" in done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < 0.9 * losses[0]
    assert "compression was active on 40 of 60 steps" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_members_under_torchft_outlive_a_kill_and_end_with_the_same_bits():
    pytest.importorskip("torchft", reason="oktopk[torchft] is not installed")
    done = run(EXAMPLES / "torchft_ddp.py", "--kill", seconds=180)
    assert done.returncode == 0, done.stderr
    weights = re.findall(r"weights (\w+)", done.stdout)
    assert len(weights) == 3
    assert len(set(weights)) == 1
    assert "step 40 is not committed" in done.stdout
    returned_at = [int(step) for step in re.findall(r"member 1: step (\d+), 3 members", done.stdout)]
    assert returned_at[-1] > 40
