"""Learning factors: the steps that a method needs to the same loss, times dense's, as docs/learning.md shows them.

`FACTORS` is the one table. A method or optimizer that is not in it has no factor, and is never recommended.
"""

from __future__ import annotations

from dataclasses import dataclass

from oktopk.plan.methods import BF16, DENSE, Method

OPTIMIZERS = ("sgd", "adam")
ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Factor:
    """Steps to the same loss, times dense's: the mean, and the least and the most of the seeds."""

    family: str
    optimizer: str
    density: float | None  # None: whatever it is
    mean: float
    low: float
    high: float
    seeds: int  # 0: not measured, but taken as given
    source: str


FACTORS = (
    Factor(family=DENSE, optimizer=ANY, density=None, mean=1.0, low=1.0, high=1.0, seeds=0, source="by definition"),
    Factor(
        family=BF16, optimizer=ANY, density=None, mean=1.0, low=1.0, high=1.0, seeds=0,
        source="taken as dense's, not measured",
    ),
    Factor(
        family="oktopk", optimizer="sgd", density=0.03, mean=1.18, low=1.09, high=1.32, seeds=10,
        source="AN4, steps to a training loss of 10",
    ),
)  # fmt: skip


def factor_of(method: Method, optimizer: str) -> Factor | None:
    """Return the factor of a method under an optimizer; None if nobody measured it.

    >>> from oktopk.plan.methods import methods
    >>> factor_of(methods()[0], "adam").mean
    1.0
    """
    density = method.algorithm.density if method.algorithm is not None else None
    for each in FACTORS:
        same = each.family == method.family and each.optimizer in (ANY, optimizer)
        if same and each.density in (None, density):
            return each
    return None
