"""One record a step, from the very first, to every sink; a summary that is never NaN; one loud line at the start."""

import io
import json
import logging
import math
import re
import threading
import time
import warnings
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import CallbackSink, JsonlSink, MemorySink, OkTopk, StepRecord, TopkA
from oktopk.algorithms.base import describe
from oktopk.selection import num_selected
from oktopk.telemetry.run import load_run
from tests.ddp.harness import EXCHANGE_TIMEOUT_S, attach, check_words, exchange_threads, gathered, on_ranks
from tests.ddp.nets import Net, loss_of, step_

NUMEL = sum(parameter.numel() for parameter in Net().parameters())
BIASES = sum(parameter.numel() for name, parameter in Net().named_parameters() if name.endswith("bias"))
DENSE_STEPS, STEPS = 3, 7


def started(**settings):
    model = DDP(Net(), bucket_cap_mb=0.005)
    return model, attach(model, OkTopk(density=0.01), **{"dense_steps": DENSE_STEPS, "exclude": "*bias", **settings})


def check_figures(record):
    """Check what a dense or a sparse step delivered, and that buckets, phases and collectives add up."""
    assert (record.numel, record.world_size, record.skipped) == (NUMEL, 2, False)
    assert sum(record.nnz_by_owner) == record.nnz - record.dense_tail_numel
    if record.step < DENSE_STEPS:
        phase = record.phase, record.sparsity, record.compression_ratio, record.nnz_by_owner
        assert phase == ("dense", 0.0, 1.0, ())
        assert record.wanted == record.selected == record.nnz == record.dense_tail_numel == NUMEL
        # Two ranks send half of the gradient, then half of the sum.
        assert record.nominal_bytes == record.sent_bytes == 4 * NUMEL
    else:
        assert (record.phase, record.dense_tail_numel, len(record.nnz_by_owner)) == ("sparse", BIASES, 2)
        assert BIASES < record.wanted < NUMEL / 4
        assert record.nnz >= BIASES
        assert (record.sparsity, record.compression_ratio) == (1 - record.nnz / NUMEL, NUMEL / record.nnz)
        assert 0 < record.sent_bytes < 4 * NUMEL
    assert len(record.buckets) > 1
    for name in ("numel", "nnz", "wanted", "selected", "sent_bytes", "received_bytes", "messages"):
        assert sum(getattr(bucket, name) for bucket in record.buckets) == getattr(record, name)
    made = record.collectives
    for name in ("sent_bytes", "received_bytes"):
        assert sum(each[name] for each in made.values()) == getattr(record, name)
    assert sum(count for each in made.values() for _, count in each["sizes"]) == record.messages
    for each in made.values():
        assert sum(size * count for size, count in each["sizes"]) == each["sent_bytes"]
        assert each["calls"] > 0
    assert record.sent_bytes == sum(record.sent_by_phase.values())
    for phase, sent in record.sent_by_phase.items():
        assert sum(each["sent_bytes"] for name, each in made.items() if name.startswith(f"{phase}/")) == sent


@on_ranks(2)
def test_every_step_has_a_record_from_the_very_first_in_every_sink(tmp_path):
    memory, called, path = MemorySink(), list[StepRecord](), tmp_path / f"{dist.get_rank()}" / "records.jsonl"
    model, attached = started(sinks=[memory, called.append, CallbackSink(called.append), JsonlSink(path)])
    records, last = memory.records, [attached.last]
    for step in range(STEPS):
        step_(model, step)
        last.append(attached.last)
    attached.detach()
    norm = float(torch.cat(list(attached.residual.values())).double().norm())
    assert attached.residual_norm() == pytest.approx(norm, rel=1e-5)
    assert norm > 0
    assert [record.step for record in records] == list(range(STEPS))
    assert called == [record for record in records for _ in range(2)]
    assert last == [None, *records]
    lines = path.read_text().splitlines()
    first, *written, end = [json.loads(line) for line in lines]
    assert written == [json.loads(json.dumps(asdict(record))) for record in records]
    assert (first["kind"], first["workers"], first["rank"]) == ("run", 2, dist.get_rank())
    assert (first["numel"], first["config"]["algorithm"]) == (NUMEL, describe(attached.algorithm))
    assert (end["event"], end["step"]) == ("end", STEPS)
    assert not any("NaN" in line or "Infinity" in line for line in lines)
    for record in records:
        check_figures(record)
    for at_one_step in zip(*gathered(records), strict=True):
        assert len({record.nnz for record in at_one_step}) == 1, "all ranks hold the same result"
        assert sum(record.sent_bytes for record in at_one_step) == sum(r.received_bytes for r in at_one_step)
    check_summary(attached.summary(), records)
    check_html(attached)


