"""What the probe's figures say an exchange should take, to be held against what it took."""

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
    """The machine, and how many seconds each entry computes for an element (None where that is not known)."""

    machine: Machine
    computing_s: Mapping[Entry, float | None]

    def seconds(self, entry: Entry, numel: int, size: int) -> float | None:
        """Return how long one exchange of `numel` elements should take on `size` ranks; None where nothing says so."""
        computing_s, cost = self.computing_s.get(entry), cost_of(entry, numel, size)
        if computing_s is None or cost is None:
            return None
        return self.machine.seconds(cost, computing_s * numel)

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {
            "alpha_s": dict(self.machine.alpha_s),
            "beta_s_per_word": dict(self.machine.beta_s),
            "computing_s_per_element": [
                {"method": entry.method, "density": entry.density, "seconds": seconds}
                for entry, seconds in self.computing_s.items()
            ],
        }


def make_forecast(ranks: Sequence[Times], entries: Sequence[Entry], numel: int) -> Forecast:
    """Return what the ranks' probes come to: of each call and each stretch of computing the slowest rank's time."""
    alpha_s = {name: _typical(ranks, "small", name) for name in ranks[0]["small"]}
    beta_s = {
        name: max(0.0, _typical(ranks, "big", name) - alpha_s[name]) / words
        for name, words in ranks[0]["words"].items()
    }
    computing = [[rank["computing"][i] for rank in ranks] for i in range(len(entries))]
    per_element = [_critical_path(laps) for laps in computing]
    return Forecast(
        Machine(alpha_s=alpha_s, beta_s=beta_s),
        {
            entry: None if seconds is None else seconds / computing_numel(numel)
            for entry, seconds in zip(entries, per_element, strict=True)
        },
    )


def cost_of(entry: Entry, numel: int, size: int) -> Cost | None:
    """Return the cost of an exchange by this method on the busiest rank; None where there is no model of it."""
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
    """Return how far the prediction is above what was measured, or below.

    >>> error_percent(1.5, 2.0)
    -25.0
    """
    return None if predicted_s is None else 100 * (predicted_s / measured_s - 1)


def _typical(ranks: Sequence[Times], size: str, name: str) -> float:
    return float(median(max(lap) for lap in zip(*(rank[size][name] for rank in ranks), strict=True)))


def _critical_path(ranks: Sequence[Sequence[Sequence[float]] | None]) -> float | None:
    """Return a lap's computing: of each stretch between two messages, for whose slowest rank all wait, the median."""
    laps = [laps for laps in ranks if laps is not None]
    if not laps:
        return None
    slowest = [list(map(max, zip_longest(*stretches, fillvalue=0.0))) for stretches in zip(*laps, strict=True)]
    return float(sum(map(median, zip_longest(*slowest, fillvalue=0.0))))
