"""What is tried: a `Setting` says how the steps after the dense ones are made; the catalogue names those worth trying.

A spec is a name of the catalogue, changed by any number of fields: `scaled-1+momentum=0.5+lr_scale=5`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from oktopk import ALGORITHMS, Algorithm, OkTopk, make_algorithm
from oktopk.algorithms import settings_of
from oktopk.codec import Codec
from oktopk.codec.indices import PLAIN
from oktopk.errors import SettingError, one_of

FROM_RECIPE = -1.0


class _PlainIndices(Codec):
    """Values as the wire has them, indices as they are."""

    def _width(self, capacity: int) -> int:  # noqa: ARG002
        return PLAIN


class _Unpacked(OkTopk):
    """Ok-Topk without the packing of indices, which has no kernel for a GPU here; the same values arrive."""

    def codec(self, numel: int) -> Codec:
        """Return how pairs travel."""
        return _PlainIndices(numel, super().codec(numel).wire)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train. Before step `dense_steps` all settings are alike: dense, with the recipe's optimizer.

    algorithm       of the sparse steps; dense goes on dense
    density, ranking, wire, slack          of the algorithm, where it has them; so is `rescale_every`
    ramp            densities before the last one, each with its steps: "0.25x14 0.05x14"
    packed          no: indices travel as they are on every wire; the same values arrive, for more bytes and, on a GPU,
                    in less time
    emulated        yes: the bounded exchange of all ranks at once, for sweeps on a GPU (`emulated.py`); no bytes count
    parts           whole: one exchange; tensor: one for each parameter tensor, k spread by its size

    lr_scale        times the recipe's learning rate; over `rewarm` steps it rises to that from nothing
    momentum        of the optimizer; FROM_RECIPE leaves it as it was; so do `nesterov` and `clip` (of the mean)
    quasi           quasi-hyperbolic: the part of the momentum in the direction, the rest is the plain gradient; 0: off
    lazy            momentum moves, and moves weights, only where something was delivered
    buffer          times the momentum buffer at the switch; 0 forgets it

    local_momentum  DGC: momentum before selection; wants `momentum=0`. `masking` forgets it where it was delivered
    local_clip      each worker's gradient is clipped to clip / sqrt(P) before anything else
    ef21            eta of EF21-SGDM: what travels is the change of v = (1 - eta) v + eta g, what trains is the sum of
                    all changes, a dense vector; 1 is plain EF21; 0: off

    decay           times the residual, every step
    flush_every     every so many steps everything travels, dense, as `flush_wire`; 0: never
    late            sum: what waited arrives as it is; drop, keep: divided by the steps it waited; the rest is lost, or
                    waits on
    ceiling         times the rms of what is delivered: no value is larger, the rest waits; 0: none

    scale_over      what has a scale of its own in weighted ranking: tensor, row, or the length of a block; all ranks
                    agree on these; "": the algorithm ranks by itself, by rows, by each rank's own scales (bounded)
    scale_of        what they are the rms of: acc, gradient + residual; grad, what this step adds to it
    scale_power     |acc| is ranked over its scale to this power: 0 would be by magnitude
    scale_every     steps between updates of these scales
    scale_memory    of their squares: 0 takes the last ones, 0.9 a running average
    age_power       ranking is weighted by (1 + age / age_steps) ** age_power, age counting since the last delivery
    """

    name: str
    algorithm: str = "oktopk"
    density: float = 0.01
    ranking: str = "magnitude"
    wire: str = "fp32"
    slack: float = 1.25
    rescale_every: int = 16
    dense_steps: int = 128
    ramp: str = ""
    packed: bool = True
    emulated: bool = False
    parts: str = "whole"

    lr_scale: float = 1.0
    rewarm: int = 0
    momentum: float = FROM_RECIPE
    nesterov: float = FROM_RECIPE
    clip: float = FROM_RECIPE
    quasi: float = 0.0
    lazy: bool = False
    buffer: float = 1.0

    local_momentum: float = 0.0
    masking: bool = True
    local_clip: bool = False
    ef21: float = 0.0

    decay: float = 1.0
    flush_every: int = 0
    flush_wire: str = "fp32"
    late: str = "sum"
    ceiling: float = 0.0

    scale_over: str = ""
    scale_of: str = "acc"
    scale_power: float = 1.0
    scale_every: int = 16
    scale_memory: float = 0.0
    age_power: float = 0.0
    age_steps: float = 32.0

    def __post_init__(self) -> None:
        one_of("algorithm", self.algorithm, ALGORITHMS)
        one_of("parts", self.parts, ("whole", "tensor"))
        one_of("scale_of", self.scale_of, ("acc", "grad"))
        one_of("late", self.late, ("sum", "drop", "keep"))
        if not (self.scale_over in ("", "tensor", "row") or self.scale_over.isdigit()):
            raise SettingError(f"scale_over wants tensor, row or a length, not {self.scale_over!r}")
        self.algorithm_at(0)
        self.density_at(0)

    @property
    def is_dense(self) -> bool:
        """Whether every step is dense."""
        return self.algorithm == "dense"

    @property
    def is_weighted(self) -> bool:
        """Whether we weigh what the algorithm then ranks by magnitude."""
        return bool(self.scale_over or self.age_power)

    def algorithm_at(self, sparse_step: int) -> Algorithm:
        """Return the algorithm of a sparse step, counted from the switch."""
        known = settings_of(self.algorithm)
        values: dict[str, Any] = {"density": self.density_at(sparse_step), "ranking": self.ranking}
        values |= {"wire": self.wire, "slack": self.slack, "rescale_every": self.rescale_every}
        if self.is_weighted:
            values["ranking"] = "magnitude"
        values = {name: value for name, value in values.items() if name in known}
        if not self.packed and self.algorithm == "oktopk":
            return _Unpacked(**values)
        return make_algorithm(self.algorithm, **values)

    def density_at(self, sparse_step: int) -> float:
        """Return the density of a sparse step.

        >>> setting = Setting(name="x", ramp="0.25x2 0.05x1")
        >>> [setting.density_at(step) for step in range(4)]
        [0.25, 0.25, 0.05, 0.01]
        """
        for stage in self.ramp.split():
            density, _, steps = stage.partition("x")
            if sparse_step < int(steps):
                return float(density)
            sparse_step -= int(steps)
        return self.density


