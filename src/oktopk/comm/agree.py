"""Agreement: all ranks are about to do the same, or all are told in which setting they differ."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from oktopk.comm.base import Comm
from oktopk.errors import MalformedError, MismatchError

START = "the weights that they start from"
"""Name of the setting that holds their digest."""

MOST_BYTES = 1 << 24
"""Maximum length of a rank's settings, because room is made for what a rank announces."""


def gather_settings(mine: Mapping[str, Any], comm: Comm, device: torch.device) -> list[dict[str, Any]]:
    """Return the settings of every rank, in rank order. They travel as JSON."""
    text = torch.tensor(list(json.dumps(mine).encode()), dtype=torch.uint8, device=device)
    lengths = comm.all_gather(torch.tensor([len(text)], device=device)).flatten().tolist()
    for rank, length in enumerate(lengths):
        if not 0 < length <= MOST_BYTES:
            raise MalformedError(f"it announces settings of {length} bytes, where 1 to {MOST_BYTES} are possible", rank)
    padded = text.new_zeros(max(lengths))
    padded[: len(text)] = text
    rows = comm.all_gather(padded).cpu()
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def check_same(every: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `MismatchError` that names the first setting in which a rank differs from rank 0, and both values."""
    for name in every[0]:
        for rank, settings in enumerate(every):
            found = first_difference({name: every[0][name]}, {name: settings[name]})
            if found is not None:
                said = f"rank 0 has {found[1]}, rank {rank} has {found[2]}"
                raise MismatchError(f"the ranks disagree on {name}: {said}. Give every rank the same")


def first_difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the name of the first setting that differs, and both values; None if all are the same."""
    for name, value in first.items():
        if name not in other or other[name] != value:
            return (name, *_difference(value, other.get(name)))
    return None


def _difference(first: Any, other: Any) -> tuple[Any, Any]:
    """Return the two values, or the first items in which two lists differ."""
    if isinstance(first, list) and isinstance(other, list):
        return next(pair for pair in zip_longest(first, other, fillvalue="nothing there") if pair[0] != pair[1])
    return first, other


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits that differ where a bit of the tensors does."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
