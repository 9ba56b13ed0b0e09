"""One record a step, from the very first, to every sink; a summary that is never NaN; one loud line at the start."""

from __future__ import annotations

import io
import json
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
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
from tests.ddp.harness import EXCHANGE_TIMEOUT_S, Net, Worlds, attach, exchange_threads, loss_of

pytestmark = pytest.mark.processes

NUMEL = sum(parameter.numel() for parameter in Net().parameters())
BIASES = sum(parameter.numel() for name, parameter in Net().named_parameters() if name.endswith("bias"))
DENSE_STEPS, STEPS = 3, 7


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
    norms: tuple[float, float]


def run_with_sinks(folder: Path) -> Recorded:
    memory, called, path = MemorySink(), list[StepRecord](), folder / f"{dist.get_rank()}" / "records.jsonl"
    run = Run(sinks=[memory, called.append, CallbackSink(called.append), JsonlSink(path)])
    last = [run.attached.last]
    for step in range(STEPS):
        run.step(step)
        last.append(run.attached.last)
    run.attached.detach()
    norms = run.attached.residual_norm(), float(torch.cat(list(run.attached.residual.values())).double().norm())
    return Recorded(memory.records, called, last, run.attached.summary(), path.read_text().splitlines(), norms)


@pytest.fixture(scope="module")
def recorded(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    return worlds.run(2, run_with_sinks, tmp_path_factory.mktemp("sinks"))


@pytest.fixture(scope="module")
def records(recorded: list[Recorded]) -> list[StepRecord]:
    return [record for seen in recorded for record in seen.records]


def test_every_step_has_a_record_from_the_very_first(recorded: list[Recorded]) -> None:
    for seen in recorded:
        assert [record.step for record in seen.records] == list(range(STEPS))
        assert seen.called == [record for record in seen.records for _ in range(2)]
        assert seen.last == [None, *seen.records]
        assert [json.loads(line) for line in seen.lines] == [json.loads(json.dumps(asdict(r))) for r in seen.records]
        assert not any("NaN" in line or "Infinity" in line for line in seen.lines)
    for at_one_step in zip(*(seen.records for seen in recorded), strict=True):
        assert len({record.nnz for record in at_one_step}) == 1, "all ranks hold the same result"
        assert sum(record.sent_bytes for record in at_one_step) == sum(r.received_bytes for r in at_one_step)


def test_the_norm_of_the_residual(recorded: list[Recorded]) -> None:
    for told, computed in (seen.norms for seen in recorded):
        assert told == pytest.approx(computed, rel=1e-5)
        assert told > 0


def test_dense_and_sparse_steps_say_what_they_delivered(records: list[StepRecord]) -> None:
    for record in records:
        assert (record.numel, record.world_size, record.skipped) == (NUMEL, 2, False)
        assert sum(record.nnz_by_owner) == record.nnz - record.dense_tail_numel
        if record.step < DENSE_STEPS:
            assert (record.phase, record.sparsity, record.compression_ratio) == ("dense", 0.0, 1.0)
            assert record.wanted == record.selected == record.nnz == record.dense_tail_numel == NUMEL
            assert record.nominal_bytes == 4 * NUMEL
            assert record.sent_bytes == 4 * NUMEL  # two ranks: half of the gradient, then half of the sum
            assert record.nnz_by_owner == ()
        else:
            assert (record.phase, record.dense_tail_numel, len(record.nnz_by_owner)) == ("sparse", BIASES, 2)
            assert BIASES < record.wanted < NUMEL / 4
            assert record.nnz >= BIASES
            assert record.sparsity == 1 - record.nnz / NUMEL
            assert record.compression_ratio == NUMEL / record.nnz
            assert 0 < record.sent_bytes < 4 * NUMEL


def test_buckets_phases_and_collectives_add_up_to_their_step(records: list[StepRecord]) -> None:
    for record in records:
        assert len(record.buckets) > 1
        for name in ("numel", "nnz", "wanted", "selected", "sent_bytes", "received_bytes", "messages"):
            assert sum(getattr(bucket, name) for bucket in record.buckets) == getattr(record, name)
        assert record.sent_bytes == sum(record.sent_by_phase.values())
        made = record.collectives
        assert sum(each["sent_bytes"] for each in made.values()) == record.sent_bytes
        assert sum(each["received_bytes"] for each in made.values()) == record.received_bytes
        assert sum(count for each in made.values() for _, count in each["sizes"]) == record.messages
        for each in made.values():
            assert sum(size * count for size, count in each["sizes"]) == each["sent_bytes"]
            assert each["calls"] > 0
        for phase, sent in record.sent_by_phase.items():
            assert sum(each["sent_bytes"] for name, each in made.items() if name.startswith(f"{phase}/")) == sent


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


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """Collect the lines of oktopk's logger."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("oktopk").addHandler(handler)
    yield lines
    logging.getLogger("oktopk").removeHandler(handler)


def run_with_broken_sinks() -> tuple[list[int], list[str], bool]:
    broken, memory, unclosable = Broken(), MemorySink(), Unclosable()
    with logged() as lines:
        run = Run(sinks=[broken, memory, unclosable])
        for step in range(STEPS):
            run.step(step)
        active = run.attached.active
        run.attached.detach()
    return [len(sink.records) for sink in (broken, memory, unclosable)], lines.getvalue().splitlines(), active


def test_a_sink_that_fails_is_reported_once_and_dropped(worlds: Worlds) -> None:
    for counts, lines, active in worlds.run(2, run_with_broken_sinks):
        assert counts == [2, STEPS, STEPS]
        assert active
        assert len([line for line in lines if "Broken" in line and "disk full" in line]) == 1
        assert len([line for line in lines if "Unclosable" in line and "will not close" in line]) == 1
        assert len(lines) == 2


class HangsWriting(MemorySink):
    """A sink whose server stops to answer at its third record, on rank 1."""

    released = threading.Event()

    def write(self, record: StepRecord) -> None:
        if dist.get_rank() == 1 and len(self.records) == 2:
            self.released.wait(40)
        super().write(record)


class HangsClosing(MemorySink):
    """A sink that never closes, on rank 1."""

    def close(self) -> None:
        if dist.get_rank() == 1:
            HangsWriting.released.wait(40)


def run_with_sinks_that_hang() -> dict[str, Any]:
    """Train until the sink is dropped, and some more."""
    HangsWriting.released.clear()
    memory, step, over, start = MemorySink(), 0, False, time.monotonic()
    with logged() as lines:
        run = Run(sinks=[HangsWriting(), memory, HangsClosing()], timeout=4.0)
        while not over:
            run.step(step)
            step += 1
            dropped = dist.get_rank() == 0 or "HangsWriting hangs" in lines.getvalue()
            votes = torch.tensor([float(step >= STEPS and dropped), float(time.monotonic() > start + 20)])
            dist.all_reduce(votes)
            over = bool(votes[0] == 2 or votes[1])
            time.sleep(0.02)
        for _ in range(3):
            run.step(step)
            step += 1
        active, before = run.attached.active, time.monotonic()
        run.attached.detach()
        seconds = time.monotonic() - before
    HangsWriting.released.set()
    return {
        "active": active,
        "steps": step,
        "records": [record.step for record in memory.records],
        "detach": seconds,
        "lines": lines.getvalue().splitlines(),
        "threads": [name for name in exchange_threads() if name == "oktopk exchange"],
    }


def test_a_sink_that_hangs_is_dropped_and_training_goes_on(worlds: Worlds) -> None:
    for rank, seen in enumerate(worlds.run(2, run_with_sinks_that_hang)):
        assert seen["active"]
        assert seen["records"] == list(range(seen["steps"]))
        assert seen["detach"] < 15
        for name in ("HangsWriting hangs", "HangsClosing hangs"):
            assert len([line for line in seen["lines"] if name in line]) == rank
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