KEEP_M0 = "momentum=0+lr_scale=10"
KEEP_M5 = "momentum=0.5+lr_scale=5"
"""lr / (1 - momentum) is as with 0.9."""

EF21M = "scaled-1+ef21=0.1+momentum=0+nesterov=0+lr_scale=10"
"""The average that EF21-SGDM delivers is the momentum: 1 - eta stands for 0.9, and SGD's buffer is 1 / eta averages."""

GRAD = "scale_of=grad+scale_every=4+scale_memory=0.9"
"""A running average over some 40 steps."""

DGC = "scaled-1+local_momentum=0.9+momentum=0+nesterov=0"

# "library" is the library's defaults, the optimizer as its user has it; "default" is that with the trainer's momentum.
# "scaled" is the algorithm's own ranking by rows, of the gradient alone; in the runs of 2026-11-16 it was of gradient +
# residual, by tensors or by rows: "scale-tensor" and "scale-row" come near that.
CATALOGUE: dict[str, str] = {
    "dense": "algorithm=dense",
    "library": "density=0.03+wire=auto",
    "default": f"library+{KEEP_M5}+buffer=0.2",
    "scaled": "library+ranking=scaled",
    "default-scaled": "default+ranking=scaled",
    "grad-row-1": f"library+scale_over=row+{GRAD}",
    "grad-row-0.5": "grad-row-1+scale_power=0.5",
    "grad-row-0.25": "grad-row-1+scale_power=0.25",
    "grad-tensor-1": f"library+scale_over=tensor+{GRAD}",
    "grad-tensor-0.5": "grad-tensor-1+scale_power=0.5",
    "default-grad-row-1": f"grad-row-1+{KEEP_M5}+buffer=0.2",
    "default-grad-row-0.5": f"grad-row-0.5+{KEEP_M5}+buffer=0.2",
    "default-grad-row-0.25": f"grad-row-0.25+{KEEP_M5}+buffer=0.2",
    "dense-m0": f"dense+{KEEP_M0}",
    "dense-no-nesterov": "dense+nesterov=0",
    "magnitude-1": "ranking=magnitude",
    "magnitude-2": "magnitude-1+density=0.02",
    "magnitude-3": "magnitude-1+density=0.03",
    "scaled-1": "ranking=scaled+density=0.01",
    "scaled-2": "scaled-1+density=0.02",
    "scaled-3": "scaled-1+density=0.03",
    "scaled-2-bf16": "scaled-2+wire=bf16",
    "scaled-2-int8": "scaled-2+wire=int8",
    "scaled-3-int8": "scaled-3+wire=int8",
    "m0": "scaled-1+momentum=0",
    "m0-kept": f"scaled-1+{KEEP_M0}",
    "m5": "scaled-1+momentum=0.5",
    "m5-kept": f"scaled-1+{KEEP_M5}",
    "dgc": DGC,
    "dgc-clip": f"{DGC}+local_clip=yes",
    "dgc-unmasked": f"{DGC}+masking=no",
    "dgc-magnitude": f"{DGC}+ranking=magnitude",
    "flush-25": "scaled-1+flush_every=25",
    "flush-50": "scaled-1+flush_every=50",
    "flush-100": "scaled-1+flush_every=100",
    "flush-50-bf16": "scaled-1+flush_every=50+flush_wire=bf16",
    "decay-0.8": "scaled-1+decay=0.8",
    "decay-0.9": "scaled-1+decay=0.9",
    "decay-0.95": "scaled-1+decay=0.95",
    "decay-0.99": "scaled-1+decay=0.99",
    "age-half": "scaled-1+scale_over=tensor+age_power=0.5",
    "age-1": "scaled-1+scale_over=tensor+age_power=1",
    "age-2": "scaled-1+scale_over=tensor+age_power=2",
    "scale-tensor": "scaled-1+scale_over=tensor",
    "rescale-8": "scaled-1+rescale_every=8",
    "rescale-64": "scaled-1+rescale_every=64",
    "scale-running": "scaled-1+scale_over=tensor+scale_every=4+scale_memory=0.9",
    "scale-row": "scaled-1+scale_over=row",
    "scale-row-running": "scaled-1+scale_over=row+scale_memory=0.8",
    "scale-block": "scaled-1+scale_over=4096",
    "union-1": "magnitude-1+algorithm=topkdsa",
    "union-1-scaled": "scale-tensor+algorithm=topkdsa",
    "union-half-scaled": "scale-tensor+algorithm=topkdsa+density=0.005",
    "no-nesterov": "scaled-1+nesterov=0",
    "clip-100": "scaled-1+clip=100",
    "clip-50": "scaled-1+clip=50",
    "clip-20": "scaled-1+clip=20",
    "late-drop": "scaled-1+late=drop",
    "late-keep": "scaled-1+late=keep",
    "ceiling-3": "scaled-1+ceiling=3",
    "ef21m": EF21M,
    "ef21m-2": f"{EF21M}+density=0.02",
    "ef21m-3-int8": f"{EF21M}+density=0.03+wire=int8",
    "ef21m-magnitude": f"{EF21M}+ranking=magnitude",
    "ef21m-slow": f"{EF21M}+ef21=0.05+lr_scale=10",
    "ef21m-lr5": f"{EF21M}+lr_scale=5",
    "ef21m-momentum": "scaled-1+ef21=0.1",
    "ef21": "scaled-1+ef21=1",
    "ef21-m0": f"scaled-1+ef21=1+{KEEP_M0}",
    "quasi-0.7": "scaled-1+quasi=0.7",
    "lazy": "scaled-1+lazy=yes",
    "buffer-0": "scaled-1+buffer=0",
    "rewarm-56": "scaled-1+rewarm=56",
    "ramp": "scaled-1+ramp=0.25x28 0.0625x28 0.02x28",
    "warm-64": "scaled-1+dense_steps=64",
    "warm-256": "scaled-1+dense_steps=256",
    "by-tensor": "scaled-1+parts=tensor",
}


