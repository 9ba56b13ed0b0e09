"""Moments in the work of a GPU, for other threads and streams to wait for."""

from __future__ import annotations

import torch


def record_event(device: torch.device) -> torch.Event | None:
    """Return the moment when all that this thread has asked of the GPU's current stream is done; None on a CPU.

    torch.cuda has events of its own, which take ten times as long to find out which stream that is.
    """
    if device.type != "cuda":
        return None
    now = torch.Event(device)
    record_event_(device, now)
    return now


def record_event_(device: torch.device, moment: torch.Event) -> None:
    """Make it the moment when all that this thread has asked of the GPU's current stream is done."""
    if device.index == torch.cuda.current_device():
        moment.record()
    else:  # which asks the current device
        moment.record(torch.cuda.current_stream(device))


def wait_event(device: torch.device, moment: torch.Event | None) -> None:
    """Let what this thread asks of the GPU's current stream from now on begin after that moment, if there is one."""
    if moment is None:
        return
    if device.index == torch.cuda.current_device():
        moment.wait()
    else:
        moment.wait(torch.cuda.current_stream(device))
