"""`oktopk doctor`: what is installed here, what runs because of it, whether it computes right, and how fast.

here.py         versions, devices, backends; which kernels are in use, and why
selftest.py     the kernels in use against the reference; an exchange of two ranks
speed.py        adding and selecting, as a fraction of what memory allows
finding.py      a line of the report
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from oktopk.doctor import here, selftest, speed
from oktopk.doctor.finding import FAIL, INFO, NOTE, OK, Finding

__all__ = ["FAIL", "INFO", "NOTE", "OK", "Finding", "examine"]


def examine() -> Iterator[Finding]:
    """Yield all findings, as they are made; a check that raises is a finding, too."""
    yield from here.versions()
    yield from here.devices()
    yield from here.backends()
    for device in here.usable():
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # triton's kernels run on this one
            yield from here.kernels(device)
            yield from selftest.kernels(device)
            yield from selftest.exchange(device)
            yield from speed.selection(device)
