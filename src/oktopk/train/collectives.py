"""Actions of all workers together: hold the same weights, fail together, gather and sum their figures."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oktopk.errors import MismatchError, OktopkError, PeerError

T = TypeVar("T")


def gather(values: list[float]) -> list[list[float]]:
    """Return every rank's values, in rank order."""
    mine = torch.tensor(values, dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [each.tolist() for each in every]


def total(values: Tensor) -> Tensor:
    """Return the sum over ranks."""
    dist.all_reduce(values)
    return values


def share(value: T | None) -> T:
    """Return on every rank the `value` of rank 0."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    return values[0]  # type: ignore[no-any-return]


def all_or_none(what: str, act: Callable[[], T]) -> T:
    """Return the result of `act` on this rank; if it fails on any rank, every rank raises with that rank's message."""
    result, error = None, None
    try:
        result = act()
    except Exception as failed:  # of any kind: the other ranks wait for this one below
        error = failed
    for rank, message in enumerate(_gather_objects(None if error is None else f"{type(error).__name__}: {error}")):
        if error is not None:
            raise error
        if message is not None:
            raise PeerError(f"{what} failed on rank {rank}: {message}")
    return result  # type: ignore[return-value]


def _gather_objects(mine: T) -> list[T]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def check_same_weights(model: nn.Module, step: int) -> str:
    """Return the digest of the weights; raise on every rank if the ranks differ in a single bit."""
    digests = _gather_objects(weights_digest(model))
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise MismatchError(f"step {step}: the weights of ranks {differing} are not those of rank 0")
    return digests[0]


def weights_digest(model: nn.Module) -> str:
    """Return 16 hexadecimal digits that tell any two sets of weights apart."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's running statistics, as DDP does before each forward pass of training."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


@contextmanager
def lost_peers_named() -> Iterator[None]:
    """Turn the error of a broken collective into a `PeerError`: another rank has died or left."""
    try:
        yield
    except RuntimeError as error:
        text = (str(error) or "?").splitlines()[0]
        _, ours, said = text.rpartition("PeerError: ")  # raised by oktopk within autograd
        if isinstance(error, OktopkError) or not (ours or "gloo/" in text or "NCCL" in text):
            raise
        said = re.sub(r"\[\S*/\S*\] |\. This is typically.*", "", said)
        raise PeerError(said if ours else f"another rank died, left or was cut off: {said}") from error
