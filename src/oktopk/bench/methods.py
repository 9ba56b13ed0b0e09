"""The methods of exchange by name: ours, and their rivals. docs/bench.md describes each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    has_density: bool = True  # or it has the class's default

    def make(self, density: float | None) -> Algorithm:
        """Return the algorithm for this density."""
        return make_algorithm(self.algorithm, **({"density": density} if self.has_density else {}), **self.settings)


Method = AllReduce | PowerSgd | Ours

PLAIN = {"wire": "fp32", "ranking": "magnitude"}
"""Settings of Ok-Topk unless a method has others: those of the paper, not the library's defaults."""

_NARROW = {f"oktopk-{wire}": Ours("oktopk", {**PLAIN, "wire": wire}) for wire in WIRES if wire != "fp32"}

METHODS: dict[str, Method] = {
    "dense": AllReduce(torch.float32),
    "bf16": AllReduce(torch.bfloat16),
    "fp16": AllReduce(torch.float16),
    **{f"powersgd-{rank}": PowerSgd(rank) for rank in (1, 2, 4)},
    **{name: Ours(name) for name in ("topka", "topkdsa", "gtopk", "gaussiank")},
    "oktopk-paper": Ours("oktopk_paper", PLAIN),
    "oktopk": Ours("oktopk", PLAIN),
    "oktopk-default": Ours("oktopk", has_density=False),  # OkTopk(), as `attach` runs it
    **_NARROW,
}
DENSE, BF16, DEFAULT = "dense", "bf16", "default"
GROUPS = {
    DEFAULT: (DENSE, BF16, "topka", "oktopk-default", "oktopk", *_NARROW),
    "all": tuple(METHODS),
    "rivals": tuple(name for name, method in METHODS.items() if not isinstance(method, Ours)),
    "baselines": ("topka", "topkdsa", "gtopk", "gaussiank"),
    "ours": tuple(name for name in METHODS if name.startswith("oktopk")),
}


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
    have = [name for name, method in METHODS.items() if isinstance(method, Ours) and method.has_density]
    return [Entry(name, density) for name in methods for density in (densities if name in have else (None,))]
