"""The machine that a benchmark runs on: its cores, its processor, and where a result comes from."""

import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import oktopk

CPU_INFO = Path("/proc/cpuinfo")


def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_for(size: int) -> int:
    """Return each rank's share of the cores."""
    return max(1, num_cores() // size)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processor() -> str:
    """Return the name of the processor."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def provenance() -> dict[str, Any]:
    """Return the date, command, hardware and versions of a measurement, so that a reader can repeat it."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": {
            "processor": processor(),
            "cores": num_cores(),
            "system": f"{platform.system()} {platform.release()}",
            "load": [round(load, 2) for load in os.getloadavg()],
        },
        "versions": {"oktopk": oktopk.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
