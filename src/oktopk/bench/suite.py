"""A benchmark in one setting: its network, the ranks on it, and a bar that shows their progress."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oktopk.bench.forecast import Forecast, make_forecast
from oktopk.bench.machine import threads_for
from oktopk.bench.methods import Entry
from oktopk.bench.netlab import LabError
from oktopk.bench.probe import probe_rank
from oktopk.bench.processes import run_processes
from oktopk.bench.rounds import WARM_UP, Samples
from oktopk.bench.settings import Setting
from oktopk.bench.summary import rows_of
from oktopk.errors import SettingError

MOST_SECONDS = 300.0
"""Seconds of a setting after which no further round is started, because a slow link would take hours."""

LOOK_S = 0.2
"""Seconds between two updates of the bar."""


def measure(
    work: Callable[..., Any],
    args: tuple[Any, ...],
    entries: Sequence[Entry],
    setting: Setting,
    rounds: int,
    progress: Progress,
) -> dict[str, Any]:
    """Return the rows that `work(*args, entries, samples)` measured on the ranks of a setting."""
    with tempfile.TemporaryDirectory() as folder:
        turns = Path(folder) / "turns"
        in_lab = setting.mbit is not None
        samples = Samples(rounds=rounds, seconds=MOST_SECONDS, in_lab=in_lab, turns_file=str(turns))
        with _shown(progress, str(setting), turns, (WARM_UP + rounds) * len(entries)):
            ranks = in_setting(setting, work, *args, entries, samples)
    return {
        **asdict(setting),
        "threads": threads_for(setting.ranks),
        "rounds": len(ranks[0][0]) - WARM_UP,
        "rows": rows_of(entries, ranks),
    }


def in_setting(setting: Setting, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of `work(*args)` on each rank of the setting."""
    try:
        return run_processes(work, setting.ranks, *args, mbit=setting.mbit, delay_ms=setting.delay_ms)
    except LabError as error:
        raise SettingError(f"no network for {setting}: {error}") from error


def bar(console: Console) -> Progress:
    """Return the progress bar; start it with `with`."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("turns"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)


def probe(numel: int, entries: Sequence[Entry], setting: Setting, progress: Progress) -> Forecast:
    """Return the forecast for a setting, from a probe on each of its ranks."""
    task = progress.add_task(f"{setting}: probe", total=None)
    try:
        return make_forecast(in_setting(setting, probe_rank, numel, entries), entries, numel)
    finally:
        progress.remove_task(task)


@contextmanager
def _shown(progress: Progress, name: str, turns: Path, total: int) -> Iterator[None]:
    """Show inside the block how many turns rank 0 has noted in its file."""
    task, over = progress.add_task(name, total=total), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            progress.update(task, completed=turns.stat().st_size if turns.exists() else 0)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
        progress.remove_task(task)
