"""The verdict: which method reaches the same loss first, by how much, and from which link speed on dense is as good."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oktopk.plan.learning import Factor, factor_of
from oktopk.plan.methods import DENSE, Method
from oktopk.plan.model import Prediction, predict_step
from oktopk.plan.profile import Profile
from oktopk.plan.topology import Topology

LEAST_GAIN = 1.05
"""Least gain worth a change of a script."""

MODEL_ERROR = 0.15
"""Part by which predicted and measured steps may differ: the median is 5 %, one in twelve is more (docs/plan.md)."""

SLOWEST_MBIT, FASTEST_MBIT = 1.0, 1e6


@dataclass(frozen=True)
class Row:
    """A method's prediction and its learning factor; None if nobody measured one for this optimizer."""

    prediction: Prediction
    factor: Factor | None

    @property
    def seconds(self) -> float | None:
        """Seconds in which it gains as much as dense in a step."""
        return None if self.factor is None else self.prediction.step_s * self.factor.mean


@dataclass(frozen=True)
class Verdict:
    """The sentence, the method to use and the line to paste; `gain` is how much faster than dense it gets to a loss."""

    sentence: str
    use: str
    code: str
    gain: float
    low: float
    high: float
    break_even_mbit: float | None


def rows_of(methods: Sequence[Method], profile: Profile, topology: Topology) -> list[Row]:
    """Return a row for each method, in their order."""
    return [Row(predict_step(each, profile, topology), factor_of(each, profile.optimizer)) for each in methods]


def judge(rows: Sequence[Row], profile: Profile, topology: Topology) -> Verdict:
    """Return the verdict; a method without a learning factor cannot win."""
    dense = next(row for row in rows if row.prediction.method.name == DENSE)
    if topology.size == 1:
        return _dense(dense, "Nothing to exchange: this is one rank", None)
    known = [row for row in rows if row.seconds is not None]
    best = min(known, key=lambda row: row.seconds or math.inf)
    gain, low, high = _gain(dense, best)
    if gain < LEAST_GAIN:
        near = "dense is the fastest" if best is dense else f"dense is within {100 * (LEAST_GAIN - 1):.0f} %"
        return _dense(
            dense, f"Do not compress: {near} of all methods whose learning is known{_unknown(rows, dense)}", None
        )
    method = best.prediction.method
    sure = "is" if low > 1 else "may be"
    sentence = (
        f"Use {method.name}: it {sure} {gain:.2g} times as fast as dense to the same loss ({low:.2g} to {high:.2g})"
    )
    place = break_even(method, profile, topology)
    if place is not None:
        sentence += f", and pays up to about {_speed(place)}"
    return Verdict(sentence + _unknown(rows, best), method.name, method.code, gain, low, high, place)


def _speed(mbit: float) -> str:
    """Return a link's speed to two figures.

    >>> _speed(123.4), _speed(6512)
    ('120 Mbit/s', '6.5 Gbit/s')
    """
    return f"{float(f'{mbit:.2g}'):g} Mbit/s" if mbit < 1000 else f"{float(f'{mbit / 1000:.2g}'):g} Gbit/s"


def _dense(dense: Row, sentence: str, place: float | None) -> Verdict:
    method = dense.prediction.method
    return Verdict(sentence, method.name, method.code, 1.0, 1.0, 1.0, place)


def _gain(dense: Row, row: Row) -> tuple[float, float, float]:
    """Return how many times faster than dense a method reaches a loss, with the interval of both errors."""
    ratio = dense.prediction.step_s / row.prediction.step_s
    if row is dense or row.factor is None:
        return 1.0, 1.0, 1.0
    low, high = ratio / row.factor.high * (1 - MODEL_ERROR), ratio / row.factor.low * (1 + MODEL_ERROR)
    return ratio / row.factor.mean, low, high


def _unknown(rows: Sequence[Row], best: Row) -> str:
    """Return a clause on the method of a quicker step whose learning nobody measured; nothing if there is none."""
    unknown = [row for row in rows if row.factor is None and row.prediction.step_s * LEAST_GAIN < (best.seconds or 0)]
    if not unknown:
        return ""
    row = min(unknown, key=lambda row: row.prediction.step_s)
    most = (best.seconds or 0) / row.prediction.step_s
    return f"; {row.prediction.method.name} would pay if it needs fewer than {most:.2g} times dense's steps"


def break_even(method: Method, profile: Profile, topology: Topology) -> float | None:
    """Return the Mbit/s of the outermost level at which dense reaches a loss as fast; None if there is none."""

    def gains(mbit: float) -> bool:
        dense, other = rows_of([_DENSE, method], profile, topology.with_outer(mbit=mbit))
        return (other.seconds or math.inf) < (dense.seconds or 0)

    low, high = SLOWEST_MBIT, FASTEST_MBIT
    if not gains(low) or gains(high):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low


_DENSE = Method(name=DENSE, code="", family=DENSE)
