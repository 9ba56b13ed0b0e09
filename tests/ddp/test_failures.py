"""One rank dies, breaks or freezes: the others end, or go on, within the timeout, and nothing is left behind."""

import json
import signal
import time
from functools import partial
from unittest import mock

import pytest

from oktopk import OkTopk, OkTopkPaper, TopkA
from tests.ddp.harness import check_words
from tests.ddp.mortal import ERROR, EXCHANGE_S, Mortals
from tests.integrations.examples import run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
slow, long = pytest.mark.slow, pytest.mark.long

MARGIN_S = 20.0  # on top of a timeout, for a busy machine
IN_SPARSE_PHASE = 6
EXIT_S = EXCHANGE_S + MARGIN_S


def check_ended(mortals, others, since_s, *words):
    """Check that these ranks told of an error in time, in these words, and ended with it."""
    for rank in others:
        error = mortals.wait_for_word(rank, EXIT_S + MARGIN_S)
        assert isinstance(error, str), f"rank {rank} went on"
        check_words(error, *words)
    for rank in others:
        took_s = mortals.told[rank].at_s - since_s
        assert took_s <= EXIT_S, f"rank {rank} took {took_s:.1f} s"
        assert mortals.wait_for_exit(rank, EXIT_S) == ERROR


def steps_in(path):
    """Return the steps of a file of records, of which every line is whole."""
    text = path.read_text()
    assert text.endswith("\n")
    records = [json.loads(line) for line in text.splitlines()]
    return [record["step"] for record in records if "kind" not in record]


IN_DENSE_PHASE, HOST = pytest.param(1, 2, 1_000_000, marks=slow), pytest.param(0, 2, 2, marks=slow)


@pytest.mark.parametrize(
    ("victim", "size", "dense_steps"), [(1, 2, 2), pytest.param(1, 3, 2, marks=long), IN_DENSE_PHASE, HOST]
)
def test_a_killed_rank_ends_the_others_and_leaves_whole_records(tmp_path, victim, size, dense_steps):
    with Mortals(size, dense_steps=dense_steps, jsonl=f"{tmp_path}/records") as mortals:
        mortals.wait_for_step(victim, IN_SPARSE_PHASE)
        at = mortals.send_signal(victim, signal.SIGKILL)
        check_ended(mortals, [rank for rank in range(size) if rank != victim], at, "PeerError")
        assert mortals.wait_for_exit(victim, EXIT_S) == -signal.SIGKILL
        steps = steps_in(tmp_path / f"records{victim}")
        assert steps == list(range(len(steps)))
        assert mortals.told[victim].step <= len(steps), "a step that was told of has its record, but for the last"


def accident(where, rank, step, attached):
    if (rank, step) == (1, IN_SPARSE_PHASE):
        if where == "forward":
            raise ZeroDivisionError("my own")
        if where == "exchange":
            mock.patch.object(type(attached.algorithm), "reduce_step", side_effect=OSError("disk full")).start()
        else:
            attached.density = 0.1


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=long)])
@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=slow)], ids=["ends", "stays"])
def test_an_error_in_one_forward_ends_the_others(size, stays):
    """A process that ends is noticed at once, one that stays after its error only by the timeout."""
    with Mortals(size, before_step=partial(accident, "forward"), stays=stays) as mortals:
        mortals.wait_for_step(0, IN_SPARSE_PHASE - 1)
        at = time.monotonic()
        assert mortals.wait_for_word(1, EXIT_S) == "ZeroDivisionError: my own"
        for rank in range(0, size, 2):
            check_words(mortals.wait_for_word(rank, EXIT_S), "PeerError")
        mortals.release()
        check_ended(mortals, list(range(size)), at)


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=slow)], ids=["ends", "stays"])
@pytest.mark.parametrize("algorithm", [TopkA, pytest.param(OkTopk, marks=long), pytest.param(OkTopkPaper, marks=slow)])
def test_an_error_in_one_ranks_exchange_is_told_to_all_with_its_cause(algorithm, stays):
    """Rank 0 hosts the store that keeps the cause: if it ends before rank 2 has looked there, rank 2 cannot know."""
    plan = {"algorithm": algorithm(density=0.05), "before_step": partial(accident, "exchange"), "stays": stays}
    with Mortals(3, **plan) as mortals:
        mortals.wait_for_step(0, IN_SPARSE_PHASE - 1)
        at = time.monotonic()
        first, culprit, last = (mortals.wait_for_word(rank, EXIT_S) for rank in range(3))
        mortals.release()
        check_ended(mortals, [0, 1, 2], at)
        check_words(culprit, "OSError: disk full")
        for told in (first, last) if stays else (first,):
            check_words(told, "rank 1 failed: OSError: disk full")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0], ids=["", "the host of the store"])
def test_a_rank_that_is_frozen_goes_on_within_the_timeout_and_ends_the_others_after_it(victim):
    steps = 400  # which take seconds: it is still under way when the signal comes, also on a busy machine
    with Mortals(2, steps=steps) as mortals:
        mortals.wait_for_step(victim, IN_SPARSE_PHASE)
        mortals.send_signal(victim, signal.SIGSTOP)
        assert mortals.told[victim].step < steps - 10, "it was to be stopped on the way"
        time.sleep(EXCHANGE_S / 4)  # the length of the freeze
        mortals.send_signal(victim, signal.SIGCONT)
        sums = [mortals.wait_for_word(rank, 60.0) for rank in range(2)]
        assert [mortals.wait_for_exit(rank, EXIT_S) for rank in range(2)] == [0, 0]
        assert sums[0] == sums[1]
    with Mortals(2) as mortals:
        mortals.wait_for_step(victim, IN_SPARSE_PHASE)
        check_ended(mortals, [1 - victim], mortals.send_signal(victim, signal.SIGSTOP), "PeerError")
        check_ended(mortals, [victim], mortals.send_signal(victim, signal.SIGCONT))


@pytest.mark.slow
def test_settings_that_only_one_rank_changes_end_all_with_an_error():
    """An error in backward(), not the end of the process. (Where messages differ in size, gloo itself aborts.)"""
    with Mortals(2, before_step=partial(accident, "settings")) as mortals:
        mortals.wait_for_step(0, IN_SPARSE_PHASE - 1)
        check_ended(mortals, [0, 1], time.monotonic())


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import oktopk

how = sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
model = DDP(torch.nn.Linear(200, 200))
sink = oktopk.JsonlSink(sys.argv[1] + ".jsonl")
attached = oktopk.attach(model, oktopk.OkTopk(density=0.01), dense_steps=1, sinks=[sink])
for _ in range(3):
    model(torch.randn(4, 200)).square().mean().backward()
if how == "destroys the group":
    dist.destroy_process_group()
if how == "forgets the handle":
    del attached
if how == "ends in the middle":
    sys.exit(3)
"""
ENDINGS = {"just ends": slow, "destroys the group": slow, "forgets the handle": long, "ends in the middle": slow}


@pytest.mark.parametrize("how", [pytest.param(how, marks=marks) for how, marks in ENDINGS.items()])
def test_a_script_that_never_detaches_ends_cleanly(tmp_path, how):
    script = run("-c", SCRIPT, tmp_path / "store", how, seconds=50)
    assert script.returncode == (3 if how == "ends in the middle" else 0)
    assert [line for line in script.stdout.splitlines() if not line.startswith("oktopk: ")] == []
    assert steps_in(tmp_path / "store.jsonl") == [0, 1, 2]
