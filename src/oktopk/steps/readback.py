"""`Readback`: brings the stats of a step on the device to the host, which goes on meanwhile."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.algorithms.base import StepStats
from oktopk.cuda.events import record_event_

READBACK_DELAY = 2
"""Steps after which the host reads a step's stats: it is long over then, so that nobody waits."""


class DeviceStats(NamedTuple):
    """The words that a step writes, see `CudaStep.words`; thresholds by their bits."""

    selected: int
    nnz: int
    bad: int
    threshold: int
    kept_threshold: int
    step: int

    def stats(self, size: int) -> StepStats:
        """Return the stats for a record; a rank that is alone keeps everything that it sends."""
        kept_threshold = self.kept_threshold if size > 1 else self.threshold
        thresholds = struct.unpack("2f", struct.pack("2i", self.threshold, kept_threshold))
        return StepStats(self.selected, self.nnz, (), *thresholds)


class PinnedBuffer:
    """Host memory for the words of one step, a row a group, and the event after which they are there."""

    def __init__(self, like: Tensor) -> None:
        self.words = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.done = torch.Event(like.device) if like.is_cuda else None


class Readback:
    """Copies words to pinned buffers, which are used again."""

    def __init__(self) -> None:
        self._free: list[PinnedBuffer] = []

    def send(self, words: Tensor) -> Callable[[], Sequence[DeviceStats]]:
        """Start to copy the words of one step; return the function that waits for them and reads them."""
        words = words.view(-1, len(DeviceStats._fields))
        self._free = [buffer for buffer in self._free if buffer.words.shape == words.shape]
        buffer = self._free.pop() if self._free else PinnedBuffer(words)
        buffer.words.copy_(words, non_blocking=True)
        if buffer.done is not None:
            record_event_(words.device, buffer.done)
        return lambda: self.read(buffer)

    def read(self, buffer: PinnedBuffer) -> Sequence[DeviceStats]:
        """Return the stats of each group, once the words are there."""
        if buffer.done is not None:
            buffer.done.synchronize()
        rows = [DeviceStats(*row) for row in buffer.words.tolist()]
        self._free.append(buffer)
        return rows
