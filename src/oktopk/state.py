"""State as plain data, for checkpoints: dataclasses become dicts of tensors and numbers, safe to load."""

import copy
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from oktopk.errors import StateError

TRANSIENT = {"passing": True}
"""Metadata of a field that lives within one step, and is not saved."""


def to_plain(state: Any) -> Any:
    """Return a copy of a state as dicts, tensors and numbers."""
    if is_dataclass(state):
        return {name: to_plain(getattr(state, name)) for name in _names(state)}
    return state.clone() if isinstance(state, Tensor) else copy.deepcopy(state)


def from_plain(state: Any, saved: Any) -> Any:
    """Return `state` with what `to_plain` saved in place of its own."""
    if isinstance(state, (int, float)) and isinstance(saved, Tensor):
        return type(state)(saved.item())
    if not is_dataclass(state):
        return to_plain(saved)
    names = _names(state)
    if not isinstance(saved, dict) or sorted(saved) != sorted(names):
        raise StateError(f"the algorithm's state should have {', '.join(names)}")
    for name in names:
        setattr(state, name, from_plain(getattr(state, name), saved[name]))
    return state


def kind_of(algorithm: Any) -> int:
    """Return a number that differs where the state of one algorithm is none for the other: by type or ranking."""
    return zlib.crc32(repr((type(algorithm).__qualname__, getattr(algorithm, "ranking", None))).encode())


def _names(state: Any) -> list[str]:
    return [field.name for field in fields(state) if not field.metadata.get("passing")]
