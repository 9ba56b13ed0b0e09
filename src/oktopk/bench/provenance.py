"""Where a result comes from: the machine, the versions, the day and the command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import oktopk
from oktopk.bench.processes import num_cores

CPU_INFO = Path("/proc/cpuinfo")


def provenance() -> dict[str, Any]:
    """Return what a reader needs to know to repeat, or to doubt, a measurement."""
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


def processor() -> str:
    """Return the name of the processor."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
