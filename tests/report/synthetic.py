"""Runs that never were: records with random figures, in the form that the trainer writes."""

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
    steps: int = 30, ranks: int = 2, dense_steps: int = 8, *, seed: int = 0, steps_per_epoch: int = 6,
    skipped: tuple[int, ...] = (), density_change: int | None = None,
) -> list[Record]:  # fmt: skip
    """Return the records of a run."""
    chance = random.Random(seed)
    config = {"compressor": "oktopk", "density": DENSITY, "dnn": "none", "dense_steps": dense_steps, "lr": 0.1}
    records: list[Record] = [
        {"kind": "run", "version": 1, "started": "2026-01-01T00:00:00+00:00", "config": config, "workers": ranks,
         "numel": NUMEL, "sparse_numel": NUMEL - SIDE, "steps": steps, "dense_bytes": 8 * NUMEL * (ranks - 1) // ranks}
    ]  # fmt: skip
    for number in range(steps):
        k = int(DENSITY * (NUMEL - SIDE)) * (2 if density_change is not None and number >= density_change else 1)
        epoch, place = divmod(number, steps_per_epoch)
        records.append(make_step(chance, number, ranks, number >= dense_steps, number in skipped, k, epoch))
        if number == dense_steps:
            records.append(make_event("first-sparse", number))
        if place == steps_per_epoch - 1:
            records.append(make_epoch(chance, epoch, number + 1))
    return [*records, make_event("end", steps)]


def make_event(event: str, step: int, message: str = "") -> Record:
    return {"kind": "event", "event": event, "step": step, "message": message}


def make_epoch(chance: random.Random, number: int, step: int) -> Record:
    return {
        "kind": "epoch", "epoch": number, "step": step, "train_loss": chance.uniform(1, 9), "lr": 0.1,
        "epoch_seconds": chance.random(), "validated": True, "val_loss": chance.uniform(1, 9),
        "wer": chance.uniform(0, 1.5), "cer": chance.random(),
    }  # fmt: skip


def make_step(
    chance: random.Random, number: int, ranks: int, sparse: bool, skipped: bool, k: int, epoch: int
) -> Record:
    delivered = SIDE + chance.randint(k // 2, k) if sparse else NUMEL
    nnz = 0 if skipped else delivered
    owned = [chance.randint(1, 1000) for _ in range(ranks)] if sparse and not skipped else []
    norms = [chance.uniform(1, 5) if sparse and number % 10 == 0 and not skipped else None for _ in range(ranks)]
    by_rank = [make_rank(chance, sparse, norm) for norm in norms]
    collectives, *_ = [each.pop("collectives") for each in by_rank]
    same = ("selected", "sent_bytes", "received_bytes", "messages", "seconds", "sent_by_phase", "residual_norm")
    first = by_rank[0]
    return {
        "kind": "step", "step": number, "phase": "sparse" if sparse else "dense", "numel": NUMEL,
        "wanted": SIDE + k if sparse else NUMEL, "nnz": nnz, "sparsity": 1 - nnz / NUMEL,
        "compression_ratio": NUMEL / nnz if nnz else None, "nominal_bytes": 8 * nnz, "collectives": collectives,
        "world_size": ranks, "dense_tail_numel": SIDE if sparse else NUMEL, "nnz_by_owner": owned,
        "threshold": chance.random() if sparse else None, "global_threshold": chance.random() if sparse else None,
        "skipped": skipped, "reason": "a NaN" if skipped else None, "wait_seconds": first["wait"], "buckets": [],
        "epoch": epoch, "loss": None if skipped else chance.uniform(0.5, 50), "lr": 0.1, "momentum": 0.5,
        "grad_norm": None if skipped else chance.uniform(1, 9), "utterances": 8 * ranks, "characters": 100 * ranks,
        "ranks": by_rank, "split": {name: first[name] for name in SPLIT}, **{name: first[name] for name in same},
    }  # fmt: skip


def make_rank(chance: random.Random, sparse: bool, norm: float | None) -> Record:
    """Return the figures of a rank; all its bytes follow from its messages."""
    collectives = {}
    for phase, collective in (SPARSE if sparse else DENSE).items():
        low, high = (4, 12) if phase == "agree" else (20, 90_000)
        sizes = {chance.randint(low, high): chance.randint(1, 3) for _ in range(2)}
        sent = sum(size * count for size, count in sizes.items())
        made = {"calls": 2, "sent_bytes": sent, "received_bytes": sent, "sizes": [[*pair] for pair in sizes.items()]}
        collectives[f"{phase}/{collective}"] = made
    by_phase = {name.split("/")[0]: made["sent_bytes"] for name, made in collectives.items()}
    timed = (*COMPUTING, *by_phase) if sparse else ("dense_tail", "apply")
    return {
        "loss": chance.uniform(1, 9), "utterances": 8.0, "characters": 100.0, "sent_bytes": sum(by_phase.values()),
        "received_bytes": sum(by_phase.values()), "selected": chance.randint(1, 2000),
        **{name: chance.uniform(0.001, 0.1) for name in SPLIT}, "residual_norm": norm, "collectives": collectives,
        "messages": sum(count for made in collectives.values() for _, count in made["sizes"]),
        "seconds": {name: chance.uniform(0.0001, 0.01) for name in timed}, "sent_by_phase": by_phase,
    }  # fmt: skip


def write_run(folder: Path, records: list[Record]) -> Path:
    """Write the records as a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
