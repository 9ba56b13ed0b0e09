"""`Summary`: all steps of an attachment, added up."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from oktopk.telemetry.format import format_value
from oktopk.telemetry.notebook import as_html
from oktopk.telemetry.record import ratio_of, sparsity_of
from oktopk.telemetry.schema import StepRecord, add_by_name
from oktopk.telemetry.verdict import verdict

LATEST = 1001
"""Steps whose times are kept for the median, because a run may have millions."""


@dataclass
class PhaseSummary:
    """The steps of one phase. A mean over nothing is None, and shown as n/a."""

    steps: int = 0
    skipped: int = 0
    numel: int = 0
    nnz: int = 0
    wanted: int = 0
    selected: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))

    def add_(self, record: StepRecord) -> None:
        """Count a step; one that was skipped delivered nothing, and is in no mean."""
        self.steps += 1
        self.skipped += record.skipped
        self.seconds = add_by_name([self.seconds, record.seconds])
        if record.step_seconds is not None:
            self.latest_s.append(record.step_seconds)
        delivered = () if record.skipped else ("numel", "nnz", "wanted", "selected")
        for name in ("sent_bytes", "received_bytes", *delivered):
            setattr(self, name, getattr(self, name) + getattr(record, name))

    @property
    def sparsity(self) -> float | None:
        """1 - nnz / numel over all steps."""
        return sparsity_of(self.nnz, self.numel) if self.numel else None

    @property
    def compression_ratio(self) -> float | None:
        """numel / nnz over all steps."""
        return ratio_of(self.nnz, self.numel) if self.numel else None

    @property
    def selected_per_wanted(self) -> float | None:
        """selected / k over all steps."""
        return self.selected / self.wanted if self.wanted else None

    @property
    def seconds_per_step(self) -> float | None:
        """Median time of the latest steps."""
        return median(self.latest_s) if self.latest_s else None

    @property
    def sent_bytes_per_step(self) -> float | None:
        """Mean of the bytes sent in a step."""
        return self.sent_bytes / self.steps if self.steps else None


@dataclass
class Summary:
    """All steps so far, by phase. `print(summary)` shows it."""

    dense: PhaseSummary = field(default_factory=PhaseSummary)
    sparse: PhaseSummary = field(default_factory=PhaseSummary)

    def add_(self, record: StepRecord) -> None:
        """Count a step."""
        (self.dense if record.phase == "dense" else self.sparse).add_(record)

    @property
    def steps(self) -> int:
        """All steps."""
        return self.dense.steps + self.sparse.steps

    @property
    def nonfinite(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return self.dense.skipped + self.sparse.skipped

    @property
    def sent_of_dense(self) -> float | None:
        """Bytes that a sparse step sends, as a part of a dense one's; None before there are both."""
        dense, sparse = self.dense.sent_bytes_per_step, self.sparse.sent_bytes_per_step
        return sparse / dense if dense and sparse is not None else None

    @property
    def verdict(self) -> str | None:
        """Whether compression pays here; None before there are dense and sparse steps to compare."""
        dense, sparse = self.dense, self.sparse
        exchange_s = sum(dense.seconds.values()) / dense.steps if dense.steps else None
        sent = dense.sent_bytes_per_step, sparse.sent_bytes_per_step
        return verdict((dense.seconds_per_step, sparse.seconds_per_step), sent, exchange_s)

    def _rows(self) -> list[tuple[str, ...]]:
        names = ["steps", "sparsity", "compression_ratio", "selected_per_wanted", "sent_bytes", "received_bytes"]
        names += ["sent_bytes_per_step", "seconds_per_step"]
        rows = [(name, getattr(self.dense, name), getattr(self.sparse, name)) for name in names]
        for name in sorted({*self.dense.seconds, *self.sparse.seconds}):
            rows.append((f"seconds in {name}", self.dense.seconds.get(name), self.sparse.seconds.get(name)))
        shown = [(name, *(format_value(value, "count" if isinstance(value, int) else "number") for value in values))
                 for name, *values in rows]  # fmt: skip
        of_dense = (1.0 if self.dense.steps else None, self.sent_of_dense)
        share = ("sent, of a dense step", *(format_value(each, "share") for each in of_dense))
        return [*shown[: len(names)], share, *shown[len(names) :]]

    @property
    def _said(self) -> str:
        lines = [f"compression was active on {self.sparse.steps} of {self.steps} steps"]
        if says := self.verdict:
            lines.append(says)
        if self.nonfinite:
            lines.append(f"skipped {self.nonfinite} steps with a non-finite gradient")
        return "\n".join(lines)

    def __str__(self) -> str:
        rows = [("", "dense", "sparse"), *self._rows()]
        return "\n".join([*(f"{name:24}{dense:>16}{sparse:>16}" for name, dense, sparse in rows), self._said])

    def _repr_html_(self) -> str:
        """Return the same as a table and a figure, for notebooks."""
        of = {"bytes": "sent_bytes_per_step", "seconds": "seconds_per_step"}
        phases = {"dense": self.dense, "sparse": self.sparse}
        bars = {f"{unit} a step": (unit, {name: getattr(phase, figure) for name, phase in phases.items()})
                for unit, figure in of.items()}  # fmt: skip
        return as_html(self._rows(), bars, self._said)
