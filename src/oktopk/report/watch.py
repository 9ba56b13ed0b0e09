"""`oktopk watch`: a run in the terminal, as its records come."""

import time
from collections.abc import Iterator
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

from oktopk.report.report import notes_of
from oktopk.report.tables import error_heading
from oktopk.report.text import as_line
from oktopk.telemetry.figures import quotient, summary_of
from oktopk.telemetry.format import format_seconds, format_value
from oktopk.telemetry.reader import MetricsReader, metrics_of
from oktopk.telemetry.run import ENDS, Floats, Run
from oktopk.telemetry.schema import SPLIT, mean

RECENT = 20
"""Steps whose means are the figures of now, because single steps vary."""

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 50
LAST_EVENTS = 4


def looks(path: Path) -> Iterator[Run]:
    """Yield the run again and again, each time with the records that were written since."""
    reader = MetricsReader(metrics_of(path, is_awaited=True))
    run = Run(name=reader.name)
    while True:
        if reader.path.is_file():
            run = Run(name=reader.name) if reader.has_begun_again() else run
            for record in reader.new():
                run.add_(record)
            run.bad_lines, run.silent_s = reader.bad_lines, reader.silent_s
        yield run


def follow(path: Path, out: Console, every_s: float = 1.0) -> Run:
    """Show the run until it ends, or its reader has seen enough; return it."""
    looking = looks(path)
    run = next(looking)
    with Live(view(run), console=out, refresh_per_second=4) as live, suppress(KeyboardInterrupt):  # by the reader
        while run.last_event not in ENDS:
            time.sleep(every_s)
            run = next(looking)
            live.update(view(run))
    return run


def view(run: Run) -> RenderableType:
    """Return how the run is doing."""
    parts: list[RenderableType] = [Text.from_markup(as_line(note)) for note in notes_of(run) if note.level != "info"]
    if run.num_steps:
        parts += [_progress(run), _figures(run), *_curve(run)]
    for event in run.events[-LAST_EVENTS:]:
        parts.append(Text.assemble((f"step {event['step']}", "dim"), f" {event['event']}: {event['message']}"))
    return Panel(Group(*parts or [Text("waiting for the first record")]), title=f"{escape(run.name)}: {run.state}")


def _progress(run: Run) -> RenderableType:
    planned, step_s, left = run.header.get("steps"), _recent(run, run.step_seconds), ""
    if not isinstance(planned, int) or planned < 1:
        return f"step {run.num_steps:,}"
    if step_s is not None and run.num_steps < planned and run.last_event not in ENDS:
        left = f"about {format_seconds(step_s * (planned - run.num_steps))} left"
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(planned, min(run.num_steps, planned), width=30)
    grid.add_row(f"step {run.num_steps:,} of {planned:,}", bar, left)
    return grid


def _recent(run: Run, values: Floats) -> float | None:
    """Return the mean over the last steps that are dense, or not, as the last one is."""
    dense = run.masks["dense"]
    return mean(values[dense == dense[-1]][-RECENT:])


def _figures(run: Run) -> Table:
    """Return the figures of now: means of the last steps, and the last validation. What is not known is left out."""
    summary = summary_of(run)
    sent, step_s = _recent(run, run.column("sent_bytes")), _recent(run, run.step_seconds)
    of_dense = format_value(quotient(sent, _recent(run, run.dense_bytes)), "share")
    shares = {SPLIT[name]: quotient(_recent(run, part), step_s) for name, part in run.split_of().items()}
    split = ", ".join(f"{name} {format_value(share, 'share')}" for name, share in shares.items() if share is not None)
    validation = {"loss": "val_loss", error_heading(run): run.error, "best": f"best_{run.error}"}
    known = {name: summary[figure] for name, figure in validation.items() if summary[figure] is not None}
    rows = {
        "loss": "" if (loss := mean(run.loss[-RECENT:])) is None else format_value(loss),
        "last validation": ", ".join(f"{name} {format_value(value)}" for name, value in known.items()),
        "phase": f"{run.phases[-1]}, "
        f"sparsity {format_value(_recent(run, run.column('sparsity')))}, "
        f"compression active on {summary['sparse_steps']:,} of {summary['steps']:,} steps",
        "bytes": f"{format_value(sent, 'bytes')} a step, {of_dense} of dense; "
        f"{format_value(summary['sent_bytes'], 'bytes')} so far",
        "time": f"{format_value(step_s, 'seconds')} a step" + f": {split}" * bool(split),
        "verdict": summary["verdict"],
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        if text:  # a script's record may have no validation
            grid.add_row(f"[bold]{name}[/]", text)
    return grid


def _curve(run: Run) -> Iterator[Text]:
    """Yield the loss over all steps, as a row of bars; nothing if no loss is known."""
    loss = run.loss
    means = [mean(part) for part in np.array_split(loss, min(WIDTH, len(loss)))]
    known = [value for value in means if value is not None]
    if not known:
        return
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low or 1.0)
    bars = "".join(" " if value is None else BARS[round((value - low) * scale)] for value in means)
    yield Text(f"{bars}  loss, {high:.4g} to {low:.4g}")
