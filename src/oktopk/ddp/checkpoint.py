"""Residuals in a sharded checkpoint, for the same or another number of ranks, through `torch.distributed.checkpoint`.

What is pending is the mean over ranks of their residuals: it is what the next updates owe to the past. At the same
world size every rank gets its own residual back, and goes on bit for bit. At another one every rank gets that mean, so
that the mean over the new ranks is the same.

`torch.distributed.checkpoint` keeps its table of contents as a pickle: load only checkpoints that you trust. The file
that `Attached.state_dict` makes with `torch.save` loads with `weights_only=True`, and has no such table.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from oktopk.ddp.attach import VERSION, Attached
from oktopk.errors import StateError

SHARED = ("version", "size", "step")


def save_distributed(path: str | os.PathLike[str], attached: Attached) -> None:
    """Write every rank's residuals and algorithm state into the directory `path`. All ranks call this alike."""
    from torch.distributed.checkpoint.state_dict_saver import save  # here, since it takes 0.7 s to import

    state = attached.state_dict()
    mine = {f"rank{state['rank']}.{key}": tensor for key, tensor in _flatten(_own_part(state))}
    shared = {key: torch.tensor(state[key]) for key in SHARED}
    save({**mine, **shared}, checkpoint_id=path, process_group=attached.group)


def load_distributed(path: str | os.PathLike[str], attached: Attached) -> None:
    """Go on from what `save_distributed` wrote, whatever the number of ranks was. All ranks call this alike."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    contents: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    if "version" not in contents or "size" not in contents:
        raise StateError(f"{path} has no residuals saved by save_distributed")
    shared = _load(path, contents, list(SHARED), attached)
    if int(shared["version"]) != VERSION:
        raise StateError(f"wanted a checkpoint of version {VERSION}, not of version {int(shared['version'])}")
    size, step, rank = int(shared["size"]), int(shared["step"]), attached.rank
    first = "rank0.residual/"
    attached.check_parameters(
        {k.removeprefix(first): m.size.numel() for k, m in contents.items() if k.startswith(first)}
    )
    if size == attached.size:
        own = _nest(_load_rank(path, contents, rank, attached))
        attached.load_residual(own["residual"], step)
        attached.load_groups([own["groups"][number] for number in sorted(own["groups"], key=int)])
    else:
        attached.load_residual(_nest(_mean_over_ranks(path, contents, size, attached))["residual"], step)


def _own_part(state: Mapping[str, Any]) -> dict[str, Any]:
    groups = {str(i): {k: v for k, v in group.items() if v is not None} for i, group in enumerate(state["groups"])}
    return {"residual": state["residual"], "groups": groups}


def _mean_over_ranks(path: Any, contents: Mapping[str, Any], size: int, attached: Attached) -> dict[str, Tensor]:
    """Return the mean of all ranks' residuals, one old rank at a time."""
    total: dict[str, Tensor] = {}
    for rank in range(size):
        for key, tensor in _load_rank(path, contents, rank, attached, skip="groups").items():
            total[key] = total[key] + tensor / size if key in total else tensor / size
    return total


def _load_rank(
    path: Any, contents: Mapping[str, Any], rank: int, attached: Attached, skip: str = ""
) -> dict[str, Tensor]:
    prefix = f"rank{rank}."
    names = [key for key in contents if key.startswith(prefix) and not (skip and key.startswith(prefix + skip))]
    return {key.removeprefix(prefix): tensor for key, tensor in _load(path, contents, names, attached).items()}


def _load(path: Any, contents: Mapping[str, Any], names: list[str], attached: Attached) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.state_dict_loader import load

    wanted = {name: torch.empty(contents[name].size, dtype=contents[name].properties.dtype) for name in names}
    load(wanted, checkpoint_id=path, process_group=attached.group)
    return wanted


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield ("a/b", tensor) for every leaf; numbers become tensors that hold them exactly."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", _as_tensor(value)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)  # as Python's are; torch's default would round it
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _nest(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tree that `_flatten` took apart. Below "residual" are names, which may have a slash."""
    tree: dict[str, Any] = {}
    for path, tensor in flat.items():
        *branches, leaf = path.split("/") if path.startswith("groups/") else path.split("/", 1)
        node = tree
        for branch in branches:
            node = node.setdefault(branch, {})
        node[leaf] = tensor
    return tree
