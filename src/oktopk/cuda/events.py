"""CUDA events, for other threads and streams to wait for."""

import torch


def record_event(device: torch.device, event: torch.Event | None = None) -> torch.Event | None:
    """Return an event, this one if it is given, recorded on the current stream of `device`; None on a CPU."""
    if device.type != "cuda":
        return None
    event = event or torch.Event(device)
    event.record(*_stream(device))
    return event


def wait_event(device: torch.device, event: torch.Event | None) -> None:
    """Make the current stream of `device` wait for `event`, if there is one."""
    if event is not None:
        event.wait(*_stream(device))


def _stream(device: torch.device) -> tuple[torch.Stream, ...]:
    """Return the current stream of `device`; nothing for the current device, whose stream an event finds far faster."""
    return () if device.index == torch.cuda.current_device() else (torch.cuda.current_stream(device),)
