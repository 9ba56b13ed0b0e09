"""Actions of all workers together: hold the same weights, fail together, gather their figures."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from oktopk.comm.agree import digest_of
from oktopk.errors import MismatchError, OktopkError, PeerError

T = TypeVar("T")


def gather(values: list[float]) -> list[list[float]]:
    """Return every rank's values, in rank order."""
    mine = torch.tensor(values, dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [each.tolist() for each in every]


def all_or_none(what: str, act: Callable[[], T]) -> T:
    """Return the result of `act` on this rank; if it fails on any rank, every rank raises with that rank's message."""
    result, error = None, None
    try:
        result = act()
    except Exception as failed:  # of any kind: the other ranks wait for this one below
        error = failed
    for rank, message in enumerate(gather_objects(None if error is None else f"{type(error).__name__}: {error}")):
        if error is not None:
            raise error
        if message is not None:
            raise PeerError(f"{what} failed on rank {rank}: {message}")
    return result  # type: ignore[return-value]


def gather_objects(mine: T) -> list[T]:
    """Return every rank's object, in rank order."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def check_same_weights(model: nn.Module, step: int) -> str:
    """Return 16 hexadecimal digits of the weights' digest; raise on every rank if the ranks differ in a single bit."""
    digests = gather_objects(digest_of(model.parameters()))
    differing = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if differing:
        raise MismatchError(f"step {step}: the weights of ranks {differing} are not those of rank 0")
    return digests[0]


def check_same_data(sizes: tuple[int, int]) -> None:
    """Raise on every rank if the data to train on and to validate with has other sizes on another rank."""
    every = gather_objects(sizes)
    differing = [rank for rank, each in enumerate(every) if each != every[0]]
    if differing:
        raise MismatchError(
            f"the data of ranks {differing} is not that of rank 0: {every[differing[0]]} samples or bytes to train on "
            f"and to validate with, and {every[0]}. Copy one --data-dir to all machines"
        )


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
