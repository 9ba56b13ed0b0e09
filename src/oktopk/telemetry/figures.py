"""The figures of a whole run, as docs/accounting.md defines them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oktopk.telemetry.reader import Record
from oktopk.telemetry.run import Floats, Run
from oktopk.telemetry.schema import SPLIT


def finite(value: float | None) -> float | None:
    """Return the value; None if it is not finite, because nobody prints NaN as a result."""
    return value if value is not None and math.isfinite(value) else None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None, never NaN, if there are none."""
    known = [value for value in values if finite(value) is not None]
    return math.fsum(known) / len(known) if known else None  # type: ignore[arg-type]


def total(values: Floats) -> float | None:
    """Return the sum of the known values; None if there are none."""
    known = values[~np.isnan(values)]
    return math.fsum(known.tolist()) if len(known) else None


def whole_total(values: Floats) -> int | None:
    """Return the sum of whole numbers."""
    found = total(values)
    return None if found is None else int(found)


def quotient(above: float | None, below: float | None) -> float | None:
    """Return above / below; None if there is no such number."""
    return above / below if above is not None and below else None


def summarise(records: Iterable[Record]) -> Record:
    """Return the figures of a run; None for those that have nothing to measure."""
    return summary_of(Run.of(records))


def summary_of(run: Run) -> dict[str, Any]:
    """Return the figures of a run; None for those that have nothing to measure."""
    phases = phases_of(run)
    validated = [epoch for epoch in run.epochs if epoch.get("wer") is not None]
    best = min(validated, key=lambda epoch: float(epoch["wer"]), default={})
    last = validated[-1] if validated else {}
    delivered = run.is_sparse & ~run.is_skipped
    sent, dense = whole_total(run.column("sent_bytes")) or 0, int(np.nansum(run.dense_bytes))
    return {
        "steps": run.num_steps,
        "dense_steps": int(phases["dense"].sum()),
        "sparse_steps": int(phases["sparse"].sum()),
        "skipped_steps": int(run.is_skipped.sum()),
        "epochs": len(run.epochs),
        "first_loss": run.epochs[0].get("train_loss") if run.epochs else None,
        "train_loss": run.epochs[-1].get("train_loss") if run.epochs else None,
        "val_loss": last.get("val_loss"),
        "wer": last.get("wer"),
        "cer": last.get("cer"),
        "best_wer": best.get("wer"),
        "best_epoch": best.get("epoch"),
        "sparsity": mean(run.column("sparsity")[delivered].tolist()),
        "compression_ratio": mean(run.column("compression_ratio")[delivered].tolist()),
        "sent_bytes": sent,
        "dense_bytes": dense,
        "sent_of_dense": quotient(sent, dense),
        "sent_bytes_per_step": {name: mean(run.column("sent_bytes")[made].tolist()) for name, made in phases.items()},
        "seconds": {name: total(run.column(f"split.{name}")) or 0.0 for name in SPLIT},
        "seconds_per_step": {name: mean(run.step_seconds[made].tolist()) for name, made in phases.items()},
    }


def phases_of(run: Run) -> dict[str, NDArray[np.bool_]]:
    """Return masks of the dense and of the sparse steps."""
    return {"dense": ~run.is_sparse, "sparse": run.is_sparse}
