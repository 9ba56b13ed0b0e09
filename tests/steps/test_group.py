"""The reduction of a group's gradients, wherever DDP has put them."""

import numpy as np
import torch

from oktopk.comm import MeteredComm
from oktopk.steps import StepContext, Steps, make_groups
from tests.ddp.harness import on_threads


@on_threads(2)
def test_gradients_that_touch_in_two_storages_are_two(comm):
    """As where the allocator puts two buckets side by side."""
    memory = np.arange(12, dtype=np.float32)
    first, second = torch.from_numpy(memory[:8]), torch.from_numpy(memory[8:])
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    (group,) = make_groups([("b", second), ("a", first)], cap_bytes=1 << 20)
    steps = Steps([group], MeteredComm(comm))
    steps.begin(StepContext(0, None))
    steps.start(group, [first, second], [first, second])
    steps.finish()
    assert memory.tolist() == list(range(12))
