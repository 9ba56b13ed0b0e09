"""Moments in the work of a GPU, for other threads and streams to wait for."""

from __future__ import annotations

import torch


def now_on(device: torch.device) -> torch.Event | None:
    """Return the moment when all that this thread has asked of its current stream is done; None on a CPU.

    torch.cuda has events of its own, which take ten times as long to find out which stream that is.
    """
    if device.type == "cpu":
        return None
    now = torch.Event(device)
    now.record()
    return now
