"""The worker thread and the exchange's group live as long as the attachment, and not longer."""

import atexit
import gc
import multiprocessing
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from oktopk import JsonlSink, MemorySink, OkTopk
from tests.ddp.harness import attach, error_of, exchange_threads, on_ranks
from tests.ddp.nets import Net, step_
from tests.integrations.examples import run

SPARSE = OkTopk(density=0.1)


def num_groups():
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(("steps", "keeps"), [(0, True), (3, True), (3, False)])
@on_ranks(2)
def test_garbage_collection_joins_the_worker_of_a_model_and_its_handle_which_nobody_need_keep(steps, keeps):
    groups, sink = num_groups(), MemorySink()
    sink.close = mock.Mock()
    model = DDP(Net(), bucket_cap_mb=0.01)
    attached = attach(model, SPARSE, sinks=[sink])
    watched = weakref.ref(attached)
    if not keeps:
        attached = None
    for step in range(steps):
        gc.collect()
        step_(model, step)
        assert bool((model.module.body[0].weight.grad == 0).any()), "this gradient was to be sparse"
    assert len(exchange_threads()) == 2, "the exchange's thread and the sinks'"
    assert num_groups() == groups + 1
    del model, attached
    gc.collect()
    assert watched() is None
    assert (exchange_threads(), num_groups()) == ([], groups)
    assert (sink.close.called, len(sink.records)) == (True, steps)


@on_ranks(2)
def test_a_handle_without_its_model_is_not_active_and_keeps_its_records():
    model = DDP(Net())
    attached = attach(model, SPARSE)
    step_(model, 0)
    assert attached.active
    del model
    gc.collect()
    assert not attached.active
    attached.detach()
    assert attached.summary().steps == 1


@on_ranks(2)
def test_attaching_often_and_detaching_after_the_world_has_ended_leave_nothing_behind():
    """Scripts call destroy_process_group() and let the rest go as it goes."""
    groups, model = num_groups(), DDP(Net())
    for step in range(5):
        attached = attach(model, SPARSE)
        step_(model, step)
        attached.detach()
    assert (exchange_threads(), num_groups()) == ([], groups)
    attached = attach(model, SPARSE)
    step_(model, 5)
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert error_of(attached.detach) == ""
    assert exchange_threads() == []


def forked(child):
    worker = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0, "the child hangs" if worker.exitcode is None else "the child failed"


def fork_in_every_way(folder):
    """Train, fork between steps, and print the numbers of steps and records."""
    path = Path(folder) / "records.jsonl"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    model = DDP(torch.nn.Linear(200, 200))
    kept = {"handle": attach(model, OkTopk(density=0.01), dense_steps=1, sinks=[JsonlSink(path)])}

    def step(inputs):
        model(inputs).square().mean().backward()

    def collect():
        nonlocal model
        kept.clear()
        del model
        gc.collect()

    for child in (atexit._run_exitfuncs, lambda: kept["handle"].detach(), collect, sys.exit):
        step(torch.randn(4, 200))
        forked(child)
    for inputs in DataLoader(torch.randn(2, 200), num_workers=1, multiprocessing_context="fork", timeout=20):
        step(inputs)
    assert kept["handle"].active
    kept["handle"].detach()
    num_records = sum('"kind"' not in line for line in path.read_text().splitlines())
    sys.stdout.write(f"{kept['handle'].summary().steps} {num_records}")


@pytest.mark.slow
@pytest.mark.processes
def test_a_forked_child_leaves_threads_and_groups_to_its_parent(tmp_path):
    source = "import sys; from tests.ddp.test_lifetime import fork_in_every_way; fork_in_every_way(sys.argv[1])"
    script = run("-c", source, tmp_path, seconds=50)
    assert script.returncode == 0, script.stdout
    assert script.stdout.endswith("6 6")
