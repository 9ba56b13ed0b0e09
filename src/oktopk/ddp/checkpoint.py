"""Residuals in a sharded checkpoint, for the same or another number of ranks, through `torch.distributed.checkpoint`.

At the same world size every rank gets its own residual back, and goes on bit for bit. At another one every rank gets
the mean over the saved ranks, so that the mean over the new ranks is the same.

With FSDP a rank is a replica, and its residuals are DTensors, which any number of shards may load.

`torch.distributed.checkpoint` keeps its table of contents as a pickle: load only checkpoints that you trust. The file
that `Attached.state_dict` makes with `torch.save` loads with `weights_only=True`, and has no such table.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from oktopk.ddp.fsdp import whole_of
from oktopk.ddp.handle import VERSION, Handle
from oktopk.errors import StateError

SHARED = ("version", "size", "step")
ESCAPED = "%2F"
"""A slash in the name of a parameter, because a slash divides the names of branches."""


def save_distributed(path: str | os.PathLike[str], handle: Handle) -> None:
    """Write every rank's residuals and algorithm state into the directory `path`. All ranks call this alike."""
    from torch.distributed.checkpoint.state_dict_saver import save  # here, since it takes 0.7 s to import

    state = handle.state_dict()
    residual = {name: _whole(flat, name, handle) for name, flat in state["residual"].items()}
    own = {"groups": dict(enumerate(state["groups"]))} | {key: state[key] for key in handle.MORE}
    mine = dict(_flatten({"residual": residual}, f"rank{state['rank']}."))
    rest = dict(_flatten(own, _own_prefix(handle)))
    shared = {key: torch.tensor(state[key]) for key in _shared_keys(handle)}
    save({**mine, **rest, **shared}, checkpoint_id=path, process_group=_ranks_of(handle))


def load_distributed(path: str | os.PathLike[str], handle: Handle) -> None:
    """Go on from what `save_distributed` wrote, whatever the number of ranks was. All ranks call this alike."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    contents: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    if "version" not in contents or "size" not in contents:
        raise StateError(f"{path} has no residuals saved by save_distributed")
    if ("shards" in contents) != bool(handle.place):
        was, here = ("with FSDP", "without") if "shards" in contents else ("without FSDP", "with")
        raise StateError(f"{path} was saved {was}, and this is a model {here} it")
    shared = _load(path, contents, {key: key for key in _shared_keys(handle)}, handle)
    if int(shared["version"]) != VERSION:
        raise StateError(f"wanted a checkpoint of version {VERSION}, not of version {int(shared['version'])}")
    size, step = int(shared["size"]), int(shared["step"])
    handle.check_kind({name.split("/")[0] for _, name in _below("rank0.", contents)})
    sizes = {name: contents[key].size.numel() for key, name in _below("rank0.residual/", contents)}
    handle.check_parameters(_nest(sizes))
    is_same = size == handle.size
    own = _state_of(path, contents, handle.rank if is_same else 0, handle)
    has_same_shards = not handle.place or int(shared["shards"]) == handle.place["shards"]
    if is_same:
        if handle.place and has_same_shards:
            own |= _nest(_load(path, contents, dict(_below(_own_prefix(handle), contents)), handle))
        groups = own.get("groups", {})
        handle.load_residual(own["residual"], step)
        if groups:  # none if the shards are others
            handle.load_groups([groups[number] for number in sorted(groups, key=int)])
    else:
        handle.load_residual(_mean_over_ranks(path, contents, size, handle), step)
    handle.load_rest(own, is_same and has_same_shards)


def _mean_over_ranks(path: Any, contents: Mapping[str, Any], size: int, handle: Handle) -> dict[str, Tensor]:
    """Return the mean of the gradients that the ranks owe to all, one old rank at a time."""
    total: dict[str, Tensor] = {}
    for rank in range(size):
        for name, tensor in handle.owed(_state_of(path, contents, rank, handle)).items():
            total[name] = total[name] + tensor / size if name in total else tensor / size
    return total


def _state_of(path: Any, contents: Mapping[str, Any], rank: int, handle: Handle) -> dict[str, Any]:
    """Return the entries of the state dict that a rank saved."""
    none: dict[str, Any] = {key: {} for key in handle.MORE}  # an empty tree has no leaf to save
    names = dict(_below(f"rank{rank}.", contents))
    if not handle.place:
        return none | _nest(_load(path, contents, names, handle))
    numbers = ("momentum/", "updates/begun")  # the same for all shards
    scalars = {key: name for key, name in _below(f"rank{rank}.shard0.", contents) if name.startswith(numbers)}
    residual = {"residual": _load_shards(path, dict(_below(f"rank{rank}.residual/", contents)), handle)}
    return none | _nest(_load(path, contents, scalars, handle)) | residual


def _load_shards(path: Any, names: Mapping[str, str], handle: Handle) -> dict[str, Tensor]:
    """Return this rank's shards, flat and padded, of residuals that were saved as DTensors."""
    from torch.distributed.checkpoint.state_dict_loader import load

    shards = {name: torch.zeros_like(flat) for name, flat in handle.residual.items()}
    wanted = {key: _whole(shards[name], name, handle) for key, name in names.items()}
    load(wanted, checkpoint_id=path, process_group=_ranks_of(handle))
    return shards


def _whole(flat: Tensor, name: str, handle: Handle) -> Tensor:
    return whole_of(flat, handle.parameters[name]) if handle.place else flat


def _own_prefix(handle: Handle) -> str:
    """Return the beginning of the keys of this rank's algorithm states, which no other shard has."""
    shard = f"shard{handle.place['shard']}." if handle.place else ""
    return f"rank{handle.rank}.{shard}"


def _shared_keys(handle: Handle) -> tuple[str, ...]:
    return (*SHARED, "shards") if handle.place else SHARED


def _ranks_of(handle: Handle) -> ProcessGroup | None:
    """Return the group of all ranks that have a part of the checkpoint; None is the world."""
    return None if handle.place else handle.group


def _below(prefix: str, contents: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key that begins with `prefix`, and the rest of it."""
    return ((key, key.removeprefix(prefix)) for key in contents if key.startswith(prefix))


def _load(path: Any, contents: Mapping[str, Any], names: Mapping[str, str], handle: Handle) -> dict[str, Tensor]:
    """Return the tensors of some keys, by the name that is given for each."""
    from torch.distributed.checkpoint.state_dict_loader import load

    wanted = {key: torch.empty(contents[key].size, dtype=contents[key].properties.dtype) for key in names}
    load(wanted, checkpoint_id=path, process_group=_ranks_of(handle))
    return {names[key]: tensor for key, tensor in wanted.items()}


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield ("a/b", tensor) for every leaf that is not None."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{_escape(key)}/")
        elif value is not None:  # a float becomes float64, as Python's are: torch's default would round it
            yield (
                f"{prefix}{_escape(key)}",
                torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None),
            )


def _escape(key: Any) -> str:
    return str(key).replace("/", ESCAPED)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree that `_flatten` took apart."""
    tree: dict[str, Any] = {}
    for path, tensor in flat.items():
        *branches, leaf = (part.replace(ESCAPED, "/") for part in path.split("/"))
        node = tree
        for branch in branches:
            node = node.setdefault(branch, {})
        node[leaf] = tensor
    return tree
