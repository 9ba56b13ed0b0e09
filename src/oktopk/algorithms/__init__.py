"""The algorithms, one file each, and their names."""

from dataclasses import fields
from typing import Any

from oktopk.algorithms.base import Algorithm, as_algorithm
from oktopk.algorithms.dense import Dense
from oktopk.algorithms.gaussiank import GaussianK
from oktopk.algorithms.gtopk import GTopk
from oktopk.algorithms.oktopk import OkTopk
from oktopk.algorithms.oktopk_paper import OkTopkPaper
from oktopk.algorithms.topka import TopkA
from oktopk.algorithms.topkdsa import TopkDSA
from oktopk.errors import SettingError, one_of

ALGORITHMS: dict[str, type[Algorithm]] = {
    **{cls.__name__.lower(): cls for cls in (Dense, TopkA, TopkDSA, GTopk, GaussianK, OkTopk)},
    "oktopk_paper": OkTopkPaper,
}
"""Names on a command line: the lower-case forms of the classes."""


def make_algorithm(name: str, **settings: Any) -> Algorithm:
    """Return the algorithm of that name.

    >>> make_algorithm("topka", density=0.02)
    TopkA(density=0.02, wire='fp32')
    """
    known = settings_of(name)
    for setting in settings:
        if not known:
            raise SettingError(f"{name} has no settings, so none called {setting!r}")
        one_of(f"setting of {name}", setting, known)
    return ALGORITHMS[name](**settings)


def settings_of(name: str) -> list[str]:
    """Return the names of an algorithm's settings."""
    cls: Any = ALGORITHMS[one_of("algorithm", name, ALGORITHMS)]
    return [field.name for field in fields(cls)]


__all__ = [
    "ALGORITHMS", "Algorithm", "Dense", "GTopk", "GaussianK", "OkTopk", "OkTopkPaper", "TopkA", "TopkDSA",
    "as_algorithm", "make_algorithm", "settings_of",
]  # fmt: skip
