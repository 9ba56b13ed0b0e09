"""One record a step, from the very first, to every sink; a summary that is never NaN; one loud line at the start."""

from __future__ import annotations

import io
import json
import logging
import math
import threading
import time
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import CallbackSink, JsonlSink, MemorySink, OkTopk, StepRecord, Summary, TopkA
from tests.ddp.harness import EXCHANGE_TIMEOUT_S, Net, Worlds, attach, loss_of

pytestmark = pytest.mark.processes

NUMEL = sum(parameter.numel() for parameter in Net().parameters())
DENSE_STEPS, STEPS = 3, 7


def numbers_in(thing: Any) -> list[float]:
    if isinstance(thing, dict):
        return [number for value in thing.values() for number in numbers_in(value)]
    if isinstance(thing, (list, tuple)):
        return [number for value in thing for number in numbers_in(value)]
    return [thing] if isinstance(thing, (int, float)) else []


class Run:
    """A net, attached; it takes the usual steps when asked to."""

    def __init__(self, **settings: Any) -> None:
        self.model = DDP(Net(), bucket_cap_mb=0.005)
        defaults = {"dense_steps": DENSE_STEPS, "exclude": "*bias"}
        self.attached = attach(self.model, OkTopk(density=0.01), **{**defaults, **settings})

    def step(self, step: int, factor: float = 1.0) -> None:
        (loss_of(self.model, dist.get_rank(), step) * factor).backward()


@dataclass(frozen=True)
class Recorded:
    """What one rank's sinks, and its handle, had to say."""

    records: list[StepRecord]
    called: list[StepRecord]
    last: list[StepRecord | None]
    summary: Summary
    lines: list[str]


def run_with_sinks(folder: Path) -> Recorded:
    memory, called, path = MemorySink(), list[StepRecord](), folder / f"{dist.get_rank()}" / "records.jsonl"
    run = Run(sinks=[memory, called.append, CallbackSink(called.append), JsonlSink(path)])
    last = [run.attached.last]
    for step in range(STEPS):
        run.step(step)
        last.append(run.attached.last)
    run.attached.detach()
    return Recorded(memory.records, called, last, run.attached.summary(), path.read_text().splitlines())


