"""Schedules replayed by SimGrid, in a process of its own: an optional check of the cost model at many ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from oktopk.errors import PeerError, SettingError
from oktopk.plan.schedule import Schedule
from oktopk.plan.topology import PAYLOAD, Topology

PYTHONS = (sys.executable, "/usr/bin/python3")
"""This Python, and the system's, for which Debian packages simgrid."""

REPLAY = Path(__file__).with_name("replay.py")
IMPORTS = 'import sys; sys.path.append("/usr/lib/python3/dist-packages"); import simgrid'
LONGEST_S = 600.0

Program = list[tuple[list[int], float, list[int]]]
"""A rank's rounds: the ranks that it sends to, the bytes for each, and the ranks that it hears from."""


@cache
def simgrid_python() -> str | None:
    """Return a Python that has simgrid; None if there is none."""
    for python in PYTHONS:
        command = [python, "-I", "-S", "-c", IMPORTS]
        if (
            Path(python).exists()
            and subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
        ):
            return python
    return None


def simulate(
    schedules: Sequence[Schedule], topology: Topology, message_s: float = 0.0, longest_s: float = LONGEST_S
) -> float:
    """Return the simulated seconds of schedules that all ranks go through one after the other."""
    python = simgrid_python()
    if python is None:
        raise SettingError("no Python here has simgrid: apt-get install python3-simgrid, or pip install simgrid")
    given = {
        "sizes": [level.size for level in topology.levels],
        "bytes_per_s": [level.mbit * PAYLOAD * 125_000 for level in topology.levels],
        "latency_s": [level.latency_s for level in topology.levels],
        "message_s": message_s,
        "programs": programs_of(schedules, topology.size),
    }
    command = [python, "-I", "-S", str(REPLAY)]
    try:
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=longest_s
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"SimGrid did not end within {longest_s:g} s: simulate fewer ranks") from None
    if done.returncode:
        raise PeerError(f"SimGrid failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def programs_of(schedules: Sequence[Schedule], num_ranks: int) -> list[Program]:
    """Return the rounds of each rank, from the messages of the schedules and what they need."""
    programs: list[Program] = [[] for _ in range(num_ranks)]
    for schedule in schedules:
        for sends in schedule.sends(num_ranks):
            sources: list[list[int]] = [[] for _ in range(num_ranks)]
            for source, (targets, _) in enumerate(sends):
                for target in targets:
                    sources[target].append(source)
            for rank, (targets, num_bytes) in enumerate(sends):
                if targets or sources[rank]:
                    programs[rank].append((targets, num_bytes, sources[rank]))
    return programs
