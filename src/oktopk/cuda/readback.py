"""How the host learns what a step on the device did, some steps later, without waiting for it."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.algorithms.base import StepStats
from oktopk.cuda.events import record_event_
from oktopk.errors import NonFiniteError

READBACK_DELAY = 2
"""Steps after which the host looks at what a step did: it has long been done then, and nobody waits."""


class DeviceStats(NamedTuple):
    """What a step did, as the host learns of it: thresholds by their bits."""

    selected: int
    nnz: int
    bad: int
    threshold: int
    kept_threshold: int
    step: int

    def outcome(self, size: int) -> StepStats:
        """Return the same, as a record has it; of so many ranks: one that is alone keeps all that it sends."""
        if self.bad:
            return StepStats(selected=0, pairs=0)
        kept_threshold = self.kept_threshold if size > 1 else self.threshold
        thresholds = struct.unpack("2f", struct.pack("2i", self.threshold, kept_threshold))
        return StepStats(self.selected, self.nnz, (), *thresholds)


class PinnedBuffer:
    """Room at the host for the words of one step, or of several in rows, and how to know that they are there."""

    def __init__(self, like: Tensor) -> None:
        self.words = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.rows = self.words.view(-1, len(DeviceStats._fields))
        self.done = torch.Event(like.device) if like.is_cuda else None


class Readback:
    """Brings words to the host, which goes on meanwhile; the buffers are used again."""

    def __init__(self) -> None:
        self._free: list[PinnedBuffer] = []

    def send(self, words: Tensor) -> PinnedBuffer:
        """Send the words of one step, or of several in rows."""
        buffer = self._free.pop() if self._free else PinnedBuffer(words)
        buffer.words.copy_(words, non_blocking=True)
        if buffer.done is not None:
            record_event_(words.device, buffer.done)
        return buffer

    def read(self, buffer: PinnedBuffer) -> list[DeviceStats]:
        """Return what they tell, once they are here."""
        if buffer.done is not None:
            buffer.done.synchronize()
        told = [DeviceStats(*row) for row in buffer.rows.tolist()]
        self._free.append(buffer)
        return told


class DeferredErrors:
    """Errors of finished steps, raised `READBACK_DELAY` steps after their own, so that ranks raise together.

    A rank that read the stats earlier raises no earlier.
    """

    def __init__(self) -> None:
        self._of_steps: deque[tuple[int, NonFiniteError]] = deque()

    def __iter__(self) -> Iterator[NonFiniteError]:
        return (error for _, error in self._of_steps)

    def add(self, step: int, error: NonFiniteError) -> None:
        """Keep the error of a step."""
        self._of_steps.append((step, error))

    def take_due(self, step: int) -> NonFiniteError | None:
        """Return the one that is to be raised in this step, if there is one, and keep it no longer."""
        is_due = self._of_steps and self._of_steps[0][0] <= step - READBACK_DELAY
        return self._of_steps.popleft()[1] if is_due else None

    def clear(self) -> None:
        """Keep none."""
        self._of_steps.clear()
