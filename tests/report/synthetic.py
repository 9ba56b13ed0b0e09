"""Runs that never were: records with random figures, in the form that the trainer writes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SPLIT = ("data", "compute", "wait", "update")
DENSE = {"dense_tail": "all_reduce"}
SPARSE = {"exchange": "all_to_all", "gather": "all_gather", "dense_tail": "all_reduce", "agree": "all_gather"}
COMPUTING = ("accumulate", "select", "pack", "reduce", "apply")
NUMEL, SIDE, DENSITY = 100_000, 500, 0.02


def make_run(
    steps: int = 30,
    ranks: int = 2,
    dense_steps: int = 8,
    *,
    seed: int = 0,
    steps_per_epoch: int = 6,
    skipped: tuple[int, ...] = (),
    density_change: int | None = None,
    end: str | None = "end",
    density: float = DENSITY,
) -> list[Record]:
    """Return the records of a run."""
    chance = random.Random(seed)
    dense_bytes = 8 * NUMEL * (ranks - 1) // ranks
    config = {"compressor": "oktopk", "density": density, "dnn": "none", "dense_steps": dense_steps, "lr": 0.1}
    records: list[Record] = [
        {"kind": "run", "version": 1, "started": "2026-01-01T00:00:00+00:00", "config": config, "workers": ranks,
         "numel": NUMEL, "sparse_numel": NUMEL - SIDE, "steps": steps, "dense_bytes": dense_bytes}
    ]  # fmt: skip
    for number in range(steps):
        sparse = number >= dense_steps
        k = int(density * (NUMEL - SIDE)) * (2 if density_change is not None and number >= density_change else 1)
        records.append(make_step(chance, number, ranks, sparse, number in skipped, k, number // steps_per_epoch))
        if number == dense_steps:
            records.append({"kind": "event", "event": "first-sparse", "step": number, "message": "it begins"})
        if number % steps_per_epoch == steps_per_epoch - 1:
            records.append(make_epoch(chance, number // steps_per_epoch, number + 1))
    if end is not None:
        records.append({"kind": "event", "event": end, "step": steps, "message": f"the {end}"})
    return records


def make_epoch(chance: random.Random, number: int, step: int) -> Record:
    return {
        "kind": "epoch", "epoch": number, "step": step, "train_loss": chance.uniform(1, 9), "lr": 0.1,
        "epoch_seconds": chance.random(), "validated": True, "val_loss": chance.uniform(1, 9),
        "wer": chance.uniform(0, 1.5), "cer": chance.random(),
    }  # fmt: skip


def make_step(
    chance: random.Random, number: int, ranks: int, sparse: bool, skipped: bool, k: int, epoch: int
) -> Record:
    wanted = SIDE + k if sparse else NUMEL
    nnz = 0 if skipped else SIDE + chance.randint(k // 2, k) if sparse else NUMEL
    owned = [chance.randint(1, 1000) for _ in range(ranks)] if sparse and not skipped else []
    norms = [chance.uniform(1, 5) if sparse and number % 10 == 0 and not skipped else None for _ in range(ranks)]
    by_rank = [make_rank(chance, sparse, norm) for norm in norms]
    collectives = by_rank[0].pop("collectives")
    for other in by_rank[1:]:
        other.pop("collectives")
    first = by_rank[0]
    return {
        "kind": "step", "step": number, "phase": "sparse" if sparse else "dense", "numel": NUMEL, "wanted": wanted,
        "selected": first["selected"], "nnz": nnz, "sparsity": 1 - nnz / NUMEL,
        "compression_ratio": NUMEL / nnz if nnz else None, "nominal_bytes": 8 * nnz, "sent_bytes": first["sent_bytes"],
        "received_bytes": first["received_bytes"], "messages": first["messages"], "seconds": first["seconds"],
        "sent_by_phase": first["sent_by_phase"], "collectives": collectives, "world_size": ranks,
        "dense_tail_numel": SIDE if sparse else NUMEL, "nnz_by_owner": owned,
        "threshold": chance.random() if sparse else None, "global_threshold": chance.random() if sparse else None,
        "skipped": skipped, "reason": "a NaN" if skipped else None, "wait_seconds": first["wait"], "buckets": [],
        "epoch": epoch, "loss": None if skipped else chance.uniform(0.5, 50), "lr": 0.1, "momentum": 0.5,
        "grad_norm": None if skipped else chance.uniform(1, 9), "residual_norm": first["residual_norm"],
        "utterances": 8 * ranks, "characters": 100 * ranks, "ranks": by_rank,
        "split": {name: first[name] for name in SPLIT},
    }  # fmt: skip


def make_rank(chance: random.Random, sparse: bool, norm: float | None) -> Record:
    """Return what a rank measured; all its bytes follow from its messages."""
    collectives = {}
    for phase, collective in (SPARSE if sparse else DENSE).items():
        low, high = (4, 12) if phase == "agree" else (20, 90_000)
        sizes = {chance.randint(low, high): chance.randint(1, 3) for _ in range(2)}
        sent = sum(size * count for size, count in sizes.items())
        collectives[f"{phase}/{collective}"] = {
            "calls": 2, "sent_bytes": sent, "received_bytes": sent, "sizes": [list(pair) for pair in sizes.items()],
        }  # fmt: skip
    by_phase = {name.split("/")[0]: made["sent_bytes"] for name, made in collectives.items()}
    timed = (*COMPUTING, *by_phase) if sparse else ("dense_tail", "apply")
    return {
        "loss": chance.uniform(1, 9), "utterances": 8.0, "characters": 100.0, "sent_bytes": sum(by_phase.values()),
        "received_bytes": sum(by_phase.values()), "selected": chance.randint(1, 2000),
        **{name: chance.uniform(0.001, 0.1) for name in SPLIT},
        "messages": sum(count for made in collectives.values() for _, count in made["sizes"]), "residual_norm": norm,
        "seconds": {name: chance.uniform(0.0001, 0.01) for name in timed}, "sent_by_phase": by_phase,
        "collectives": collectives,
    }  # fmt: skip


def write_run(folder: Path, records: list[Record]) -> Path:
    """Write the records as a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
