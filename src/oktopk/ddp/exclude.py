"""Which parameters travel dense in sparse steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import Tensor

from oktopk.algorithms import Algorithm
from oktopk.errors import SettingError, hint

Exclusion = str | Callable[[str, Tensor], bool]

SMALL = 16_384
DENSE_SHARE = 0.1
"""Part of the elements sent that may travel dense by default, so that a small model keeps about its density."""


def small_or_vector(name: str, parameter: Tensor) -> bool:  # noqa: ARG001
    """Whether a parameter is too small to be worth sparsifying (fewer than 16,384 elements) or 1-D (biases, norms)."""
    return parameter.dim() <= 1 or parameter.numel() < SMALL


def smallest(parameters: Mapping[str, Tensor], density: float) -> list[str]:
    """Return the names of the small tensors and vectors, the smallest first, that fit into `DENSE_SHARE`."""
    small = {name: each.numel() for name, each in parameters.items() if small_or_vector(name, each)}
    capacity = DENSE_SHARE * density * sum(each.numel() for each in parameters.values())
    names = sorted(small, key=lambda name: small[name])
    totals = accumulate(small[name] for name in names)
    return [name for name, total in zip(names, totals, strict=True) if total <= capacity]


def rules_of(exclude: Exclusion | Iterable[Exclusion]) -> tuple[Exclusion, ...]:
    """Return one exclusion, or several of any iterable, as a tuple."""
    return (exclude,) if isinstance(exclude, str) or callable(exclude) else tuple(exclude)


def rules_for(
    exclude: Exclusion | Iterable[Exclusion] | None, parameters: Mapping[str, Tensor], algorithm: Algorithm
) -> tuple[Exclusion, ...]:
    """Return the given exclusions; without any, one that chooses the smallest tensors for this algorithm's density."""
    if exclude is not None:
        return rules_of(exclude)
    density = algorithm.density if algorithm.has_density else 1.0
    chosen = frozenset(smallest(parameters, density))  # a later density leaves it as it is
    return (lambda name, _: name in chosen,)


def excluded(rules: Sequence[Exclusion], parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters that travel dense; refuse a pattern that no parameter's name matches."""
    dense: set[str] = set()
    for rule in rules:
        if isinstance(rule, str):
            matching = {name for name in parameters if fnmatchcase(name, rule)}
        else:
            matching = {name for name, parameter in parameters.items() if rule(name, parameter)}
        if isinstance(rule, str) and not matching:
            raise SettingError(f"exclude: no parameter matches {rule!r}.{hint(rule, parameters, cutoff=0.3)}")
        dense |= matching
    return dense
