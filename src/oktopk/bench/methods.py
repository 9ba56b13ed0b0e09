"""The methods of exchange by name: ours, and their rivals."""

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
    """One all_reduce of the whole gradient, cast to `dtype` and back where that is not float32."""

    about: str
    dtype: torch.dtype


@dataclass(frozen=True)
class PowerSgd:
    """torch's PowerSGD hook with matrices of this rank."""

    about: str
    rank: int


@dataclass(frozen=True)
class Ours:
    """One of the algorithms of this package."""

    about: str
    algorithm: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, density: float) -> Algorithm:
        """Return the algorithm for this density."""
        return make_algorithm(self.algorithm, density=density, **self.settings)


Method = AllReduce | PowerSgd | Ours

PLAIN: Mapping[str, Any] = MappingProxyType({"wire": "fp32", "ranking": "magnitude"})
"""What Ok-Topk is measured with unless a method says otherwise: the paper's, not the library's defaults."""

_NARROW = {
    f"oktopk-{wire}": Ours(f"the same, {wire} values and packed indices", "oktopk", {**PLAIN, "wire": wire})
    for wire in WIRES
    if wire != "fp32"
}

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "dense": AllReduce("all_reduce in float32; in a step: plain DDP", torch.float32),
        "bf16": AllReduce("cast to bfloat16, all_reduce, cast back; in a step: a hook of ours", torch.bfloat16),
        "fp16": AllReduce("the same in float16; in a step: torch's fp16_compress_hook", torch.float16),
        **{f"powersgd-{r}": PowerSgd(f"torch's powerSGD_hook, matrices of rank {r}", r) for r in (1, 2, 4)},
        "topka": Ours("every rank gathers every rank's top k", "topka"),
        "topkdsa": Ours("SparCML: regions, pairs or dense blocks", "topkdsa"),
        "gtopk": Ours("a tree of merges, each cut to k", "gtopk"),
        "gaussiank": Ours("a threshold from a fitted normal, then a gather", "gaussiank"),
        "oktopk-paper": Ours("Ok-Topk in the paper's six steps", "oktopk_paper", PLAIN),
        "oktopk": Ours("Ok-Topk with messages of fixed capacity, float32 values", "oktopk", PLAIN),
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
    """Return the methods that a list of names, or of groups of them, stands for, each once.

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
    """A row of the tables: a method and, where it has one, its density."""

    method: str
    density: float | None = None


def entries_of(methods: Sequence[str], densities: Sequence[float]) -> list[Entry]:
    """Return one entry for each method and, if it is one of ours, for each density."""
    return [
        Entry(name, density)
        for name in methods
        for density in (densities if isinstance(METHODS[name], Ours) else (None,))
    ]
