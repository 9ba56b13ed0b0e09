"""One rank dies, breaks or freezes: the others end, or go on, within the timeout, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from oktopk import OkTopk, OkTopkPaper, TopkA
from tests.ddp.harness import run_script
from tests.ddp.mortal import ERROR, EXCHANGE_S, Breaks, Mortals, Plan, Told

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

MARGIN_S = 20.0  # on top of a timeout, for a busy machine
IN_SPARSE_PHASE = 6
EXIT_S = EXCHANGE_S + MARGIN_S


def check_ended(mortals: Mortals, others: list[int], since_s: float) -> list[Told]:
    """Check that these ranks told of an error in time, and ended with it."""
    told = [mortals.wait_for_word(rank, EXIT_S + MARGIN_S) for rank in others]
    for rank, each in zip(others, told, strict=True):
        assert each.error is not None, f"rank {rank} went on"
        assert each.at_s - since_s <= EXIT_S, f"rank {rank} took {each.at_s - since_s:.1f} s"
        assert mortals.wait_for_exit(rank, EXIT_S) == ERROR
    return told


def whole_lines(path: Path) -> list[Any]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


KILLED = [
    (1, 2, 2),
    pytest.param(0, 2, 2, marks=pytest.mark.slow),  # the host of the store
    pytest.param(1, 3, 2, marks=pytest.mark.long),
    pytest.param(1, 2, 1_000_000, marks=pytest.mark.slow),  # in the dense phase
]


@pytest.mark.parametrize(("victim", "size", "dense_steps"), KILLED)
def test_a_killed_rank_ends_the_others_and_leaves_whole_records(
    tmp_path: Path, victim: int, size: int, dense_steps: int
) -> None:
    with Mortals(size, Plan(dense_steps=dense_steps, jsonl=f"{tmp_path}/records")) as mortals:
        mortals.wait_for_step(victim, IN_SPARSE_PHASE)
        at = mortals.send_signal(victim, signal.SIGKILL)
        told = check_ended(mortals, [rank for rank in range(size) if rank != victim], at)
        assert mortals.wait_for_exit(victim, EXIT_S) == -signal.SIGKILL
        assert all("PeerError" in (each.error or "") for each in told)
        steps = [record["step"] for record in whole_lines(tmp_path / f"records{victim}")]
        assert steps == list(range(len(steps)))
        assert mortals.told[victim].step <= len(steps), "a step that was told of has its record, but for the last"


def raise_in_forward(rank: int, step: int, attached: Any) -> None:
    if (rank, step) == (1, IN_SPARSE_PHASE):
        raise ZeroDivisionError("my own")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ends", "stays"])
def test_an_error_in_one_forward_ends_the_others(size: int, stays: bool) -> None:
    """A process that ends is noticed at once, one that stays after its error only by the timeout."""
    with Mortals(size, Plan(before_step=raise_in_forward, stays=stays)) as mortals:
        mortals.wait_for_step(0, IN_SPARSE_PHASE - 1)
        at = time.monotonic()
        culprit = mortals.wait_for_word(1, EXIT_S)
        assert culprit.error == "ZeroDivisionError: my own"
        told = [mortals.wait_for_word(rank, EXIT_S) for rank in range(0, size, 2)]
        if stays:
            mortals.release()
        check_ended(mortals, list(range(size)), at)
        assert all("PeerError" in (each.error or "") for each in told)


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ends", "stays"])
@pytest.mark.parametrize(
    "algorithm",
    [
        TopkA(density=0.05),
        pytest.param(OkTopk(density=0.05), marks=pytest.mark.long),
        pytest.param(OkTopkPaper(density=0.05), marks=pytest.mark.slow),
    ],
    ids=["topka", "bounded", "paper"],
)
def test_an_error_in_one_ranks_exchange_is_told_to_all_with_its_cause(algorithm: Any, stays: bool) -> None:
    """Rank 0 hosts the store that keeps the cause: if it ends before rank 2 has looked there, rank 2 cannot know."""
    with Mortals(3, Plan(algorithm=Breaks(algorithm, rank=1, at_step=3), stays=stays)) as mortals:
        mortals.wait_for_step(0, 4)
        at = time.monotonic()
        assert "OSError: disk full" in (mortals.wait_for_word(1, EXIT_S).error or "")
        told = [mortals.wait_for_word(rank, EXIT_S) for rank in (0, 2)]
        if stays:
            mortals.release()
        check_ended(mortals, [0, 1, 2], at)
        named = ["rank 1 failed: OSError: disk full" in (each.error or "") for each in told]
        assert named == [True, True] if stays else named[0]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0], ids=["", "the host of the store"])
def test_a_rank_that_is_frozen_goes_on_within_the_timeout_and_ends_the_others_after_it(victim: int) -> None:
    steps = 60
    with Mortals(2, Plan(steps=steps)) as mortals:
        mortals.wait_for_step(victim, IN_SPARSE_PHASE)
        mortals.send_signal(victim, signal.SIGSTOP)
        stopped_at = mortals.told[victim].step
        time.sleep(EXCHANGE_S / 4)  # the length of the freeze
        mortals.send_signal(victim, signal.SIGCONT)
        told = [mortals.wait_for_word(rank, 30.0) for rank in range(2)]
        assert stopped_at < steps - 10, "it was to be stopped on the way"
        assert [mortals.wait_for_exit(rank, EXIT_S) for rank in range(2)] == [0, 0]
        assert told[0].error is None
        assert told[0].checksum == told[1].checksum is not None
    with Mortals(2, Plan()) as mortals:
        mortals.wait_for_step(victim, IN_SPARSE_PHASE)
        at = mortals.send_signal(victim, signal.SIGSTOP)
        told = check_ended(mortals, [1 - victim], at)
        assert all("PeerError" in (each.error or "") for each in told)
        check_ended(mortals, [victim], mortals.send_signal(victim, signal.SIGCONT))


def change_on_one_rank(rank: int, step: int, attached: Any) -> None:
    if (rank, step) == (1, IN_SPARSE_PHASE):
        attached.density = 0.1


@pytest.mark.slow
def test_settings_that_only_one_rank_changes_end_all_with_an_error() -> None:
    """An error in backward(), not the end of the process. (Where messages differ in size, gloo itself aborts.)"""
    with Mortals(2, Plan(before_step=change_on_one_rank)) as mortals:
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


@pytest.mark.parametrize(
    "how",
    [
        "just ends",
        pytest.param("destroys the group", marks=pytest.mark.slow),
        pytest.param("forgets the handle", marks=pytest.mark.long),
        pytest.param("ends in the middle", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_never_detaches_ends_cleanly(tmp_path: Path, how: str) -> None:
    script = run_script(SCRIPT, str(tmp_path / "store"), how)
    assert script.returncode == (3 if how == "ends in the middle" else 0)
    said = [line for line in script.stderr.splitlines() if not line.startswith("oktopk: OkTopk(")]
    assert said == []
    assert script.stdout == ""
    assert [record["step"] for record in whole_lines(tmp_path / "store.jsonl")] == [0, 1, 2]
