"""No kernel reads or writes outside its arrays, whatever the data: see `fuzz`."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_kernel_leaves_its_arrays(request):
    """Numba keeps the kernels that have checks in a folder of their own, for the next run."""
    seed = int.from_bytes(os.urandom(3), "big")  # every run looks further
    kept = request.config.rootpath / ".pytest_cache" / "numba-boundscheck"
    command = [sys.executable, "-m", "tests.kernels.fuzz", str(seed), "600"]
    env = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(kept)}
    cwd = request.config.rootpath
    ended = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, f"seed {seed}, exit {ended.returncode}: {ended.stderr[-3000:]}"
