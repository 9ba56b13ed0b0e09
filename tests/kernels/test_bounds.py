"""No kernel reads or writes outside its arrays, whatever the data: see `fuzz`."""

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [12, pytest.param(600, marks=pytest.mark.slow)])
def test_no_kernel_leaves_its_arrays(request, rounds):
    """Numba keeps the kernels that have checks in a folder of their own, for the next run."""
    seed = 1 if rounds < 100 else int.from_bytes(os.urandom(3), "big")  # the long run looks further every time
    kept = request.config.rootpath / ".pytest_cache" / "numba-boundscheck"
    command = [sys.executable, "-m", "tests.kernels.fuzz", str(seed), str(rounds)]
    env = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(kept)}
    cwd = request.config.rootpath
    ended = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, f"seed {seed}, exit {ended.returncode}: {ended.stderr[-3000:]}"
