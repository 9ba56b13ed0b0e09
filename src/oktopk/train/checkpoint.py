"""Checkpoints: a folder a step, with a file of the state that all ranks share and one of each rank's own state.

A checkpoint is written under another name and renamed when every rank is done, so that no kill leaves half of one.
"""

import io
import os
import random
import shutil
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oktopk.errors import StateError
from oktopk.train.collectives import all_or_none
from oktopk.train.rundir import RunDir, write_text, writing

VERSION = 2
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
    files = {unfinished / f"rank{rank}.pt": own}
    if rank == 0:
        files[unfinished / SHARED] = {"version": VERSION, "size": dist.get_world_size(), **shared}
    all_or_none("making a checkpoint", lambda: _make(unfinished) if rank == 0 else None)
    all_or_none("writing a checkpoint", lambda: _write(files))
    if rank == 0:
        _finish(run, unfinished, folder, best)
    return folder


def save_shared(run: RunDir, step: int, shared: State, size: int) -> Path:
    """Write a checkpoint that has no state of a rank's own, on one rank alone."""
    folder = run.checkpoints / f"step-{step:08d}"
    unfinished = folder.with_name(f".{folder.name}")
    _make(unfinished)
    _write({unfinished / SHARED: {"version": VERSION, "size": size, **shared}})
    _finish(run, unfinished, folder, best=False)
    return folder


def load_shared(folder: Path) -> State:
    """Return the state that all ranks share."""
    shared = _load(folder / SHARED)
    if shared.get("version") != VERSION:
        raise StateError(f"{folder} is a checkpoint of version {shared.get('version')}, this is {VERSION}")
    return shared


def _make(unfinished: Path) -> None:
    for left in unfinished.parent.glob(".step-*"):  # by a run that was killed while it wrote
        shutil.rmtree(left)
    with writing(unfinished):
        unfinished.mkdir(parents=True)


def _write(files: dict[Path, State]) -> None:
    for path, state in files.items():
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
        write_text(run.checkpoints / name, f"{folder.name}\n")
    pointers = [run.checkpoints / name for name in (LAST, BEST)]
    named = {run.checkpoints / pointer.read_text().strip() for pointer in pointers if pointer.exists()}
    there = _all(run.checkpoints)
    before = [old for old in there if old <= folder]  # later ones are of a run that went on from an earlier one again
    for old in set(there) - set(before[-KEPT:]) - named:
        shutil.rmtree(old)


def _all(checkpoints: Path) -> list[Path]:
    """Return the finished checkpoints, in the order of their steps."""
    return sorted(checkpoints.glob("step-*"))


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


def load(
    folder: Path, rank: int, size: int, owed_by: Callable[[State], State] = itemgetter("residual")
) -> tuple[State, State]:
    """Return (shared state, state of this rank) for `size` ranks, whatever number wrote it.

    At another number each rank gets the mean of what the ranks owe to all, so that the pending update is conserved.
    `owed_by` finds that in a rank's state. The rank also gets rank 0's state, for the part that all ranks share.
    """
    shared = load_shared(folder)
    if "elastic" in shared:
        raise StateError(f"{folder} is a checkpoint of a run with --elastic: go on with it with --elastic MIN:MAX")
    if shared["size"] == size:
        return shared, _load(folder / f"rank{rank}.pt")
    states = [_load(folder / f"rank{old}.pt")["oktopk"] for old in range(shared["size"])]
    owed = [owed_by(state) for state in states]
    mean = {name: sum(each[name] for each in owed) / len(owed) for name in owed[0]}
    return shared, {"pending": {"residual": mean, "step": states[0]["step"]}, "oktopk": states[0]}


def _load(path: Path) -> State:
    others = [other for other in _all(path.parent.parent) if other != path.parent]
    hint = f"; another one is there: --resume {others[-1]}" if others else ""
    try:
        return dict(torch.load(path, weights_only=True, map_location="cpu"))
    except FileNotFoundError as error:
        raise StateError(f"the checkpoint has no {path}{hint}") from error
    except Exception as error:  # a cut-off file raises whatever the byte after the cut suggests
        raise StateError(f"the checkpoint {path} cannot be read ({type(error).__name__}){hint}") from error


def rng_state(device: torch.device) -> State:
    """Return the generators of Python, NumPy, PyTorch and the GPU, as types that `weights_only=True` loads."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: State, device: torch.device) -> None:
    """Restore the generators; that of the GPU only if the run was on a GPU before, too."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
