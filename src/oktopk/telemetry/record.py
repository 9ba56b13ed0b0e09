"""Making a `StepRecord`: of one reduction, or of all reductions of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oktopk.algorithms.base import StepStats
from oktopk.codec import WORD_BYTES
from oktopk.comm import Traffic
from oktopk.selection import num_selected
from oktopk.telemetry.schema import StepRecord, catalogue

PAIR_BYTES = 2 * WORD_BYTES


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
        step=step,
        phase=phase,
        numel=numel,
        wanted=dense_tail + num_selected(numel - dense_tail, density),
        selected=dense_tail + outcome.selected,
        nnz=nnz,
        sparsity=sparsity_of(nnz, numel),
        compression_ratio=ratio_of(nnz, numel),
        nominal_bytes=pairs * PAIR_BYTES + (nnz - pairs) * WORD_BYTES,
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        messages=traffic.messages,
        seconds=dict(traffic.phase_seconds),
        sent_by_phase=traffic.sent_by_phase,
        collectives=traffic.by_collective,
        world_size=size,
        dense_tail_numel=numel if phase == "dense" else dense_tail,
        nnz_by_owner=outcome.owners,
        threshold=outcome.threshold,
        global_threshold=outcome.global_threshold,
        oldest_wait_steps=outcome.oldest_wait_steps,
    )


def total_of(parts: Sequence[StepRecord], *, step: int, phase: str) -> StepRecord:
    """Return the record of a step made of several reductions."""
    merged: dict[str, Any] = {
        name: figure.merge([getattr(part, name) for part in parts])
        for name, figure in catalogue(StepRecord).items()
        if figure.merge is not None
    }
    numel, nnz = merged["numel"], merged["nnz"]
    return StepRecord(
        step=step,
        phase=phase,
        sparsity=sparsity_of(nnz, numel),
        compression_ratio=ratio_of(nnz, numel),
        buckets=tuple(parts),
        **merged,
    )
