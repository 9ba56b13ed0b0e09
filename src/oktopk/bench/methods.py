"""The methods of exchange by name: ours, and their rivals. docs/bench.md describes each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from oktopk.algorithms import Algorithm, make_algorithm
from oktopk.codec.values import WIRES
from oktopk.errors import SettingError, one_of


@dataclass(frozen=True)
class AllReduce:
    """One all_reduce of the whole gradient, cast to `dtype` and back unless that is float32."""

    dtype: torch.dtype


@dataclass(frozen=True)
class PowerSgd:
    """torch's PowerSGD hook with matrices of this rank."""

    rank: int


@dataclass(frozen=True)
class Ours:
    """One of the algorithms of this package."""

    algorithm: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, density: float) -> Algorithm:
        """Return the algorithm for this density."""
        return make_algorithm(self.algorithm, density=density, **self.settings)


Method = AllReduce | PowerSgd | Ours

PLAIN: Mapping[str, Any] = MappingProxyType({"wire": "fp32", "ranking": "magnitude"})
"""Settings of Ok-Topk unless a method has others: those of the paper, not the library's defaults."""

_NARROW = {f"oktopk-{wire}": Ours("oktopk", {**PLAIN, "wire": wire}) for wire in WIRES if wire != "fp32"}

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "dense": AllReduce(torch.float32),
        "bf16": AllReduce(torch.bfloat16),
        "fp16": AllReduce(torch.float16),
        **{f"powersgd-{rank}": PowerSgd(rank) for rank in (1, 2, 4)},
        **{name: Ours(name) for name in ("topka", "topkdsa", "gtopk", "gaussiank")},
        "oktopk-paper": Ours("oktopk_paper", PLAIN),
        "oktopk": Ours("oktopk", PLAIN),
        **_NARROW,
    }
)

DENSE = "dense"
BF16 = "bf16"
DEFAULT = "default"

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        DEFAULT: tuple(name for name in METHODS if name in (DENSE, BF16, "topka", "oktopk", *_NARROW)),
        "all": tuple(METHODS),
        "rivals": tuple(name for name, method in METHODS.items() if not isinstance(method, Ours)),
        "baselines": ("topka", "topkdsa", "gtopk", "gaussiank"),
        "ours": tuple(name for name in METHODS if name.startswith("oktopk")),
    }
)


def parse_methods(text: str) -> tuple[str, ...]:
    """Return the methods of a list of names and groups, each once.

    >>> parse_methods("dense,baselines,topka")
    ('dense', 'topka', 'topkdsa', 'gtopk', 'gaussiank')
    """
    known = (*METHODS, *GROUPS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise SettingError(f"no method in {text!r}; there is {', '.join(known)}")
    found = [GROUPS.get(name, (name,)) for name in names if one_of("method", name, known)]
    return tuple(dict.fromkeys(method for group in found for method in group))


@dataclass(frozen=True)
class Entry:
    """A row of the tables: a method, and its density if it has one."""

    method: str
    density: float | None = None


def entries_of(methods: Sequence[str], densities: Sequence[float]) -> list[Entry]:
    """Return an entry for each method, and for each density if the method has one."""
    return [
        Entry(name, density)
        for name in methods
        for density in (densities if isinstance(METHODS[name], Ours) else (None,))
    ]
