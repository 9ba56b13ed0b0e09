"""CUDA events, for other threads and streams to wait for."""

from __future__ import annotations

import torch


def record_event(device: torch.device) -> torch.Event | None:
    """Return an event recorded on the current stream of `device`; None on a CPU.

    `torch.cuda.Event` takes ten times as long to look up that stream.
    """
    if device.type != "cuda":
        return None
    event = torch.Event(device)
    record_event_(device, event)
    return event


def record_event_(device: torch.device, event: torch.Event) -> None:
    """Record `event` on the current stream of `device`."""
    if device.index == torch.cuda.current_device():
        event.record()
    else:  # which asks the current device
        event.record(torch.cuda.current_stream(device))


def wait_event(device: torch.device, event: torch.Event | None) -> None:
    """Make the current stream of `device` wait for `event`, if there is one."""
    if event is None:
        return
    if device.index == torch.cuda.current_device():
        event.wait()
    else:
        event.wait(torch.cuda.current_stream(device))