@on_ranks(2)
def test_figures_that_a_script_logs_reach_its_report(tmp_path):
    path = tmp_path / f"{dist.get_rank()}.jsonl"
    model, attached = started(sinks=[JsonlSink(path)])
    for step in range(STEPS):
        step_(model, step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attached.log(
                loss=torch.tensor([10.0 - step], requires_grad=True), accuracy=math.nan if step == 1 else step / 8
            )
    with pytest.raises(oktopk.SettingError, match=r"log wants a number for loss.* tensor of shape \(2,\)"):
        attached.log(loss=torch.zeros(2))
    attached.density = 0.02
    attached.detach()
    run = load_run(path)
    assert run.loss.tolist() == [10.0 - step for step in range(STEPS)]
    assert [None if math.isnan(each) else each for each in run.logged("accuracy")] == [
        None if step == 1 else step / 8 for step in range(STEPS)
    ]
    assert (run.header["config"]["model"], run.header["config"]["density"]) == ("Net", 0.01)
    assert [event["event"] for event in run.events] == ["change", "end"]


def check_html(attached):
    html = attached._repr_html_()
    assert "OkTopk(density=0.01" in html
    assert "compression was active on" in html
    bars = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', html)]
    assert bars[0] == max(bars)
    assert bars[1] == pytest.approx(bars[0] * attached.summary().sent_of_dense, abs=0.06)


def check_summary(summary, records):
    sparse = records[DENSE_STEPS:]
    assert (summary.dense.steps, summary.sparse.steps, summary.nonfinite) == (DENSE_STEPS, len(sparse), 0)
    assert (summary.dense.sparsity, summary.dense.compression_ratio) == (0.0, 1.0)
    assert summary.sparse.sparsity == pytest.approx(1 - sum(r.nnz for r in sparse) / (NUMEL * len(sparse)))
    per_wanted = sum(r.selected for r in sparse) / sum(r.wanted for r in sparse)
    assert summary.sparse.selected_per_wanted == pytest.approx(per_wanted)
    assert summary.dense.sent_bytes + summary.sparse.sent_bytes == sum(record.sent_bytes for record in records)
    assert summary.sparse.seconds.keys() == {name for record in sparse for name in record.seconds}
    assert f"active on {len(sparse)} of {STEPS} steps" in str(summary)
    assert [record.step_seconds is None for record in records] == [True] + [False] * (STEPS - 1)
    assert summary.verdict in str(summary)
    assert "nan" not in str(summary).lower()


@on_ranks(1)
def test_a_summary_of_nothing_says_so():
    """The summary of nothing, of dense steps only, of sparse steps only, of skipped steps only."""
    rows, said = [], []
    for steps, dense_steps, factor in ((0, 5, 1.0), (2, 5, 1.0), (2, 0, 1.0), (2, 0, math.nan)):
        model, attached = started(dense_steps=dense_steps, on_nonfinite="skip")
        for step in range(steps):
            (loss_of(model, 0, step) * factor).backward()
        attached.detach()
        said.append(str(attached.summary()))
        assert "nan" not in said[-1].lower()
        rows.append({name: figures for name, *figures in map(str.split, said[-1].splitlines()) if len(figures) == 2})
    assert [row["sparsity"][0] for row in rows] == ["n/a", "0", "n/a", "n/a"]
    assert [row["sparsity"][1] == "n/a" for row in rows] == [True, True, False, True]
    assert rows[1]["compression_ratio"] == ["1", "n/a"]
    check_words(said[0], "active on 0 of 0 steps")
    check_words(said[3], "skipped 2 steps")


class Trapped(MemorySink):
    """A sink that calls something at its third record, and something when it is closed."""

    def __init__(self, third=lambda: None, close=lambda: None):
        super().__init__()
        self.third, self.close = third, close

    def write(self, record):
        if len(self.records) == 2:
            self.third()
        super().write(record)


def failing(message):
    return mock.Mock(side_effect=OSError(message))


@contextmanager
def logged():
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("oktopk").addHandler(handler)
    yield lines
    logging.getLogger("oktopk").removeHandler(handler)


@on_ranks(2)
def test_a_sink_that_fails_is_reported_once_and_dropped():
    broken = Trapped(failing("disk full"), failing("nothing to close"))
    sinks = [broken, MemorySink(), Trapped(close=failing("will not close"))]
    with logged() as lines:
        model, attached = started(sinks=sinks)
        for step in range(STEPS):
            step_(model, step)
        assert attached.active
        attached.detach()
    assert [len(sink.records) for sink in sinks] == [2, STEPS, STEPS]
    first, second = lines.getvalue().splitlines()
    check_words(first, "Trapped", "disk full")
    check_words(second, "Trapped", "will not close")


@on_ranks(2)
def test_a_sink_that_hangs_is_dropped_and_training_goes_on():
    """On rank 1, one in its third record and one in its close: train until the first is dropped, and some more."""
    rank, memory, step, over, start = dist.get_rank(), MemorySink(), 0, False, time.monotonic()
    released = threading.Event()
    hang = partial(released.wait, 40 * rank)
    with logged() as lines:
        model, attached = started(sinks=[Trapped(third=hang), memory, Trapped(close=hang)], timeout=4.0)
        while not over:
            step_(model, step)
            step += 1
            dropped = rank == 0 or "Trapped hangs" in lines.getvalue()
            votes = torch.tensor([float(step >= STEPS and dropped), float(time.monotonic() > start + 20)])
            dist.all_reduce(votes)
            over = bool(votes[0] == 2 or votes[1])
            time.sleep(0.02)
        for more in range(3):
            step_(model, step + more)
        assert attached.active
        before = time.monotonic()
        attached.detach()
        assert time.monotonic() - before < 15
    released.set()
    assert [record.step for record in memory.records] == list(range(step + 3))
    half = "Trapped hangs, and gets no more records: it took over 2 s"  # of the timeout: before others give up
    assert lines.getvalue().count(half) == lines.getvalue().count("Trapped hangs") == 2 * rank
    assert "oktopk exchange" not in exchange_threads()


@on_ranks(2)
def test_one_line_says_at_the_start_what_is_active():
    lines = []
    for net, settings in (
        (nn.Linear(512, 256), {"dense_steps": 7}),
        (nn.Linear(256, 128), {"dense_steps": 0, "exclude": ()}),
        (Net(), {"exclude": oktopk.small_or_vector}),
        (nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 100)), {"exclude": oktopk.small_or_vector}),
    ):
        with redirect_stderr(io.StringIO()) as said:
            model = DDP(net)
            attached = oktopk.attach(model, TopkA(density=0.02), timeout=EXCHANGE_TIMEOUT_S, **settings)
        assert attached.active
        attached.detach()
        lines.append(said.getvalue())
    if dist.get_rank():
        assert lines == [""] * 4, "one rank speaks for all"
        return
    usual, all_sparse, all_dense, most_dense = lines
    check_words(
        usual, "TopkA", "density=0.02", "2 ranks", "7 dense steps", "then sparse (131,072 of 131,328 elements); cpu"
    )
    *_, line = usual.splitlines()  # the first may say that the kernels were compiled
    assert len(line) <= 120
    check_words(all_sparse, "sparse from the first step (32,896 of 32,896 elements)")
    assert ["WARNING" in line for line in lines] == [False, False, True, True]
    check_words(all_dense, "nothing will be compressed")
    check_words(most_dense, "most bytes travel dense: 13,028 elements of small tensors", "exclude=")


@on_ranks(2)
def test_the_schedule_gives_its_densities_at_its_steps():
    schedule, sink = [(3, 0.25), (1, 0.0625), (2, 0.015625)], MemorySink()
    model = DDP(nn.Linear(16, 64, bias=False))
    attached = attach(model, OkTopk(density=0.01), dense_steps=2, density_schedule=schedule, sinks=[sink])
    for step in range(11):
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    attached.detach()
    wanted = [1024] * 2 + [num_selected(1024, d) for d in [0.25] * 3 + [0.0625] + [0.015625] * 2 + [0.01] * 3]
    phases = ["dense"] * 2 + ["sparse"] * 9
    seen = [(record.phase, record.step, record.wanted) for record in sink.records]
    assert seen == list(zip(phases, range(11), wanted, strict=True))
