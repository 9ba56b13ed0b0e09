import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import StateError
from oktopk.train import checkpoint
from oktopk.train.rundir import RunDir


@pytest.fixture
def run(tmp_path):
    """A run of one worker, which is this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = RunDir(tmp_path)
    folder.checkpoints.mkdir()
    yield folder
    dist.destroy_process_group()


def save(run, step, best=False, progress=None):
    shared = {"progress": step if progress is None else progress}
    return checkpoint.save(run, step, shared, {"mine": torch.arange(step)}, best)


def names(run):
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_saved_checkpoint_is_loaded_and_the_last_two_and_the_best_stay(run):
    assert checkpoint.find_last(run) is None
    for step in range(1, 6):
        folder = save(run, step, best=step == 2)
    assert names(run) == ["best", "last", "step-00000002", "step-00000004", "step-00000005"]
    assert (run.checkpoints / "best").read_text().strip() == "step-00000002"
    assert checkpoint.find_last(run) == folder
    assert checkpoint.num_workers(folder) == 1
    shared, own = checkpoint.load(folder, 0, 1)
    assert shared["progress"] == 5
    assert torch.equal(own["mine"], torch.arange(5))


def test_an_unfinished_one_is_never_taken_and_going_on_from_an_earlier_one_leaves_no_later_ones(run):
    for step in (4, 6, 8):
        newest = save(run, step)
    shutil.copytree(newest, run.checkpoints / ".step-00000009")
    assert checkpoint.find_last(run) == newest
    save(run, 7)
    assert names(run) == ["last", "step-00000006", "step-00000007"]
    again = save(run, 7, progress="again")
    assert checkpoint.find_last(run) == again == run.checkpoints / "step-00000007"
    assert checkpoint.load(again, 0, 1)[0]["progress"] == "again"
    shutil.rmtree(again)  # killed between removing it and making it again
    assert checkpoint.find_last(run) == run.checkpoints / "step-00000006"


@pytest.mark.parametrize("failing", ["_write", "_finish", "write_text"])
def test_a_save_that_fails_leaves_the_last_one(run, monkeypatch, failing):
    first = save(run, 2)
    monkeypatch.setattr(checkpoint, failing, Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save(run, 3)
    assert checkpoint.find_last(run) == first
    assert checkpoint.load(first, 0, 1)[0]["progress"] == 2


def test_a_bad_file_is_named_and_so_is_the_other_checkpoint(run):
    other, trap = save(run, 2), {"version": 2, "size": 1, "trap": Path("a class")}  # whose load would run code
    spoilt = {"rank0": (0.0, 0.99), "shared": (None, 0.5, [1, 2], trap)}
    for name, content in [(name, each) for name, contents in spoilt.items() for each in contents]:
        folder = save(run, 3)
        path = folder / f"{name}.pt"
        if content is None:
            path.unlink()
        elif isinstance(content, float):
            os.truncate(path, int(content * path.stat().st_size))
        else:
            torch.save(content, path)
        with pytest.raises(StateError, match=rf"{path}[^\n]*--resume {other}$"):
            checkpoint.load(folder, 0, 1)
    torch.save({"version": 99, "size": 1}, path)
    with pytest.raises(StateError, match="version 99, this is 2"):
        checkpoint.load(folder, 0, 1)


@given(old=st.integers(1, 5), new=st.integers(1, 5), seed=st.integers(0, 1000))
def test_at_another_number_of_workers_the_pending_update_is_the_same(tmp_path, old, new, seed):
    """The update is the mean over workers: the mean of their residuals must not change."""
    generator = torch.Generator().manual_seed(seed)
    held = [{"w": torch.randn(9, generator=generator), "b": torch.randn(2, generator=generator)} for _ in range(old)]
    torch.save({"version": 2, "size": old}, tmp_path / "shared.pt")
    for rank, residual in enumerate(held):
        torch.save({"oktopk": {"residual": residual, "step": 7}}, tmp_path / f"rank{rank}.pt")
    loaded = [checkpoint.load(tmp_path, rank, new)[1] for rank in range(new)]
    if old == new:
        assert all(torch.equal(own["oktopk"]["residual"]["w"], held[rank]["w"]) for rank, own in enumerate(loaded))
        return
    for name in ("w", "b"):
        before = torch.stack([residual[name] for residual in held]).mean(0)
        after = torch.stack([own["pending"]["residual"][name] for own in loaded]).mean(0)
        torch.testing.assert_close(after, before)
    assert {own["pending"]["step"] for own in loaded} == {7}
