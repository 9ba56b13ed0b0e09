"""`Audit`: the time of a sparse step as the dense steps before it predict it, held against the steps that were made.

computing   a dense step less the wait for its exchange
hidden      the part of the dense exchange that nobody waited for
predicted   computing + what exceeds `hidden` of: bytes at the dense exchange's speed, and selecting
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from oktopk.algorithms import Algorithm
from oktopk.cost import ELEMENT_S, GROUP_S, predict
from oktopk.errors import SettingError
from oktopk.telemetry.format import format_seconds
from oktopk.telemetry.schema import StepRecord
from oktopk.words import WORD_BYTES

SAMPLES = 16
"""Steps of each kind whose median counts."""

FIRST = 4
"""Sparse steps that do not count, because they make buffers and find the first thresholds."""


@dataclass
class Audit:
    """Looks at each record in turn. `sentence` is there once enough sparse steps were measured."""

    predicted_s: float | None = None
    sentence: str | None = None
    _dense: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _measured: list[float] = field(default_factory=list)
    _num_sparse: int = 0

    def look(self, record: StepRecord, algorithm: Algorithm | None, groups: Iterable[tuple[int, int]]) -> StepRecord:
        """Return the record with its predicted time; groups are pairs of sparse and dense elements."""
        if record.step_seconds is None or record.skipped:
            return record
        if algorithm is None:
            self._dense.append(record)
            return record
        if not self._num_sparse and self._dense:
            self.predicted_s = self._predict(algorithm, list(groups), record.world_size or 1)
        self._num_sparse += 1
        if self.predicted_s is None:
            return record
        if FIRST < self._num_sparse <= FIRST + SAMPLES:
            self._measured.append(record.step_seconds)
            if len(self._measured) == SAMPLES:
                self.sentence = _sentence(self.predicted_s, median(self._measured))
        return replace(record, predicted_seconds=self.predicted_s)

    def _predict(self, algorithm: Algorithm, groups: list[tuple[int, int]], size: int) -> float | None:
        """Return the seconds of a sparse step; None for one rank, or an algorithm without a cost model."""
        dense_s, waited_s, sent, exchange_s = (
            median(values)
            for values in zip(
                *(
                    (r.step_seconds or 0.0, r.wait_seconds or 0.0, r.sent_bytes, sum(r.seconds.values()))
                    for r in self._dense
                ),
                strict=True,
            )
        )
        if size == 1 or not sent or not exchange_s:
            return None
        try:
            words = sum(predict(algorithm, sparse, size).typical for sparse, _ in groups if sparse)
        except SettingError:
            return None
        words += sum(2 * dense * (size - 1) / size for _, dense in groups)
        computing_s = sum(GROUP_S + ELEMENT_S * sparse for sparse, _ in groups if sparse)
        sparse_s = words * WORD_BYTES * exchange_s / sent + computing_s
        return float(dense_s - waited_s + max(0.0, sparse_s - max(0.0, exchange_s - waited_s)))


def _sentence(predicted_s: float, measured_s: float) -> str:
    """Return the line that compares both.

    >>> _sentence(0.11, 0.1)
    'a sparse step was predicted to take 110 ms from the dense ones, and took 100 ms (+10 %)'
    """
    error = f"{100 * (predicted_s / measured_s - 1):+.0f} %"
    predicted, measured = format_seconds(predicted_s), format_seconds(measured_s)
    return f"a sparse step was predicted to take {predicted} from the dense ones, and took {measured} ({error})"
