from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import StateError
from oktopk.train import checkpoint
from oktopk.train.rundir import RunDir

State = dict[str, Any]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run of one worker, which is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = RunDir(tmp_path)
    folder.checkpoints.mkdir()
    yield folder
    dist.destroy_process_group()


def save(run: RunDir, step: int, best: bool = False) -> Path:
    return checkpoint.save(run, step, {"progress": step}, {"mine": torch.arange(step)}, best)


def names(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_saved_checkpoint_is_loaded(run: RunDir) -> None:
    assert checkpoint.find_last(run) is None
    folder = save(run, 3)
    assert checkpoint.find_last(run) == folder
    assert checkpoint.num_workers(folder) == 1
    shared, own = checkpoint.load(folder, 0, 1)
    assert shared["progress"] == 3
    assert torch.equal(own["mine"], torch.arange(3))


def test_the_last_two_and_the_best_stay(run: RunDir) -> None:
    for step in range(1, 6):
        save(run, step, best=step == 2)
    assert names(run) == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert (run.checkpoints / "best").read_text().strip() == "step-00000002"


def test_going_on_from_an_earlier_one_leaves_no_later_ones(run: RunDir) -> None:
    for step in (4, 6, 8):
        save(run, step)
    save(run, 7)
    assert names(run) == ["last", "step-00000006", "step-00000007"]
    again = checkpoint.save(run, 7, {"progress": "again"}, {}, False)
    assert checkpoint.find_last(run) == again == run.checkpoints / "step-00000007"
    assert checkpoint.load(again, 0, 1)[0]["progress"] == "again"


def test_an_unfinished_one_is_never_taken_and_is_cleared_away(run: RunDir) -> None:
    first = save(run, 2)
    shutil.copytree(first, run.checkpoints / ".step-00000009")
    assert checkpoint.find_last(run) == first
    save(run, 3)
    assert names(run) == ["last", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("failing", ["_save", "_finish", "write_text"])
def test_a_save_that_fails_leaves_the_last_one(run: RunDir, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    first = save(run, 2)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        save(run, 3)
    assert checkpoint.find_last(run) == first
    assert checkpoint.load(first, 0, 1)[0]["progress"] == 2


def test_killed_between_removing_a_checkpoint_and_making_it_again(run: RunDir) -> None:
    first, second = save(run, 2), save(run, 3)
    shutil.rmtree(second)
    assert checkpoint.find_last(run) == first


@pytest.mark.parametrize(
    ("name", "kept"), [("shared.pt", None), ("shared.pt", 0.5), ("rank0.pt", 0), ("rank0.pt", 0.99)]
)
def test_a_bad_file_is_named_and_so_is_the_other_checkpoint(run: RunDir, name: str, kept: float | None) -> None:
    other, folder = save(run, 2), save(run, 3)
    path = folder / name
    if kept is None:
        path.unlink()
    else:
        os.truncate(path, int(kept * path.stat().st_size))
    with pytest.raises(StateError) as raised:
        checkpoint.load(folder, 0, 1)
    assert str(path) in str(raised.value)
    assert f"--resume {other}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_of_something_else(run: RunDir) -> None:
    folder = save(run, 2)
    torch.save([1, 2], folder / "shared.pt")
    with pytest.raises(StateError, match=r"shared\.pt"):
        checkpoint.load(folder, 0, 1)
    torch.save({"version": 99, "size": 1}, folder / "shared.pt")
    with pytest.raises(StateError, match="version 99, this is 1"):
        checkpoint.load(folder, 0, 1)
    torch.save({"version": 1, "size": 1, "trap": Path("a class")}, folder / "shared.pt")  # whose load would run code
    with pytest.raises(StateError, match="UnpicklingError"):
        checkpoint.load(folder, 0, 1)


@given(old=st.integers(1, 5), new=st.integers(1, 5), seed=st.integers(0, 1000))
def test_at_another_number_of_workers_the_pending_update_is_the_same(
    tmp_path: Path, old: int, new: int, seed: int
) -> None:
    """The update is the mean over workers: that of what they hold back must not change."""
    generator = torch.Generator().manual_seed(seed)
    held = [{"w": torch.randn(9, generator=generator), "b": torch.randn(2, generator=generator)} for _ in range(old)]
    folder = tmp_path / f"step-{seed:08d}"
    folder.mkdir(exist_ok=True)
    torch.save({"version": 1, "size": old}, folder / "shared.pt")
    for rank, residual in enumerate(held):
        torch.save({"oktopk": {"residual": residual, "step": 7}}, folder / f"rank{rank}.pt")
    loaded = [checkpoint.load(folder, rank, new)[1] for rank in range(new)]
    if old == new:
        assert all(torch.equal(own["oktopk"]["residual"]["w"], held[rank]["w"]) for rank, own in enumerate(loaded))
        return
    for name in ("w", "b"):
        before = torch.stack([residual[name] for residual in held]).mean(0)
        after = torch.stack([own["pending"]["residual"][name] for own in loaded]).mean(0)
        torch.testing.assert_close(after, before)
    assert {own["pending"]["step"] for own in loaded} == {7}
