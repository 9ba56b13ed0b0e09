"""The figures of a whole run, as docs/accounting.md defines them."""

import math
from typing import Any

import numpy as np

from oktopk.telemetry.run import Floats, Run, sum_known
from oktopk.telemetry.schema import SPLIT, mean
from oktopk.telemetry.verdict import verdict


def finite(value: float | None) -> float | None:
    """Return the value; None if it is not finite, because nobody prints NaN as a result."""
    return value if value is not None and math.isfinite(value) else None


def total(values: Floats) -> float | None:
    """Return the sum of the known values; None if there are none."""
    known = values[~np.isnan(values)]
    return math.fsum(known) if len(known) else None


def whole_total(values: Floats) -> int | None:
    """Return the sum of the known whole numbers; None if there are none."""
    return None if np.isnan(values).all() else int(np.nansum(values))


def middle(values: Floats) -> float | None:
    """Return the median of the known values; None if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def quotient(above: float | None, below: float | None) -> float | None:
    """Return above / below; None if there is no such number."""
    return above / below if above is not None and below else None


def summary_of(run: Run) -> dict[str, Any]:
    """Return the figures of a run; None for those that have nothing to measure."""
    validated = [epoch for epoch in run.epochs if epoch.get(run.error) is not None]
    best = min(validated, key=lambda epoch: float(epoch[run.error]), default={})
    last = validated[-1] if validated else {}
    delivered = run.is_sparse & ~run.is_skipped
    sent, dense = whole_total(run.column("sent_bytes")) or 0, int(np.nansum(run.dense_bytes))
    return {
        "steps": run.num_steps, "dense_steps": int(run.masks["dense"].sum()), "sparse_steps": int(run.is_sparse.sum()),
        "skipped_steps": int(run.is_skipped.sum()), "epochs": len(run.epochs),
        "first_loss": run.epochs[0].get("train_loss") if run.epochs else None,
        "train_loss": run.epochs[-1].get("train_loss") if run.epochs else None,
        "val_loss": last.get("val_loss"), "wer": last.get("wer"), "cer": last.get("cer"),
        "bits_per_byte": last.get("bits_per_byte"), "best_bits_per_byte": best.get("bits_per_byte"),
        "best_wer": best.get("wer"), "best_epoch": best.get("epoch"),
        "sparsity": mean(run.column("sparsity")[delivered]),
        "compression_ratio": mean(run.column("compression_ratio")[delivered]),
        "sent_bytes": sent, "dense_bytes": dense, "sent_of_dense": quotient(sent, dense),
        "sent_bytes_per_step": {name: mean(run.column("sent_bytes")[made]) for name, made in run.masks.items()},
        "seconds": {name: total(run.column(f"split.{name}")) or 0.0 for name in SPLIT},
        "seconds_per_step": {name: middle(run.step_seconds[made]) for name, made in run.masks.items()},
        "verdict": verdict_of(run),
    }  # fmt: skip


def verdict_of(run: Run) -> str | None:
    """Return the sentence that says whether compression paid in a run."""
    dense, sparse = run.masks["dense"], run.masks["sparse"]
    exchange_s = mean(sum_known(list(run.phases_of().values()))[dense]) if run.names("seconds") else None
    sent = mean(run.column("sent_bytes")[dense]), mean(run.column("sent_bytes")[sparse])
    return verdict((middle(run.step_seconds[dense]), middle(run.step_seconds[sparse])), sent, exchange_s)
