"""`DDPConfig`: the settings of an attachment, and which parameters travel dense because of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor

from oktopk.algorithms import Algorithm
from oktopk.errors import SettingError

Exclusion = str | Callable[[str, Tensor], bool]


@dataclass
class DDPConfig:
    """The settings of `attach`; `Attached` changes those that may change between steps."""

    algorithm: Algorithm
    dense_steps: int
    exclude: Exclusion | Iterable[Exclusion]
    clip: float | None
    density_schedule: tuple[tuple[int, float], ...]
    on_nonfinite: str
    scaled: bool = False  # a GradScaler scales the loss

    def algorithm_at(self, step: int) -> Algorithm | None:
        """Return the algorithm of a step, with the density that the schedule gives it; None for a dense step."""
        sparse_step = step - self.dense_steps
        if sparse_step < 0:
            return None
        for steps, density in self.density_schedule:
            if sparse_step < steps:
                return self.algorithm.with_density(density)
            sparse_step -= steps
        return self.algorithm

    def fingerprint(self, names: Iterable[str]) -> int:
        """Return a number that differs where ranks would not do the same."""
        given = self.algorithm.given
        algorithm = given if is_dataclass(given) else type(given).__qualname__
        rest = (self.dense_steps, self.clip, self.density_schedule, self.on_nonfinite, self.scaled)
        return zlib.crc32(f"{algorithm} {rest} {list(names)}".encode())

    def travel_dense(self, parameters: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the parameters that travel dense."""
        rules = checked_rules(self.exclude, parameters)
        return {name for name, each in parameters.items() if any(_matches(rule, name, each) for rule in rules)}


def _matches(rule: Exclusion, name: str, parameter: Tensor) -> bool:
    return fnmatchcase(name, rule) if isinstance(rule, str) else bool(rule(name, parameter))


def checked_rules(exclude: Exclusion | Iterable[Exclusion], parameters: Mapping[str, Tensor]) -> list[Exclusion]:
    """Return the rules as a list; a pattern that no parameter's name matches is a mistake."""
    rules = [exclude] if isinstance(exclude, str) or callable(exclude) else list(exclude)
    for rule in rules:
        if isinstance(rule, str) and not any(fnmatchcase(name, rule) for name in parameters):
            close = get_close_matches(rule, parameters, n=1, cutoff=0.3)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingError(f"exclude: no parameter matches {rule!r}.{hint}")
    return rules
