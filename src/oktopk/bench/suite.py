"""A benchmark over several settings: one network for each, the same work on it, and a bar that shows how far it is."""

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
from oktopk.bench.methods import Entry
from oktopk.bench.netlab import LabError
from oktopk.bench.probe import probe_rank
from oktopk.bench.processes import run_processes, threads_for
from oktopk.bench.rounds import WARM_UP, Samples
from oktopk.bench.settings import Setting
from oktopk.bench.summary import rows_of
from oktopk.errors import SettingError

LOOK_S = 0.2
"""Between two looks at how far the ranks are."""


def measure(
    work: Callable[..., Any], args: tuple[Any, ...], entries: Sequence[Entry], setting: Setting, rounds: int,
    seconds: float, progress: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Return what `work(*args, entries, laps)` measured on every rank of the setting, a row for each entry."""
    with tempfile.TemporaryDirectory() as folder:
        laps = Samples(rounds=rounds, seconds=seconds, in_lab=setting.mbit is not None, lap_file=f"{folder}/laps")
        with _shown(progress, str(setting), Path(laps.lap_file), (WARM_UP + rounds) * len(entries)):
            ranks = in_setting(setting, work, *args, entries, laps)
    return {
        **asdict(setting),
        "threads": threads_for(setting.ranks),
        "rounds": len(ranks[0][0]) - WARM_UP,
        "rows": rows_of(entries, ranks),
    }


def in_setting(setting: Setting, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `work(*args)` returns on each rank of the setting."""
    try:
        return run_processes(
            work, setting.ranks, *args, mbit=setting.mbit, delay_ms=setting.delay_ms, loss=setting.loss
        )
    except LabError as error:
        raise SettingError(f"no network for {setting}: {error}") from error


def bar(console: Console) -> Progress:
    """Return the bar; start it with `with`."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("laps"))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)


def probe(numel: int, entries: Sequence[Entry], setting: Setting, progress: Progress) -> Forecast:
    """Return what the setting's machine takes, measured on every rank."""
    task = progress.add_task(f"{setting}: probe", total=None)
    try:
        return make_forecast(in_setting(setting, probe_rank, numel, entries), entries, numel)
    finally:
        progress.remove_task(task)


@contextmanager
def _shown(progress: Progress, name: str, lap_file: Path, total: int) -> Iterator[None]:
    """Show, while inside, how many laps rank 0 has left in its file."""
    task, over = progress.add_task(name, total=total), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            progress.update(task, completed=lap_file.stat().st_size if lap_file.exists() else 0)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
        progress.remove_task(task)
