"""Members of an elastic run on this machine: start them, start those again that die, and end with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from oktopk.algorithms.base import AUTO
from oktopk.errors import PeerError, SettingError
from oktopk.telemetry.format import count
from oktopk.train.config import Config
from oktopk.train.dist import HERE, STARTER
from oktopk.train.elastic import Bounds
from oktopk.train.folder import give_number
from oktopk.train.rundir import RunDir

HERE_AT = f"{HERE}:0"
LOOK_S = 0.1
POSSIBLE: dict[str, tuple[object, ...]] = {
    "local_steps": (0,), "clip_place": ("global",), "precision": (AUTO, "fp32"), "device": ("auto", "cpu"),
}  # fmt: skip
"""Values of the settings of which members without DDP, on the CPU, cannot have all."""
END_S = 5.0
"""Seconds that members get to end after a signal."""


def bounds_of(text: str) -> Bounds:
    """Return the bounds of MIN:MAX.

    >>> bounds_of("2:4")
    Bounds(least=2, most=4)
    """
    match = re.fullmatch(r"([1-9][0-9]{0,5}):([1-9][0-9]{0,5})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise SettingError(f"--elastic wants the least and the largest number of members, such as 2:4, not {text!r}")
    return Bounds(int(match[1]), int(match[2]))


def check_possible(config: Config, bounds: Bounds, workers: int, lighthouse: str | None = None) -> None:
    """Refuse what cannot run, before anything starts."""
    for name, can_be in POSSIBLE.items():
        if getattr(config, name) not in can_be:
            raise SettingError(
                f"--elastic cannot have {name} {getattr(config, name)}, but {' or '.join(map(str, can_be))}"
            )
    if find_spec("torchft") is None:
        raise SettingError("--elastic runs on torchft: pip install 'oktopk[torchft]'")
    if workers > bounds.most:
        raise SettingError(f"--nproc {workers} is more than --elastic {bounds.least}:{bounds.most} allows")
    os.environ.setdefault("RUST_LOG", "error")  # before the import, which reads it
    from oktopk.integrations.torchft.start import split_address

    split_address(lighthouse or HERE_AT)


def run_members(
    run: Path,
    bounds: Bounds,
    lighthouse: str | None,
    workers: int,
    max_restarts: int,
    threads: int,
    say: Callable[[str], None],
) -> None:
    """Run `workers` members of the run in `run` to their end; at most `max_restarts` times one is started again.

    `lighthouse` is HOST:PORT. If one answers there, the members join it. Else it is started there, or on the loopback.
    """
    from oktopk.integrations.torchft.start import Lighthouse, Patience, answers

    give_number(RunDir(run))
    with ExitStack() as ending:
        if lighthouse is not None and answers(lighthouse):
            url = f"http://{lighthouse.removeprefix('http://')}"
            say(f"joining the run at {url}")
        else:
            server = Lighthouse(lighthouse or HERE_AT, bounds.least, Patience())
            ending.callback(server.close)
            url = server.url
            say(f"the lighthouse is {url}: others join with --elastic {bounds.least}:{bounds.most} --lighthouse {url}")
        _Supervisor(run, bounds, url, threads, say).supervise(workers, max_restarts)


class _Supervisor:
    def __init__(self, run: Path, bounds: Bounds, url: str, threads: int, say: Callable[[str], None]) -> None:
        limits = f"{bounds.least}:{bounds.most}"
        self._command = [sys.executable, "-m", "oktopk", "worker", str(run), "--elastic", limits, "--lighthouse", url]
        self._environment = {**os.environ, STARTER: str(os.getpid()), "OMP_NUM_THREADS": str(threads)}
        self._say = say
        self._alive: dict[int, subprocess.Popen[bytes]] = {}

    def supervise(self, workers: int, max_restarts: int) -> None:
        """Start the members, and wait for their end; raise if too few are left for the run to go on here."""
        failed, left = 0, max_restarts
        try:
            for number in range(workers):
                self._start(number)
            while self._alive:
                time.sleep(LOOK_S)
                for number, status in self._ended():
                    if status and left:
                        left -= 1
                        self._say(f"member {number} {_how(status)}, and starts again ({left} more restarts)")
                        self._start(number)
                    elif status:
                        failed += 1
                        self._say(f"member {number} {_how(status)}; {count(len(self._alive), 'member')} left here")
            if failed == workers:
                raise PeerError("all members of this machine failed; their last words are above")
        finally:
            self._end()

    def _start(self, number: int) -> None:
        self._alive[number] = subprocess.Popen(self._command, env=self._environment)

    def _ended(self) -> list[tuple[int, int]]:
        ended = [(number, int(each.returncode)) for number, each in self._alive.items() if each.poll() is not None]
        for number, _ in ended:
            del self._alive[number]
        return ended

    def _end(self) -> None:
        for process in self._alive.values():
            process.terminate()
        for process in self._alive.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _how(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
