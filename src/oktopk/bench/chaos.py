"""`oktopk bench chaos`: a run whose members are killed, frozen and cut off, each on a host of its own.

The members of a torchft quorum train a small net. Faults come at random times: SIGKILL and a new start, SIGSTOP below
and beyond the timeout, and a link that is unplugged. Then the same number of steps is made without faults.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oktopk.bench.chaos_figures import figures_of
from oktopk.bench.netlab import Lab, LabError
from oktopk.errors import PeerError, SettingError, one_of

FAULTS = {"kill": ("kill",), "stop": ("stop-below", "stop-beyond"), "partition": ("partition",)}
"""Kinds of faults by the names that `--faults` has."""

START_S = 120.0
"""Seconds for all members to meet at first, because each imports torch on a share of the cores."""
RESTART_S = 1.0
"""Seconds from a kill to the start of the next process, as a supervisor takes."""
BELOW, BEYOND = 0.4, 3.0
"""How long a member is frozen or cut off, in timeouts."""
TWICE = 0.15
"""Part of the faults that hit two members at once."""
JOIN_S = 10.0
"""Seconds that a quorum waits for members that are alive: longer than a step, see `Patience`."""
LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """The settings of a chaos run, which its members share."""

    members: int = 4
    minutes: float = 10.0
    every_s: float = 27.0
    faults: tuple[str, ...] = tuple(FAULTS)
    timeout_s: float = 1.2
    heartbeat_s: float = 0.75
    compute_s: float = 0.1
    density: float = 0.03
    dense_steps: int = 20
    hang_s: float = 60.0
    mbit: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.faults:
            one_of("fault", name, FAULTS)
        if self.members < 3:
            raise SettingError(f"--ranks wants 3 members or more, so that a majority is left, not {self.members}")

    def of_members(self, steps: int = 0) -> dict[str, Any]:
        """Return the settings of each member's process; with `steps` it ends after as many, without the sleeps."""
        patience = {"collective_s": self.timeout_s, "heartbeat_s": self.heartbeat_s, "join_s": JOIN_S,
                    "quorum_s": max(2 * JOIN_S, 4 * self.timeout_s)}  # fmt: skip
        return {
            "patience": patience, "min_members": 1, "seed": self.seed, "density": self.density, "steps": steps,
            "dense_steps": self.dense_steps, "hang_s": self.hang_s, "compute_s": 0.0 if steps else self.compute_s,
        }  # fmt: skip


@dataclass
class Fault:
    """A fault: when it came, whom it hit, and when it was over."""

    kind: str
    victims: list[int]
    t: float
    over: float | None = None


