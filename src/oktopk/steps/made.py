"""`MadeStep`, `StepLog`: the stats of steps, which the host may learn only some steps later.

On the device path nothing waits for a step: its stats, a NaN among them, arrive up to `READBACK_DELAY` steps later. An
error that arrives late is raised in the same step on all ranks, so that all stop together.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from oktopk.algorithms.base import StepStats
from oktopk.comm import Traffic
from oktopk.errors import NonFiniteError
from oktopk.steps.group import ParamGroup, StepContext
from oktopk.telemetry.record import record_of
from oktopk.telemetry.schema import StepRecord

NOTHING = StepStats(selected=0, pairs=0)
"""Stats of a group without sparse elements, or of a refused step."""


class Part(NamedTuple):
    """One group's part of a step."""

    group: ParamGroup
    traffic: Traffic


@dataclass
class MadeStep:
    """A finished step: `read` returns the stats of each part, None for a refused one, and may wait for the device."""

    context: StepContext
    parts: Sequence[Part]
    read: Callable[[], Sequence[StepStats | None]]
    error: NonFiniteError | None = None
    wait_seconds: float | None = None
    step_seconds: float | None = None

    def records(self, stats: Sequence[StepStats | None], size: int, phase: str) -> list[StepRecord]:
        """Return a record for each part, given the stats that were read; a refused step delivered nothing."""
        algorithm, step, records = self.context.algorithm, self.context.step, []
        density = 1.0 if algorithm is None else algorithm.density
        for (group, traffic), each in zip(self.parts, stats, strict=True):
            sparse = 0 if algorithm is None else group.num_sparse
            lengths = {"numel": group.numel, "dense_tail": 0 if each is None else group.numel - sparse}
            record = record_of(each or NOTHING, traffic, step=step, phase=phase, density=density, size=size, **lengths)
            records.append(replace(record, skipped=each is None))
        return records


class StepLog:
    """Finished steps whose stats have not been read yet, and the errors that are still to be raised.

    `note` gets each step with its stats, in order. If `raises`, a late NaN or Inf is an error `delay` steps later.
    """

    def __init__(self, note: Callable[[MadeStep, Sequence[StepStats | None]], None], raises: bool, delay: int) -> None:
        self._note, self._raises, self._delay = note, raises, delay
        self._unread: deque[MadeStep] = deque()
        self._errors: deque[tuple[int, NonFiniteError]] = deque()
        self.lock = threading.RLock()

    @property
    def errors(self) -> list[NonFiniteError]:
        """The errors that no step has raised yet."""
        return [error for _, error in self._errors]

    def add(self, made: MadeStep) -> None:
        """Keep a step whose stats are to be read later."""
        with self.lock:
            self._unread.append(made)

    def drain(self, but: int = 0) -> None:
        """Read the stats of all steps but the last few."""
        with self.lock:
            while len(self._unread) > but:
                self._read(self._unread.popleft())

    def take_due(self, step: int) -> NonFiniteError | None:
        """Return the error to raise in this step, if there is one, and forget it."""
        is_due = self._errors and self._errors[0][0] <= step - self._delay
        return self._errors.popleft()[1] if is_due else None

    def clear(self) -> None:
        """Forget all errors: the steps that they are of are undone."""
        self._errors.clear()

    def _read(self, made: MadeStep) -> None:
        stats = made.read()
        if made.error is None and None in stats:
            delivered = "NaN" if made.context.filling else "zeros"
            made.error = NonFiniteError(
                f"step {made.context.step}: a rank's gradient, or their sum, was not finite; that step delivered "
                f"{delivered} on all ranks, and all residuals are as they were before it"
            )
            if self._raises:
                self._errors.append((made.context.step, made.error))
        self._note(made, stats if made.error is None else [None] * len(stats))