def read_settings(text: str) -> list[Setting]:
    """Return the settings of a comma-separated list of specs, of a file with one a line, or of "all"."""
    if text == "all":
        return [parse(name) for name in CATALOGUE]
    return [parse(spec) for spec in (_lines(Path(text)) if Path(text).is_file() else text.split(","))]


def parse(spec: str) -> Setting:
    """Return the setting of a spec, named by it.

    >>> parse("scaled-1+momentum=0.5").momentum
    0.5
    """
    return replace(_resolve(spec.strip()), name=spec.strip())


def _resolve(spec: str) -> Setting:
    first, *changes = spec.split("+")
    if "=" in first:
        base, changes = Setting(name=spec), [first, *changes]
    else:
        base = _resolve(CATALOGUE[one_of("setting", first, CATALOGUE)])
    return replace(base, **dict(map(_change, changes)))


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    known: dict[str, type] = {each.name: type(each.default) for each in fields(Setting) if each.name != "name"}
    kind = known[one_of("field of a setting", name, known)]
    if not equals:
        raise SettingError(f"{name} wants a value: {name}=...")
    try:
        return name, value == "yes" if kind is bool else kind(value)
    except ValueError:
        raise SettingError(f"{name} wants a {kind.__name__}, not {value!r}") from None


def _lines(path: Path) -> Iterable[str]:
    stripped = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in stripped if line]
