"""Making a `StepRecord`: of one reduction, or of all reductions of a step."""

from collections.abc import Sequence
from typing import Any

from oktopk.algorithms.base import StepStats
from oktopk.comm import Traffic
from oktopk.selection import num_selected
from oktopk.telemetry.schema import StepRecord, catalogue
from oktopk.words import WORD_BYTES


def sparsity_of(nnz: int, numel: int) -> float:
    """Return 1 - nnz / numel; an empty gradient is not sparse."""
    return 1.0 - nnz / numel if numel else 0.0


def ratio_of(nnz: int, numel: int) -> float | None:
    """Return numel / nnz; None where nothing was delivered."""
    if not numel:
        return 1.0
    return numel / nnz if nnz else None


def record_of(
    outcome: StepStats,
    traffic: Traffic,
    *,
    step: int,
    phase: str,
    numel: int,
    dense_tail: int,
    density: float,
    size: int,
) -> StepRecord:
    """Return the record of a reduction of `numel` elements, the last `dense_tail` of which travelled dense."""
    pairs = outcome.pairs or 0
    nnz = numel if outcome.pairs is None else dense_tail + pairs
    return StepRecord(
        step=step, phase=phase, world_size=size,
        numel=numel, dense_tail_numel=numel if phase == "dense" else dense_tail,
        wanted=dense_tail + num_selected(numel - dense_tail, density), selected=dense_tail + outcome.selected,
        nnz=nnz, nnz_by_owner=outcome.owners, sparsity=sparsity_of(nnz, numel), compression_ratio=ratio_of(nnz, numel),
        nominal_bytes=pairs * 2 * WORD_BYTES + (nnz - pairs) * WORD_BYTES,
        sent_bytes=traffic.sent_bytes, received_bytes=traffic.received_bytes, messages=traffic.messages,
        seconds=dict(traffic.phase_seconds), sent_by_phase=traffic.sent_by_phase, collectives=traffic.by_collective,
        threshold=outcome.threshold, global_threshold=outcome.global_threshold,
        oldest_wait_steps=outcome.oldest_wait_steps,
    )  # fmt: skip


def local_record(step: int, numel: int, size: int) -> StepRecord:
    """Return the record of a step of local steps without an exchange: nothing was wanted, and nothing was sent."""
    return StepRecord(
        step=step, phase="local", world_size=size, numel=numel, dense_tail_numel=0, wanted=0, selected=0, nnz=0,
        sparsity=sparsity_of(0, numel), compression_ratio=None, nominal_bytes=0, sent_bytes=0, received_bytes=0,
        messages=0,
    )  # fmt: skip


def total_of(parts: Sequence[StepRecord], *, step: int, phase: str) -> StepRecord:
    """Return the record of a step made of several reductions."""
    merged: dict[str, Any] = {
        name: figure.merge([getattr(part, name) for part in parts])
        for name, figure in catalogue(StepRecord).items()
        if figure.merge is not None
    }
    numel, nnz = merged["numel"], merged["nnz"]
    sparsity, ratio = sparsity_of(nnz, numel), ratio_of(nnz, numel)
    return StepRecord(
        step=step, phase=phase, sparsity=sparsity, compression_ratio=ratio, buckets=tuple(parts), **merged
    )
