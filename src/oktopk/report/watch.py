"""`oktopk watch`: a run in the terminal, as its records come."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oktopk.report.text import as_line
from oktopk.report.warnings import notes_of
from oktopk.telemetry.figures import mean, quotient, summary_of
from oktopk.telemetry.format import format_seconds, format_value
from oktopk.telemetry.reader import METRICS, MetricsReader, NoRunError
from oktopk.telemetry.run import ENDS, Floats, Run
from oktopk.telemetry.schema import SPLIT

EVERY_S = 1.0
RECENT = 20
"""Steps whose means are the figures of now, because single steps vary."""

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 50
LAST_EVENTS = 4


class Watched:
    """A run that is read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path / METRICS if path.is_dir() or not path.suffix else path
        if not self._path.parent.is_dir():
            raise NoRunError(f"wanted a run's folder or its {METRICS}, and {path} is not there: runs are in runs/NAME")
        self._reader = MetricsReader(self._path)
        self.run = Run(self._path.parent.resolve().name)

    def look(self) -> Run:
        """Read the records written since the last look; return the run."""
        if self._path.is_file():
            if self._reader.has_begun_again():
                self.run = Run(self.run.name)
            for record in self._reader.new():
                self.run.add_(record)
            self.run.bad_lines = self._reader.bad_lines
        return self.run


def follow(path: Path, out: Console, every_s: float = EVERY_S) -> Run:
    """Show the run until it ends, or its reader has seen enough; return it."""
    watched = Watched(path)
    looking = Live(view(watched.look()), console=out, refresh_per_second=4)
    with looking as live, suppress(KeyboardInterrupt):  # which is how its reader says so
        while watched.run.last_event not in ENDS:
            time.sleep(every_s)
            live.update(view(watched.look()))
    return watched.run


def view(run: Run) -> RenderableType:
    """Return how the run is doing."""
    parts: list[RenderableType] = [Text.from_markup(as_line(note)) for note in notes_of(run) if note.level != "info"]
    if run.num_steps:
        parts += [_progress(run), _figures(run), _curve(run)]
    parts += [Text.from_markup(f"[dim]step {e['step']}[/] {escape(e['event'])}: {escape(e['message'])}")
              for e in run.events[-LAST_EVENTS:]]  # fmt: skip
    return Panel(Group(*parts or [Text("waiting for the first record")]), title=f"{escape(run.name)}: {run.state}")


def _progress(run: Run) -> Table:
    planned, grid, left = run.header.get("steps"), Table.grid(padding=(0, 2)), ""
    if not isinstance(planned, int) or planned < 1:
        grid.add_row(f"step {run.num_steps:,}")
        return grid
    step_s = mean(run.step_seconds[-RECENT:].tolist())
    if step_s is not None and run.num_steps < planned:
        left = f"about {format_seconds(step_s * (planned - run.num_steps))} left"
    bar = ProgressBar(planned, min(run.num_steps, planned), width=30)
    grid.add_row(f"step {run.num_steps:,} of {planned:,}", bar, left)
    return grid


def _figures(run: Run) -> Table:
    """Return the figures of now: means of the last steps, and the last validation."""
    summary = summary_of(run)

    def recent(values: Floats) -> float | None:
        return mean(values[-RECENT:].tolist())

    sent, step_s = recent(run.column("sent_bytes")), recent(run.step_seconds)
    of_dense = format_value(quotient(sent, recent(run.dense_bytes)), "share")
    split = [f"{SPLIT[name]} {format_value(quotient(recent(part), step_s), 'share')}"
             for name, part in run.split_of().items()]  # fmt: skip
    val_loss, wer, best = (format_value(summary[name]) for name in ("val_loss", "wer", "best_wer"))
    rows = {
        "loss": format_value(recent(run.column("loss"))),
        "last validation": f"loss {val_loss}, WER {wer}, best {best}",
        "phase": f"{'sparse' if run.is_sparse[-1] else 'dense'}, "
        f"sparsity {format_value(recent(run.column('sparsity')))}, "
        f"compression active on {summary['sparse_steps']:,} of {summary['steps']:,} steps",
        "bytes": f"{format_value(sent, 'bytes')} a step, {of_dense} of dense; "
        f"{format_value(summary['sent_bytes'], 'bytes')} so far",
        "time": f"{format_value(step_s, 'seconds')} a step: {', '.join(split)}",
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        grid.add_row(f"[bold]{name}[/]", text)
    return grid


def _curve(run: Run) -> Text:
    """Return the loss over all steps, as a row of bars."""
    loss = run.column("loss")
    means = [mean(part.tolist()) for part in np.array_split(loss, min(WIDTH, len(loss)))]
    known = [value for value in means if value is not None]
    if not known:
        return Text("loss n/a")
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low or 1.0)
    bars = "".join(" " if value is None else BARS[round((value - low) * scale)] for value in means)
    return Text(f"{bars}  loss, {high:.4g} to {low:.4g}")
