"""`Profile`: the parameters of a model, the times of a step without an exchange, and what the host needs for one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from oktopk.ddp.exclude import DENSE_SHARE, SMALL
from oktopk.words import WORD_BYTES

CAP_BYTES = 25 << 20
FIRST_BYTES = 1 << 20
"""Sizes of DDP's buckets, and of our groups: 25 MiB, but for the first, which starts the exchange early."""

FORWARD_SHARE = 1 / 3
"""Part of forward and backward that is forward, where nobody measured it: backward makes two products for each one."""


@dataclass(frozen=True)
class Parameter:
    """The shape of a parameter, and the part of backward after which its gradient is there."""

    shape: tuple[int, ...]
    ready: float = 1.0

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether `small_or_vector` would keep it dense."""
        return len(self.shape) <= 1 or self.numel < SMALL


@dataclass(frozen=True)
class Part:
    """Gradients that travel together: elements sent sparsely, elements sent dense, and the part of backward before."""

    numel: int
    tail: int
    ready: float


@dataclass(frozen=True)
class Rate:
    """Seconds of computing for a group of elements: `call_s + element_s * numel`."""

    call_s: float = 0.0
    element_s: float = 0.0

    def seconds(self, numel: int) -> float:
        """Return the seconds for a group of that many elements."""
        return self.call_s + self.element_s * numel


@dataclass(frozen=True, kw_only=True)
class Host:
    """The cost of an exchange on a rank's processor, by collective and by method.

    message_s    seconds of a message, by collective; "" is for all others
    word_s       seconds of a word that is sent, received and summed, however fast the link; "" is for all others
    computing    `Rate` of a method's computing, by its name
    shares       whether the exchange and the model compete for the cores, as where ranks outnumber them
    """

    message_s: Mapping[str, float] = field(default_factory=lambda: {"": 2e-5})
    word_s: Mapping[str, float] = field(default_factory=lambda: {"": 1e-9})
    computing: Mapping[str, Rate] = field(default_factory=dict)
    shares: bool = False

    def of_message(self, kind: str) -> float:
        """Return the seconds of a message."""
        return self.message_s.get(kind, self.message_s.get("", 0.0))

    def of_word(self, kind: str) -> float:
        """Return the seconds of a word."""
        return self.word_s.get(kind, self.word_s.get("", 0.0))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A step of a model on one rank, without an exchange. Parameters are in the order of the model."""

    name: str
    parameters: tuple[Parameter, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    optimizer: str = "sgd"  # whose learning factors count
    host: Host = field(default_factory=Host)

    @property
    def numel(self) -> int:
        """Elements of the gradient."""
        return sum(each.numel for each in self.parameters)

    @property
    def compute_s(self) -> float:
        """Seconds of a step that exchanges nothing."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def buckets(self) -> list[Part]:
        """Return DDP's buckets, in the order in which it fills them: that of the gradients' arrival."""
        arriving = [self.parameters[i] for i in sorted(range(len(self.parameters)), key=self._arrival)]
        return [Part(sum(p.numel for p in part), 0, part[-1].ready) for part in _cut(arriving, FIRST_BYTES, CAP_BYTES)]

    def groups(self, density: float, whole: bool = False) -> list[Part]:
        """Return the groups of `attach`, whose smallest tensors travel dense, in the order in which they are complete.

        A group is complete when DDP has filled the last bucket that has a part of it. `whole` makes one group, as
        `LocalSteps` does.
        """
        dense = self._dense(density)
        filled: dict[int, float] = {}
        for part in _cut(sorted(range(len(self.parameters)), key=self._arrival), FIRST_BYTES, CAP_BYTES, self._numel):
            filled |= dict.fromkeys(part, max(self.parameters[i].ready for i in part))
        backward = list(reversed(range(len(self.parameters))))
        parts = [backward] if whole else _cut(backward, FIRST_BYTES, CAP_BYTES, self._numel)
        made = [
            Part(
                sum(self._numel(i) for i in part if i not in dense),
                sum(self._numel(i) for i in part if i in dense),
                max(filled[i] for i in part),
            )
            for part in parts
        ]
        return sorted(made, key=lambda part: part.ready)

    def _numel(self, i: int) -> int:
        return self.parameters[i].numel

    def _arrival(self, i: int) -> tuple[float, int]:
        return self.parameters[i].ready, -i

    def _dense(self, density: float) -> set[int]:
        """Return the parameters that `attach` sends dense, as `ddp.exclude.smallest` chooses them."""
        small = sorted((i for i, each in enumerate(self.parameters) if each.is_small), key=self._numel)
        totals = accumulate(self._numel(i) for i in small)
        capacity = DENSE_SHARE * density * self.numel
        return {i for i, total in zip(small, totals, strict=True) if total <= capacity}


def _cut(items: Sequence, first: float, cap: float, numel: Callable = lambda item: item.numel) -> list[list]:  # type: ignore[type-arg]
    """Return runs of the items, each of which ends where it reaches the limit in bytes of float32."""
    parts, size, limit = [[]], 0, first  # type: ignore[var-annotated]
    for item in items:
        if size >= limit:
            parts.append([])
            size, limit = 0, cap
        parts[-1].append(item)
        size += numel(item) * WORD_BYTES
    return parts if parts[0] else []


def from_numbers(
    numel: int,
    compute_s: float,
    optimizer: str = "sgd",
    name: str = "",
    host: Host | None = None,
    layers: int = 0,
    optimizer_s: float = 0.0,
) -> Profile:
    """Return the profile of a model of which only its size and the seconds of forward and backward are known.

    It is taken as equal square matrices, whose gradients arrive evenly over backward.
    """
    layers = layers or max(1, min(96, numel * WORD_BYTES // CAP_BYTES * 2))
    parameters: list[Parameter] = []
    for i in range(layers):
        size, ready = (i + 1) * numel // layers - i * numel // layers, 1 - i / layers
        rows = max(1, math.isqrt(size))
        parameters.append(Parameter((rows, size // rows), ready))
        if size % rows:
            parameters.append(Parameter((size % rows,), ready))
    return Profile(
        name=name or f"a model of {numel:,} parameters", parameters=tuple(parameters), optimizer=optimizer,
        optimizer_s=optimizer_s, forward_s=FORWARD_SHARE * compute_s,
        backward_s=(1 - FORWARD_SHARE) * compute_s, host=host or Host(),
    )  # fmt: skip
