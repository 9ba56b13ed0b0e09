"""The processes that the other tests run in."""

import time
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.ddp import harness


@pytest.mark.processes
def test_a_job_that_takes_too_long_leaves_no_answer_for_the_next(tmp_path):
    worlds = harness.Worlds(2, tmp_path)
    with patch.object(harness, "JOB_TIMEOUT_S", 0.5), pytest.raises(AssertionError, match="gave no answer"):
        worlds.run(2, time.sleep, 2.0)
    assert worlds.run(2, dist.get_rank) == [0, 1]
    worlds.close()