def run_chaos(settings: ChaosSettings, show: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return the figures of the run with faults and of the one without; `show` gets a line now and then."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            chaotic, calm = Path(folder) / "chaotic", Path(folder) / "calm"
            with _Members(settings, chaotic) as run:
                faults, span = run.disturb(show)
            events = read_logs(chaotic)
            steps = max((each["step"] for each in events if each["event"] == "commit"), default=0)
            show(f"{steps} steps are committed; now as many without faults")
            with _Members(settings, calm, steps=steps) as run:
                run.wait_for_end(show)
            return {
                **{name: value for name, value in asdict(settings).items() if name != "minutes"},
                "minutes": (span[1] - span[0]) / 60,
                **figures_of(events, read_logs(calm), [vars(fault) for fault in faults], span, settings.compute_s),
            }
    except LabError as error:
        raise SettingError(f"no network for the members: {error}") from error


def read_logs(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all members in the order of time, each with the member's number and life."""
    events = []
    for path in folder.glob("member*.jsonl"):
        number, life = map(int, path.stem.removeprefix("member").split("."))
        for line in path.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # a kill cuts the last one off
                events.append({**json.loads(line), "member": number, "life": life})
    return sorted(events, key=lambda each: each["t"])


@dataclass
class _Members:
    """The processes of a run: a lighthouse, and the members, which are started again when they end."""

    settings: ChaosSettings
    folder: Path
    steps: int = 0
    _lives: dict[int, int] = field(default_factory=dict)
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _hit: set[int] = field(default_factory=set)

    def __enter__(self) -> _Members:
        self.folder.mkdir()
        count = self.settings.members
        self._lab = Lab(count + 1, self.settings.mbit).__enter__()
        self._processes: dict[int, Any] = {}
        try:
            # A fork of a server that has imported everything starts in milliseconds.
            self._forks = multiprocessing.get_context("forkserver")
            self._forks.set_forkserver_preload(["oktopk.bench.chaos_member", "oktopk.kernels.numba_cpu"])
            from oktopk.bench.chaos_member import UP, serve_lighthouse
            from oktopk.integrations.torchft.start import Patience

            patience = Patience(**self.settings.of_members()["patience"])
            lighthouse = self._forks.Process(
                target=serve_lighthouse, args=(self._lab.hosts[-1], patience, str(self.folder))
            )
            lighthouse.start()
            self._lighthouse, deadline = lighthouse, time.monotonic() + START_S
            while not (self.folder / UP).exists():
                if time.monotonic() > deadline or not lighthouse.is_alive():
                    raise PeerError(f"the lighthouse did not listen within {START_S:g} s")
                time.sleep(LOOK_S)
            for number in range(count):
                self._start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._processes.values(), getattr(self, "_lighthouse", None)]:
            if process is not None:
                process.kill()
                process.join(5)
        self._lab.__exit__()

    def disturb(self, show: Callable[[str], None]) -> tuple[list[Fault], tuple[float, float]]:
        """Let faults come for the minutes of the settings; return them, and when that began and ended."""
        settings, draws, faults = self.settings, random.Random(self.settings.seed), list[Fault]()
        self._wait_until_all_met()
        start = time.monotonic()
        show(f"{settings.members} members have met; a fault about every {settings.every_s:g} s")
        end, due = start + 60 * settings.minutes, start + settings.every_s
        kinds = [kind for name in settings.faults for kind in FAULTS[name]]
        while time.monotonic() < end:
            if time.monotonic() >= due:
                fault = self._strike(draws, draws.choice(kinds))
                if fault is not None:
                    faults.append(fault)
                    show(f"{time.monotonic() - start:6.0f} s: {fault.kind} of {fault.victims}, {self._steps()} steps")
                due = time.monotonic() + settings.every_s * draws.uniform(0.7, 1.3)
            self._tend()
            time.sleep(LOOK_S)
        while self._due:  # let the last ones come back
            self._tend()
            time.sleep(LOOK_S)
        time.sleep(2 * settings.timeout_s)
        return faults, (start, time.monotonic())

    def wait_for_end(self, show: Callable[[str], None]) -> None:
        """Wait until one of the members has made its steps."""
        deadline = time.monotonic() + START_S + 2 * self.steps * (0.2 + self.settings.compute_s)
        while all(process.is_alive() for process in self._processes.values()):
            if time.monotonic() > deadline:
                raise PeerError(f"the run without faults made {self._steps()} of {self.steps} steps in its time")
            time.sleep(LOOK_S)
        show("the run without faults is over")

    def _start(self, number: int) -> None:
        from oktopk.bench.chaos_member import be_member

        self._lives[number] = life = self._lives.get(number, -1) + 1
        hosts, settings = self._lab.hosts, self.settings.of_members(self.steps)
        args = (hosts[number], hosts[-1], number, life, settings, str(self.folder))
        process = self._forks.Process(target=be_member, args=args, daemon=True)
        process.start()
        self._processes[number] = process

    def _wait_until_all_met(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            events = read_logs(self.folder)
            if any(each["event"] == "commit" and each["size"] == self.settings.members for each in events):
                return
            if time.monotonic() > deadline:
                said = "\n".join(path.read_text()[-500:] for path in self.folder.glob("*.err"))
                raise PeerError(f"the members did not meet within {START_S:g} s: {said}")
            self._tend()
            time.sleep(1)

    def _strike(self, draws: random.Random, kind: str) -> Fault | None:
        """Hit one member, or two; None if a majority would not be left."""
        count = 2 if draws.random() < TWICE else 1
        well = [number for number in self._processes if number not in self._hit]
        if len(self._hit) + count > (self.settings.members - 1) // 2 + (count > 1) or len(well) <= count:
            return None
        fault = Fault(kind, sorted(draws.sample(well, count)), time.monotonic())
        for number in fault.victims:
            self._hit.add(number)
            self._hurt(number, fault)
        return fault

    def _hurt(self, number: int, fault: Fault) -> None:
        process, timeout_s = self._processes[number], self.settings.timeout_s
        if fault.kind == "kill":
            process.kill()
            self._later(RESTART_S, lambda: self._restart(number, fault))
        elif fault.kind == "partition":
            self._lab.plug(number, into=False)
            self._later(BEYOND * timeout_s, lambda: self._reach(number, fault))
        else:
            os.kill(process.pid, signal.SIGSTOP)
            length = (BELOW if fault.kind == "stop-below" else BEYOND) * timeout_s
            self._later(length, lambda: self._wake(number, fault))

    def _reach(self, number: int, fault: Fault) -> None:
        self._lab.plug(number, into=True)
        self._well(number, fault)

    def _wake(self, number: int, fault: Fault) -> None:
        os.kill(self._processes[number].pid, signal.SIGCONT)
        self._well(number, fault)

    def _restart(self, number: int, fault: Fault) -> None:
        self._processes[number].join(5)
        self._start(number)
        self._well(number, fault)

    def _well(self, number: int, fault: Fault) -> None:
        self._hit.discard(number)
        fault.over = time.monotonic()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, act))

    def _tend(self) -> None:
        """Do what is due, and start members that ended by themselves."""
        now = time.monotonic()
        due, self._due = [each for each in self._due if each[0] <= now], [each for each in self._due if each[0] > now]
        for _, act in due:
            act()
        for number, process in list(self._processes.items()):
            if number not in self._hit and not process.is_alive():
                self._start(number)
        self._lab.check()

    def _steps(self) -> int:
        return max((each["step"] for each in read_logs(self.folder) if each["event"] == "commit"), default=0)


def faults_of(text: str) -> tuple[str, ...]:
    """Return the names of a list of faults.

    >>> faults_of("kill, stop")
    ('kill', 'stop')
    """
    return tuple(dict.fromkeys(one_of("fault", name.strip(), FAULTS) for name in text.split(",")))
