"""`oktopk doctor`: versions, devices and kernels here, whether the kernels compute right, and how fast.

here.py         versions, devices, backends; the kernels in use, and why
selftest.py     the kernels in use against the reference; an exchange of two ranks
speed.py        adding and selecting, as a fraction of the speed of a copy
finding.py      a line of the report
report.py       the report as a table, as lines and as JSON
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from oktopk.doctor import here, selftest, speed
from oktopk.doctor.finding import FAIL, INFO, NOTE, OK, Finding

__all__ = ["FAIL", "INFO", "NOTE", "OK", "Finding", "examine"]


def examine() -> Iterator[Finding]:
    """Yield all findings, one by one; a check that raises gives a finding, too."""
    yield from here.versions()
    yield from here.devices()
    yield from here.backends()
    for device in here.usable():
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where triton's kernels run
            yield from here.kernels(device)
            yield from selftest.kernels(device)
            yield from selftest.exchange(device)
            yield from speed.selection(device)
