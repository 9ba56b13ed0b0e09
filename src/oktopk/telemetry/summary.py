"""`Summary`: all steps of an attachment, added up."""

from __future__ import annotations

from dataclasses import dataclass, field

from oktopk.telemetry.format import format_value
from oktopk.telemetry.record import ratio_of, sparsity_of
from oktopk.telemetry.schema import StepRecord, add_by_name


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

    def add_(self, record: StepRecord) -> None:
        """Count a step; one that was skipped delivered nothing, and is in no mean."""
        self.steps += 1
        self.sent_bytes += record.sent_bytes
        self.received_bytes += record.received_bytes
        self.seconds = add_by_name([self.seconds, record.seconds])
        if record.skipped:
            self.skipped += 1
            return
        for name in ("numel", "nnz", "wanted", "selected"):
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

    def __str__(self) -> str:
        names = ("steps", "sparsity", "compression_ratio", "selected_per_wanted", "sent_bytes", "received_bytes")
        rows = [(name, getattr(self.dense, name), getattr(self.sparse, name)) for name in names]
        for name in sorted({*self.dense.seconds, *self.sparse.seconds}):
            rows.append((f"seconds in {name}", self.dense.seconds.get(name), self.sparse.seconds.get(name)))
        lines = [f"{'':24}{'dense':>16}{'sparse':>16}"]
        lines += [f"{name:24}{_written(dense):>16}{_written(sparse):>16}" for name, dense, sparse in rows]
        lines.append(f"compression was active on {self.sparse.steps} of {self.steps} steps")
        if self.nonfinite:
            lines.append(f"skipped {self.nonfinite} steps with a non-finite gradient")
        return "\n".join(lines)


def _written(value: float | None) -> str:
    return format_value(value, "count" if isinstance(value, int) else "number")
