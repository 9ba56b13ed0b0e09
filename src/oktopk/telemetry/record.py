"""`StepRecord`: what one step did, measured; made of one reduction, or of several."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from oktopk.algorithms.base import StepStats
from oktopk.codec import WORD_BYTES
from oktopk.comm import Traffic
from oktopk.selection import num_selected

PAIR_BYTES = 2 * WORD_BYTES

PHASES = ("accumulate", "select", "pack", "exchange", "reduce", "gather", "apply", "agree", "dense_tail")
"""Of the built-in algorithms, in the order in which a step goes through them; "dense_tail" is what travels dense."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank. What could not be measured is None, never NaN; `docs/accounting.md` defines every figure.

    step                 from 0, skipped steps included
    phase                "dense" or "sparse"
    numel                elements of the gradient
    wanted               k: elements that a sparse step is asked for; numel for a dense step
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
    collectives          measured: calls, bytes and message sizes, by "phase/collective"
    world_size           P
    dense_tail_numel     elements that travelled dense beside the sparse ones; numel for a dense step
    nnz_by_owner         elements of the result in each rank's region, as the regions are cut after the step; empty if
                         there are none
    threshold            the local threshold of this step, as a score; None if there was none
    global_threshold     the smallest score that was delivered, or the threshold for it; None if there was none
    skipped              the step was refused (non-finite) and nothing was delivered
    reason               why it was: which rank, which parameter; None if it was not
    wait_seconds         measured: how long backward waited for the exchange, after its own work was done; None for a
                         `Reducer`, whose caller waits for all of it
    buckets              the same for each group of parameters that was reduced together; empty for a `Reducer`
    """

    step: int
    phase: str
    numel: int
    wanted: int
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
    collectives: dict[str, dict[str, Any]] = field(default_factory=dict)
    world_size: int | None = None
    dense_tail_numel: int | None = None
    nnz_by_owner: tuple[int, ...] = ()
    threshold: float | None = None
    global_threshold: float | None = None
    skipped: bool = False
    reason: str | None = None
    wait_seconds: float | None = None
    buckets: tuple[StepRecord, ...] = ()

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(asdict(self), allow_nan=False)


def sparsity_of(nnz: int, numel: int) -> float:
    """Return 1 - nnz / numel; an empty gradient is not sparse."""
    return 1.0 - nnz / numel if numel else 0.0


def ratio_of(nnz: int, numel: int) -> float | None:
    """Return numel / nnz; None where nothing was delivered, since there is no such number."""
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
    )


def total_of(parts: Sequence[StepRecord], *, step: int, phase: str) -> StepRecord:
    """Return the record of a step made of several reductions."""
    numel, nnz = sum(part.numel for part in parts), sum(part.nnz for part in parts)
    seconds: defaultdict[str, float] = defaultdict(float)
    sent: Counter[str] = Counter()
    for part in parts:
        sent.update(part.sent_by_phase)
        for name, spent in part.seconds.items():
            seconds[name] += spent
    return StepRecord(
        step=step,
        phase=phase,
        numel=numel,
        wanted=sum(part.wanted for part in parts),
        selected=sum(part.selected for part in parts),
        nnz=nnz,
        sparsity=sparsity_of(nnz, numel),
        compression_ratio=ratio_of(nnz, numel),
        nominal_bytes=sum(part.nominal_bytes for part in parts),
        sent_bytes=sum(part.sent_bytes for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        messages=sum(part.messages for part in parts),
        seconds=dict(seconds),
        sent_by_phase=dict(sent),
        collectives=_all_collectives(part.collectives for part in parts),
        world_size=parts[0].world_size if parts else None,
        dense_tail_numel=_total([part.dense_tail_numel for part in parts]),
        nnz_by_owner=tuple(map(sum, zip_longest(*(part.nnz_by_owner for part in parts), fillvalue=0))),
        threshold=_mean([part.threshold for part in parts]),
        global_threshold=_mean([part.global_threshold for part in parts]),
        buckets=tuple(parts),
    )


def _all_collectives(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the collectives of several reductions together."""
    together: dict[str, dict[str, Any]] = {}
    for name, made in (item for part in parts for item in part.items()):
        known = together.setdefault(name, {"calls": 0, "sent_bytes": 0, "received_bytes": 0, "sizes": []})
        for count in ("calls", "sent_bytes", "received_bytes"):
            known[count] += made[count]
        sizes = Counter(dict(known["sizes"]))
        sizes.update(dict(made["sizes"]))
        known["sizes"] = [[size, count] for size, count in sorted(sizes.items())]
    return together


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
