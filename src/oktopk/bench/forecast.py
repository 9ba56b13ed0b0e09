"""The seconds that the probe's figures predict for an exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

from oktopk.bench.methods import METHODS, AllReduce, Entry, Ours
from oktopk.bench.probe import Times, computing_numel, sum_name
from oktopk.codec import WORD_BYTES
from oktopk.cost import Call, Cost, Machine, exactly, predict, ring_words


@dataclass(frozen=True)
class Forecast:
    """The machine, and each entry's seconds of computing an element (None if they are not known)."""

    machine: Machine
    computing_s: Mapping[Entry, float | None]

    def seconds(self, entry: Entry, numel: int, size: int) -> float | None:
        """Return the seconds of one exchange of `numel` elements on `size` ranks; None without a model."""
        computing_s, cost = self.computing_s.get(entry), cost_of(entry, numel, size)
        if computing_s is None or cost is None:
            return None
        return self.machine.seconds(cost, computing_s * numel)

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        computing = self.computing_s.items()
        return {
            "alpha_s": dict(self.machine.alpha_s),
            "beta_s_per_word": dict(self.machine.beta_s),
            "computing_s_per_element": [{"method": e.method, "density": e.density, "seconds": s} for e, s in computing],
        }


def make_forecast(ranks: Sequence[Times], entries: Sequence[Entry], numel: int) -> Forecast:
    """Return the forecast of the ranks' probes: the slowest rank's time of each call and each stretch counts."""
    alpha_s = {name: _typical(ranks, "small", name) for name in ranks[0]["small"]}
    beta_s = {
        name: max(0.0, _typical(ranks, "big", name) - alpha_s[name]) / words
        for name, words in ranks[0]["words"].items()
    }
    computing_s = {}
    for i, entry in enumerate(entries):
        seconds = _critical_path([rank["computing"][i] for rank in ranks])
        computing_s[entry] = None if seconds is None else seconds / computing_numel(numel)
    return Forecast(Machine(alpha_s=alpha_s, beta_s=beta_s), computing_s)


def cost_of(entry: Entry, numel: int, size: int) -> Cost | None:
    """Return the cost of an exchange on the busiest rank; None if the method has no model."""
    method = METHODS[entry.method]
    if isinstance(method, Ours):
        assert entry.density is not None
        algorithm = method.make(entry.density)
        return max((predict(algorithm, numel, size, rank) for rank in range(size)), key=lambda cost: cost.typical)
    if isinstance(method, AllReduce):
        words = ring_words(numel, size) * method.dtype.itemsize // WORD_BYTES
        return exactly(words, 2 * (size - 1), Call(sum_name(method.dtype), words))
    return None


def error_percent(predicted_s: float | None, measured_s: float) -> float | None:
    """Return the error of a prediction, positive if it is too high.

    >>> error_percent(1.5, 2.0)
    -25.0
    """
    return None if predicted_s is None else 100 * (predicted_s / measured_s - 1)


def _typical(ranks: Sequence[Times], size: str, name: str) -> float:
    return float(median(max(calls) for calls in zip(*(rank[size][name] for rank in ranks), strict=True)))


def _critical_path(ranks: Sequence[Sequence[Sequence[float]] | None]) -> float | None:
    """Return the sum over stretches of the slowest rank's seconds, each the median of the rounds."""
    rounds = [each for each in ranks if each is not None]
    if not rounds:
        return None
    slowest = [list(map(max, zip_longest(*stretches, fillvalue=0.0))) for stretches in zip(*rounds, strict=True)]
    return float(sum(map(median, zip_longest(*slowest, fillvalue=0.0))))