@pytest.fixture(scope="module")
def recorded(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    return worlds.run(2, run_with_sinks, tmp_path_factory.mktemp("sinks"))


def test_collectives_say_in_detail_what_the_totals_say(recorded: list[Recorded]) -> None:
    for record in (record for seen in recorded for record in seen.records):
        made = record.collectives
        assert sum(each["sent_bytes"] for each in made.values()) == record.sent_bytes
        assert sum(each["received_bytes"] for each in made.values()) == record.received_bytes
        assert sum(count for each in made.values() for _, count in each["sizes"]) == record.messages
        for each in made.values():
            assert sum(size * count for size, count in each["sizes"]) == each["sent_bytes"]
        for phase, sent in record.sent_by_phase.items():
            assert sum(each["sent_bytes"] for name, each in made.items() if name.startswith(f"{phase}/")) == sent
        assert all(each["calls"] > 0 for each in made.values())


def test_what_is_delivered_is_somebodys_or_travelled_dense(recorded: list[Recorded]) -> None:
    biases = sum(parameter.numel() for name, parameter in Net().named_parameters() if name.endswith("bias"))
    for record in (record for seen in recorded for record in seen.records):
        assert record.world_size == 2
        assert record.dense_tail_numel == (NUMEL if record.phase == "dense" else biases)
        assert sum(record.nnz_by_owner) == record.nnz - record.dense_tail_numel
        assert len(record.nnz_by_owner) == (0 if record.phase == "dense" else 2)


def run_for_the_norm() -> tuple[float, float]:
    run = Run(dense_steps=0)
    for step in range(2):
        run.step(step)
    held = torch.cat(list(run.attached.residual.values()))
    norms = run.attached.residual_norm(), float(held.double().norm())
    run.attached.detach()
    return norms


def test_the_norm_of_what_is_held_back(worlds: Worlds) -> None:
    for told, computed in worlds.run(2, run_for_the_norm):
        assert told == pytest.approx(computed, rel=1e-5)
        assert told > 0


def test_every_step_has_a_record_from_the_very_first(recorded: list[Recorded]) -> None:
    for seen in recorded:
        assert [record.step for record in seen.records] == list(range(STEPS))
        assert seen.called == [record for record in seen.records for _ in range(2)]
        assert seen.last == [None, *seen.records]
        assert [json.loads(line) for line in seen.lines] == [json.loads(json.dumps(asdict(r))) for r in seen.records]
        assert seen.summary.steps == STEPS
        assert all(math.isfinite(number) for record in seen.records for number in numbers_in(asdict(record)))


def test_dense_steps_say_that_they_are_dense(recorded: list[Recorded]) -> None:
    for seen in recorded:
        for record in seen.records[:DENSE_STEPS]:
            assert (record.phase, record.sparsity, record.compression_ratio) == ("dense", 0.0, 1.0)
            assert record.numel == record.wanted == record.selected == record.nnz == NUMEL
            assert record.nominal_bytes == 4 * NUMEL
            assert record.sent_bytes == 4 * NUMEL  # two ranks: half of the gradient, then half of the sum
            assert not record.skipped


def test_sparse_steps_say_what_they_delivered(recorded: list[Recorded]) -> None:
    biases = sum(p.numel() for name, p in Net().named_parameters() if name.endswith("bias"))
    for seen in recorded:
        for record in seen.records[DENSE_STEPS:]:
            assert record.phase == "sparse"
            assert biases < record.wanted < NUMEL / 4
            assert record.nnz >= biases
            assert record.sparsity == 1 - record.nnz / NUMEL
            assert record.compression_ratio == NUMEL / record.nnz
            assert 0 < record.sent_bytes < 4 * NUMEL


def test_the_ranks_records_agree(recorded: list[Recorded]) -> None:
    for records in zip(*(seen.records for seen in recorded), strict=True):
        assert len({record.nnz for record in records}) == 1, "all ranks hold the same result"
        assert sum(record.sent_bytes for record in records) == sum(record.received_bytes for record in records)


def test_buckets_add_up_to_their_step(recorded: list[Recorded]) -> None:
    for seen in recorded:
        for record in seen.records:
            assert len(record.buckets) > 1
            for name in ("numel", "nnz", "wanted", "selected", "sent_bytes", "received_bytes", "messages"):
                assert sum(getattr(bucket, name) for bucket in record.buckets) == getattr(record, name)
            assert record.sent_bytes == sum(record.sent_by_phase.values())


def test_the_summary_counts_by_phase(recorded: list[Recorded]) -> None:
    for seen in recorded:
        summary, sparse = seen.summary, seen.records[DENSE_STEPS:]
        assert (summary.dense.steps, summary.sparse.steps, summary.nonfinite) == (DENSE_STEPS, len(sparse), 0)
        assert (summary.dense.sparsity, summary.dense.compression_ratio) == (0.0, 1.0)
        assert summary.sparse.sparsity == pytest.approx(1 - sum(r.nnz for r in sparse) / (NUMEL * len(sparse)))
        assert summary.sparse.selected_per_wanted == pytest.approx(
            sum(r.selected for r in sparse) / sum(r.wanted for r in sparse)
        )
        assert summary.dense.sent_bytes + summary.sparse.sent_bytes == sum(r.sent_bytes for r in seen.records)
        assert summary.sparse.seconds.keys() == {name for record in sparse for name in record.seconds}
        assert f"active on {len(sparse)} of {STEPS} steps" in str(summary)
        assert "nan" not in str(summary).lower()


def summaries() -> list[str]:
    """The summary of nothing, of dense steps only, of sparse steps only, of skipped steps only."""
    texts = []
    for steps, dense_steps, factor in ((0, 5, 1.0), (2, 5, 1.0), (2, 0, 1.0), (2, 0, math.nan)):
        run = Run(dense_steps=dense_steps, on_nonfinite="skip")
        for step in range(steps):
            run.step(step, factor)
        run.attached.detach()
        texts.append(str(run.attached.summary()))
    return texts


def test_a_summary_of_nothing_says_so(worlds: Worlds) -> None:
    for nothing, dense, sparse, skipped in worlds.run(1, summaries):
        for text in (nothing, dense, sparse, skipped):
            assert "nan" not in text.lower()
        assert _row(nothing, "sparsity") == ["n/a", "n/a"]
        assert "active on 0 of 0 steps" in nothing
        assert _row(dense, "sparsity") == ["0", "n/a"]
        assert _row(dense, "compression_ratio") == ["1", "n/a"]
        assert _row(sparse, "sparsity")[0] == "n/a"
        assert _row(sparse, "sparsity")[1] != "n/a"
        assert _row(skipped, "sparsity") == ["n/a", "n/a"]
        assert "skipped 2 steps" in skipped


def _row(text: str, name: str) -> list[str]:
    return next(line.split()[1:] for line in text.splitlines() if line.startswith(name))


class Broken:
    """A sink that takes two records."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        if len(self.records) == 2:
            raise OSError("disk full")
        self.records.append(record)

    def close(self) -> None:
        raise OSError("nothing to close")


class Unclosable(MemorySink):
    def close(self) -> None:
        raise OSError("will not close")


def run_with_broken_sinks() -> tuple[list[int], list[str], bool]:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("oktopk").addHandler(handler)
    broken, memory, unclosable = Broken(), MemorySink(), Unclosable()
    run = Run(sinks=[broken, memory, unclosable])
    for step in range(STEPS):
        run.step(step)
    active = run.attached.active
    run.attached.detach()
    logging.getLogger("oktopk").removeHandler(handler)
    counts = [len(sink.records) for sink in (broken, memory, unclosable)]
    return counts, lines.getvalue().splitlines(), active


def test_a_sink_that_fails_is_reported_once_and_dropped(worlds: Worlds) -> None:
    for counts, lines, active in worlds.run(2, run_with_broken_sinks):
        assert counts == [2, STEPS, STEPS]
        assert active
        assert len([line for line in lines if "Broken" in line and "disk full" in line]) == 1
        assert len([line for line in lines if "Unclosable" in line and "will not close" in line]) == 1
        assert len(lines) == 2


class Hangs(MemorySink):
    """A sink whose server stops to answer, at its third record or when it is closed."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.released = when, threading.Event()

    def write(self, record: StepRecord) -> None:
        if self.when == "write" and len(self.records) == 2:
            self.released.wait(40)
        super().write(record)

    def close(self) -> None:
        if self.when == "close":
            self.released.wait(40)


def run_with_a_sink_that_hangs(when: str) -> dict[str, Any]:
    """Train for as long as the sink is waited for, and some more; only rank 1's hangs."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("oktopk").addHandler(handler)
    hangs, memory, step = Hangs(when if dist.get_rank() == 1 else "never"), MemorySink(), 0
    run, start = Run(sinks=[hangs, memory], timeout=4.0), time.monotonic()
    over = False
    while not over:
        run.step(step)
        step += 1
        over = _any_rank(step >= STEPS and (when == "close" or time.monotonic() > start + 5))
        time.sleep(0.02)
    active, before = run.attached.active, time.monotonic()
    run.attached.detach()
    seconds = time.monotonic() - before
    hangs.released.set()
    logging.getLogger("oktopk").removeHandler(handler)
    return {
        "active": active,
        "steps": step,
        "records": [record.step for record in memory.records],
        "detach": seconds,
        "lines": lines.getvalue().splitlines(),
        "threads": [thread.name for thread in threading.enumerate() if thread.name == "oktopk exchange"],
    }


def _any_rank(holds: bool) -> bool:
    votes = torch.tensor([float(holds)])
    dist.all_reduce(votes)
    return bool(votes)


@pytest.mark.parametrize("when", ["write", "close"])
def test_a_sink_that_hangs_is_dropped_and_training_goes_on(worlds: Worlds, when: str) -> None:
    for rank, seen in enumerate(worlds.run(2, run_with_a_sink_that_hangs, when)):
        assert seen["active"]
        assert seen["records"] == list(range(seen["steps"]))
        assert seen["detach"] < 15
        assert len([line for line in seen["lines"] if "Hangs hangs" in line]) == rank
        assert seen["threads"] == []


def status_lines() -> list[str]:
    lines = []
    for model, settings in (
        (nn.Linear(256, 128), {"dense_steps": 7}),
        (nn.Linear(256, 128), {"dense_steps": 0, "exclude": ()}),
        (Net(), {}),
    ):
        said = io.StringIO()
        with redirect_stderr(said):
            ddp = DDP(model)
            attached = oktopk.attach(ddp, TopkA(density=0.02), timeout=EXCHANGE_TIMEOUT_S, **settings)
        assert attached.active
        attached.detach()
        lines.append(said.getvalue())
    return lines


def test_one_line_says_at_the_start_what_is_active(worlds: Worlds) -> None:
    first, second = worlds.run(2, status_lines)
    assert second == ["", "", ""], "one rank speaks for all"
    usual, all_sparse, all_dense = first
    for words in ("TopkA", "density=0.02", "2 ranks", "7 dense steps", "1 parameters (32,768 elements) sparse"):
        assert words in usual
    assert "1 (128) dense" in usual
    assert "kernel: cpu" in usual
    assert usual.count("\n") == 1
    assert "2 parameters (32,896 elements) sparse" in all_sparse
    assert "WARNING" in all_dense
    assert "WARNING" not in usual + all_sparse
