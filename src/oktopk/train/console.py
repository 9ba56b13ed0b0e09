"""`Console`: the output of a run, by rank 0 only: a live line on a terminal, plain lines elsewhere."""

import rich.console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from oktopk.telemetry.format import count, format_bytes, format_seconds, format_value
from oktopk.telemetry.reader import Record
from oktopk.telemetry.schema import EpochRecord, TrainStep, catalogue
from oktopk.train.plan import table_of

LINES_PER_EPOCH = 4
"""Lines of steps in an epoch where there is no terminal."""


class _Figures(ProgressColumn):
    """The text of a progress line: the only column that shrinks, so that a narrow terminal keeps the others."""

    def render(self, task: Task) -> Text:
        """Return the text in one line."""
        return Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


class Console:
    """Prints if `rank` is 0. The progress line is that of the whole run, whose `steps` the plan has."""

    def __init__(self, rank: int, epochs: int, steps: int = 0, unit: str = "utt") -> None:
        self.out = rich.console.Console(quiet=rank != 0, soft_wrap=True, highlight=False)
        self._live = self.out.is_terminal and rank == 0
        self._epochs, self._steps, self._done, self._unit = epochs, 0, 0, unit
        self._is_resumed = True  # until the bar has been set to the first step
        self.progress = Progress(
            BarColumn(bar_width=16, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            _Figures(), console=self.out, transient=True, disable=not self._live,
        )  # fmt: skip
        self._task = self.progress.add_task("", total=steps, figures="")

    def say(self, text: str) -> None:
        """Print a line."""
        self.out.print(escape(text))

    def warn(self, text: str) -> None:
        """Print a line that should not be missed."""
        self.out.print(f"[bold yellow]WARNING[/] {escape(text)}")

    def begin_epoch(self, epoch: int, steps: int, step: int = 0) -> None:
        """Show that an epoch of `steps` steps begins at step `step` of the run."""
        self._steps, self._done = steps, 0
        if self._is_resumed:  # the steps before the resume say nothing about the speed of now
            self._is_resumed = False
            self.progress.reset(self._task, completed=step)
        self.progress.update(self._task, figures=f"epoch {epoch + 1}/{self._epochs}")

    def step(self, record: TrainStep) -> None:
        """Show a step."""
        self._done += 1
        figures = f"epoch {record.epoch + 1}/{self._epochs}  {_live(record, self._unit)}"
        self.progress.update(self._task, advance=1, figures=figures)
        if not self._live and self._done % max(1, self._steps // LINES_PER_EPOCH) == 0:
            self.out.print(f"epoch {record.epoch + 1} step {record.step}: {_figures(record, self._unit)}")

    def end_epoch(self, record: EpochRecord) -> None:
        """Print the figures of an epoch."""
        names = ("wer", "cer") if record.bits_per_byte is None else ("bits_per_byte",)
        validation = ", ".join(_figure(record, name) for name in ("val_loss", *names))
        self.out.print(
            f"[bold]epoch {record.epoch + 1}/{self._epochs}[/]  step {record.step}  {_figure(record, 'train_loss')}  "
            f"{validation if record.validated else 'not validated'}  {record.epoch_seconds:.1f} s"
        )


def _figure(record: TrainStep | EpochRecord, name: str) -> str:
    """Return a figure behind its heading."""
    kind: type = type(record)
    figure = catalogue(kind)[name]
    return f"{figure.heading or name} {format_value(getattr(record, name), figure.unit)}"


def _live(record: TrainStep, unit: str) -> str:
    """Return the figures of a progress line, the most important first, because a narrow terminal cuts the end."""
    seconds = sum(record.split.values()) or 1.0
    speed = f"{record.utterances / seconds:.0f} {unit}/s"
    return f"{_figure(record, 'loss')}  {record.phase}  {format_bytes(record.sent_bytes)} a step  {speed}"


def _figures(record: TrainStep, unit: str) -> str:
    seconds = sum(record.split.values()) or 1.0
    parts = " ".join(f"{name} {100 * value / seconds:.0f}%" for name, value in record.split.items())
    figures = " ".join(_figure(record, name) for name in ("sparsity", "compression_ratio") if record.nnz)
    return (
        f"{_figure(record, 'loss')}  {_figure(record, 'lr')}  {record.utterances / seconds:.0f} {unit}/s  {parts}"
        f"  {record.phase} {figures}  {format_bytes(record.sent_bytes / seconds)}/s"
    )


def end_table(summary: Record, workers: int, *, is_dense: bool) -> Table:
    """Return the figures of a run; one that `is_dense` has none of sparse steps."""
    first, train_loss, val_loss = (format_value(summary[name]) for name in ("first_loss", "train_loss", "val_loss"))
    seconds = {name: f"{value:.1f}\u00a0s" for name, value in summary["seconds"].items()}
    rows = {
        "train loss": f"{first} in the first epoch, {train_loss} in the last" if summary["epochs"] > 1 else train_loss,
        "val loss": val_loss,
        **_errors(summary),
        "steps": _steps(summary, is_dense),
        "sparsity": format_value(summary["sparsity"]),
        "compression ratio": format_value(summary["compression_ratio"]),
        "bytes sent": _bytes(summary),
        "verdict": summary["verdict"],
        "time": f"{sum(summary['seconds'].values()):.1f} s: "
        + ", ".join(f"{name} {value}" for name, value in seconds.items()),
        "a step took": _step_seconds(summary["seconds_per_step"]) + f" (median), on {count(workers, 'worker')}",
    }
    for name in () if summary["sparse_steps"] else ("sparsity", "compression ratio", "verdict"):
        del rows[name]
    return table_of("the run", {name: text for name, text in rows.items() if text is not None})


def _steps(summary: Record, is_dense: bool) -> str:
    """Return how many steps there were, and how many of them exchanged what."""
    steps = count(summary["steps"], "step")
    says = f"compression was active on {summary['sparse_steps']} of {steps}"
    if "local" in summary["seconds_per_step"]:
        says = f"{count(summary['sparse_steps'] + summary['dense_steps'], 'exchange')} in {steps}"
    elif is_dense:
        says = f"{summary['steps']:,}, all dense"
    return says + (f", {summary['skipped_steps']} skipped" if summary["skipped_steps"] else "")


def _step_seconds(per_step: dict[str, float | None]) -> str:
    """Return the time of a step of each phase that was there."""
    known = {phase: format_seconds(seconds) for phase, seconds in per_step.items() if seconds is not None}
    return ", ".join(f"{seconds} {phase}" for phase, seconds in known.items())


def _errors(summary: Record) -> dict[str, str]:
    """Return the figures of the last validation that say how good the net is."""
    wer, cer, bits = (format_value(summary[name]) for name in ("wer", "cer", "bits_per_byte"))
    if summary["bits_per_byte"] is not None:
        return {"bits a byte": f"{bits}, best {format_value(summary['best_bits_per_byte'])}"}
    return {"WER": f"{wer}, best {format_value(summary['best_wer'])}", "CER": cer}


def _bytes(summary: Record) -> str:
    if summary["sent_of_dense"] is None:
        return "none: one worker has nobody to send to"
    sent, dense = format_bytes(summary["sent_bytes"]), format_bytes(summary["dense_bytes"])
    sparse = summary["sent_bytes_per_step"]["sparse"]
    if sparse is None:
        return f"{sent} by rank 0"
    of_dense, of_step = summary["sent_of_dense"], sparse * summary["steps"] / summary["dense_bytes"]
    return (
        f"{sent} by rank 0, {format_value(of_dense, 'share')} of the {dense} that dense steps would have sent; "
        f"a sparse step {format_value(of_step, 'share')} of a dense one"
    )
