"""Checkpoints: a folder a step, with a file of the state that all ranks share and one of each rank's own state.

A checkpoint is written under another name and renamed when every rank is done, so that no kill leaves half of one. The
files `last` and `best` name one each. The others are removed, but for the one before the last. Files are read with
`weights_only=True`: they are data. At another number of workers each gets the mean of the residuals, so that the
pending update is conserved.
"""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oktopk.errors import StateError
from oktopk.train.collectives import all_or_none
from oktopk.train.rundir import RunDir, write_text, writing

VERSION = 1
LAST, BEST = "last", "best"
SHARED = "shared.pt"
KEPT = 2
"""Checkpoints that stay beside the best: the last, and the one before it to fall back on."""

State = dict[str, Any]


def save(run: RunDir, step: int, shared: State, own: State, best: bool) -> Path:
    """Write a checkpoint on all ranks, or on none. All ranks call this."""
    folder = run.checkpoints / f"step-{step:08d}"
    unfinished = folder.with_name(f".{folder.name}")
    rank = dist.get_rank()
    all_or_none("making a checkpoint", lambda: _make(unfinished) if rank == 0 else None)
    all_or_none("writing a checkpoint", lambda: _write(unfinished, rank, shared, own))
    if rank == 0:
        _finish(run, unfinished, folder, best)
    return folder


def _make(unfinished: Path) -> None:
    for left in unfinished.parent.glob(".step-*"):  # by a run that was killed while it wrote
        shutil.rmtree(left)
    with writing(unfinished):
        unfinished.mkdir(parents=True)


def _write(unfinished: Path, rank: int, shared: State, own: State) -> None:
    size = dist.get_world_size()
    if rank == 0:
        _save({"version": VERSION, "size": size, **shared}, unfinished / SHARED)
    _save(own, unfinished / _name(rank))


def _save(state: State, path: Path) -> None:
    memory = io.BytesIO()
    torch.save(state, memory)  # which says "unexpected pos" where the disk is full
    with writing(path), path.open("wb") as file:
        file.write(memory.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def _finish(run: RunDir, unfinished: Path, folder: Path, best: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # the same step, made again after a resume
    unfinished.rename(folder)
    for name in (LAST, BEST) if best else (LAST,):
        write_text(run.checkpoints / name, folder.name)
    named = {(run.checkpoints / name).read_text().strip() for name in (LAST, BEST) if (run.checkpoints / name).exists()}
    there = _all(run.checkpoints)
    before = [old for old in there if old <= folder]  # later ones are of a run that went on from an earlier one again
    for old in set(there) - set(before[-KEPT:]):
        if old.name not in named:
            shutil.rmtree(old)


def _all(checkpoints: Path) -> list[Path]:
    """Return the finished checkpoints, in the order of their steps."""
    return sorted(checkpoints.glob("step-*"))


def _name(rank: int) -> str:
    return f"rank{rank}.pt"


def find_last(run: RunDir) -> Path | None:
    """Return the last checkpoint of a run; None if it has none yet."""
    pointer = run.checkpoints / LAST
    named = run.checkpoints / pointer.read_text().strip() if pointer.exists() else None
    if named is None or named.exists():
        return named
    return max(_all(run.checkpoints), default=None)  # it was killed while it made that one again


def num_workers(folder: Path) -> int:
    """Return the number of workers that wrote a checkpoint."""
    return int(_load(folder / SHARED)["size"])


def load(folder: Path, rank: int, size: int) -> tuple[State, State]:
    """Return (shared state, state of this rank) for `size` ranks, whatever number wrote it."""
    shared = _load(folder / SHARED)
    if shared.get("version") != VERSION:
        raise StateError(f"{folder} is a checkpoint of version {shared.get('version')}, this is {VERSION}")
    if shared["size"] == size:
        return shared, _load(folder / _name(rank))
    return shared, _mean_of([_load(folder / _name(old)) for old in range(shared["size"])])


def _load(path: Path) -> State:
    try:
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    except FileNotFoundError as error:
        raise StateError(f"the checkpoint has no {path}{_another(path.parent)}") from error
    except Exception as error:  # a cut-off file raises whatever the byte after the cut suggests
        raise StateError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}){_another(path.parent)}"
        ) from error


def _another(folder: Path) -> str:
    """Return a hint at another checkpoint of the run, if there is one."""
    others = [other for other in _all(folder.parent) if other != folder]
    return f"; another one is there: --resume {others[-1]}" if others else ""


def _mean_of(states: list[State]) -> State:
    """Return a state with the mean of the old ranks' residuals."""
    pending = [state["oktopk"] for state in states]
    residuals = [state["residual"] for state in pending]
    mean = {name: sum(each[name] for each in residuals) / len(residuals) for name in residuals[0]}
    return {"pending": {"residual": mean, "step": pending[0]["step"]}}
