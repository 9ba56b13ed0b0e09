"""`StepRecord`: what one step did, measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from oktopk.wire import WORD_BYTES

PAIR_BYTES = 2 * WORD_BYTES


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank. What could not be measured is None, never NaN; `docs/accounting.md` defines every figure.

    step                 from 0, skipped steps included
    phase                "dense" or "sparse"
    numel                elements of the gradient
    selected             elements that this rank chose to send
    nnz                  elements of the result
    sparsity             1 - nnz / numel; 0.0 for a dense step
    compression_ratio    numel / nnz; 1.0 for a dense step; None if nothing was delivered
    nominal_bytes        nnz * 8 (int32 index + float32 value); numel * 4 for a dense step
    sent_bytes           measured: what this rank handed to the network for other ranks
    received_bytes       measured: what came from other ranks
    messages             measured: messages this rank sent
    seconds              measured: by phase of the algorithm
    sent_by_phase        measured: bytes sent, by phase of the algorithm
    threshold            the local threshold of this step, as a score; None if there was none
    global_threshold     the smallest score that was delivered, or the threshold for it; None if there was none
    skipped              the step was refused (non-finite) and nothing was delivered
    """

    step: int
    phase: str
    numel: int
    selected: int
    nnz: int
    sparsity: float
    compression_ratio: float | None
    nominal_bytes: int
    sent_bytes: int
    received_bytes: int
    messages: int
    seconds: dict[str, float] = field(default_factory=dict)
    sent_by_phase: dict[str, int] = field(default_factory=dict)
    threshold: float | None = None
    global_threshold: float | None = None
    skipped: bool = False


def sparsity_of(nnz: int, numel: int) -> float:
    """Return 1 - nnz / numel; an empty gradient is not sparse."""
    return 1.0 - nnz / numel if numel else 0.0


def ratio_of(nnz: int, numel: int) -> float | None:
    """Return numel / nnz; None where nothing was delivered, since there is no such number."""
    if not numel:
        return 1.0
    return numel / nnz if nnz else None
