"""Members under Ray Train, which replaces one that was killed. Ray is no dependency: this is skipped without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="oktopk[torchft] is not installed")
pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_ray.py"
SECONDS = 400


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 30)
def test_ray_replaces_a_member_that_was_killed_and_all_end_with_the_same_bits():
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(EXAMPLE), "--kill"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-5000:]
    assert "is not committed" in said
    weights = re.findall(r"member \d: weights ([0-9a-f]{16})", said)
    assert len(weights) == 3
    assert len(set(weights)) == 1
