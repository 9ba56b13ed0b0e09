"""Warnings above the figures of a run: it is not over, it failed, its file is damaged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oktopk.telemetry.run import Run
from oktopk.telemetry.schema import VERSION

SHOWN_LINES = 5


@dataclass(frozen=True)
class Note:
    """A banner; `level` is "error", "warning" or "info"."""

    level: str
    text: str


def notes_of(run: Run) -> list[Note]:
    """Return the warnings and notes of a run."""
    if not run.num_steps and not run.events and not run.header:
        return [Note("warning", "The file holds no record yet."), *_damage(run)]
    return [*_ending(run), *_damage(run), *_content(run)]


def _ending(run: Run) -> list[Note]:
    planned = run.header.get("steps")
    made = f"{run.num_steps:,} of {planned:,}" if isinstance(planned, int) else f"{run.num_steps:,}"
    if run.state == "failed":
        return [Note("error", f"The run failed after {made} steps: {run.events[-1]['message']}")]
    if run.state == "unfinished" and run.header:
        return [Note("warning", f"The run is not over, or was stopped: {made} steps are here.")]
    return []


def _damage(run: Run) -> list[Note]:
    texts = []
    if run.is_cut:
        texts.append("The file ends amid a line, which is left out: it is being written, or was cut off.")
    if run.bad_lines:
        lines = ", ".join(map(str, run.bad_lines[:SHOWN_LINES])) + ", ..." * (len(run.bad_lines) > SHOWN_LINES)
        texts.append(f"Left out, since they are no records: {len(run.bad_lines):,} lines ({lines}).")
    if run.version != VERSION:
        versions = f"version {run.version!r}, this report knows version {VERSION}"
        texts.append(f"The file is of {versions}: what it has under other names is missing here.")
    return [Note("warning", text) for text in texts]


def _content(run: Run) -> list[Note]:
    notes = []
    if not run.header:
        notes.append(Note("info", "No line says what the run was: settings are not known."))
    if run.num_headers > 1 or (np.diff(run.steps) <= 0).any():
        notes.append(Note("warning", "Step numbers repeat: the file seems to hold several runs, shown as one."))
    if run.num_steps and not run.is_sparse.any():
        notes.append(Note("info", "No step was sparse: compression was not active."))
    if run.is_skipped.any():
        notes.append(Note("warning", f"{int(run.is_skipped.sum()):,} steps were skipped: a gradient was not finite."))
    there = {"phases of every rank": run.names("ranks.0.seconds"), "message sizes": run.messages}
    missing = " and no ".join(what for what, found in there.items() if not found)
    if run.num_steps and missing:
        who = "an earlier version, or a script of one's own, wrote it"
        notes.append(Note("info", f"The file has no {missing}: {who}. They are shown as n/a."))
    return notes
