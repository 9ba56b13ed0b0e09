"""What all workers do together: hold the same weights, fail together, add up what each has measured."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oktopk.errors import MismatchError, OktopkError, PeerError

T = TypeVar("T")
_MESSAGE_BYTES = 500


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


def all_or_none(what: str, act: Callable[[], T]) -> T:
    """Return what `act` does on this rank; if it fails on any, every rank raises, with that rank's message."""
    result, error = None, None
    try:
        result = act()
    except Exception as failed:  # whatever it is: the other ranks wait for us below
        error = failed
    told = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in _messages(error)]
    if error is not None:
        raise error
    for rank, message in enumerate(told):
        if message:
            raise PeerError(f"{what} failed on rank {rank}: {message}")
    return result  # type: ignore[return-value]


def _messages(error: Exception | None) -> list[list[int]]:
    text = "" if error is None else f"{type(error).__name__}: {error}"
    mine = torch.tensor(list(text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [each.tolist() for each in every]


def check_same_weights(model: nn.Module, step: int) -> str:
    """Return the weights' digest, or raise on every rank if they differ: they must not, in a single bit."""
    digest = weights_digest(model)
    words = [[int(word) for word in row] for row in gather([float(int(digest[i : i + 8], 16)) for i in (0, 8)])]
    differing = [rank for rank, row in enumerate(words) if row != words[0]]
    if differing:
        raise MismatchError(f"step {step}: the weights of ranks {differing} are not those of rank 0")
    return digest


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
    """Make a `PeerError` of a collective that broke: others have died or left, and there is no bug to trace here."""
    try:
        yield
    except RuntimeError as error:
        text = (str(error) or "?").splitlines()[0]
        _, ours, said = text.rpartition("PeerError: ")  # of our own, from within autograd
        if isinstance(error, OktopkError) or not (ours or "gloo/" in text or "NCCL" in text):
            raise
        said = re.sub(r"\[\S*/\S*\] |\. This is typically.*", "", said)
        raise PeerError(said if ours else f"another rank died, left or was cut off: {said}") from error


def share(key: str, value: str | None) -> str:
    """Return on every rank what rank 0 gave as `value`."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        assert value is not None
        store.set(f"oktopk/{key}", value)
        return value
    return str(store.get(f"oktopk/{key}").decode())
