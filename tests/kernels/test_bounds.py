"""No kernel reads or writes outside its arrays, whatever the data: see `fuzz`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [12, pytest.param(600, marks=pytest.mark.slow)])
def test_no_kernel_leaves_its_arrays(request: pytest.FixtureRequest, rounds: int) -> None:
    """What is compiled with checks is kept apart from what is compiled without, for the next run."""
    seed = 1 if rounds < 100 else int.from_bytes(os.urandom(3), "big")  # the long run looks further every time
    compiled_with_checks = request.config.cache.mkdir("numba-boundscheck")
    settings = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(compiled_with_checks)}
    command = [sys.executable, "-m", "tests.kernels.fuzz", str(seed), str(rounds)]
    ended = subprocess.run(
        command,
        env={**os.environ, **settings},
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, f"seed {seed}, exit {ended.returncode}: {ended.stderr[-3000:]}"
