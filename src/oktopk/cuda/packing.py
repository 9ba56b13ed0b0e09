"""`Packing`: the blocks of a step on the device, of fixed size wherever the regions are cut."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from oktopk.codec import Codec, Layout
from oktopk.words import HEADER_WORDS

WIDER = 1.5
"""Factor from one span in the table to the next, because an index of a span that is half as long again takes at most
two thirds of a bit more."""


class Packing:
    """The layout of each region's block, of the codec, chosen by the region's length; the blocks are equally long.

    The host cannot follow where the device cuts regions, and CUDA graphs keep their sizes. So `words` are those of a
    block of `capacity` pairs of an even region, and a longer region, whose indices are wider, has fewer pairs in it.
    """

    def __init__(self, codec: Codec, capacity: int, size: int, device: torch.device) -> None:
        self.wire, self.capacity = codec.wire, capacity
        even = -(-codec.numel // size)
        self.words = self.words_for(codec, even, capacity)
        spans = [even] if self.is_plain else list(_spans(even, codec.numel))
        self.table = [self._layout(codec, span) for span in spans]
        self.most_lows = max(layout.highs_at - HEADER_WORDS for layout in self.table)
        self.most_highs = max(layout.scales_at - layout.highs_at for layout in self.table)
        self._spans = torch.tensor(spans, device=device)
        self._table = torch.tensor(self.table, dtype=torch.int32, device=device)
        self.rows = self._table[:1].repeat(size, 1)

    @property
    def is_plain(self) -> bool:
        """Whether blocks travel as they are."""
        return self.wire == "fp32"

    @property
    def rooms(self) -> Tensor:
        """The number of pairs that fit into each region's block."""
        return self.rows[:, 0]

    def follow_(self, cuts: Tensor) -> None:
        """Choose the layouts for the regions between these cuts."""
        if len(self.table) > 1:
            self.rows.copy_(self._table[torch.searchsorted(self._spans, cuts.diff())])

    @staticmethod
    def words_for(codec: Codec, span: int, capacity: int) -> int:
        """Return the words of a block of `capacity` pairs of a region of `span` elements."""
        return replace(codec, span=span).words(capacity)

    def _layout(self, codec: Codec, span: int) -> Layout:
        """Return the layout with room for as many pairs of such a region as the words hold."""
        room = bisect_left(range(1, self.capacity + 1), self.words + 1, key=lambda c: self.words_for(codec, span, c))
        return replace(codec, span=span).layout(room)


def _spans(least: int, most: int) -> Iterator[int]:
    """Return lengths of regions from `least` to `most`, each at most WIDER than the one before it."""
    span = least
    while span < most:
        yield span
        span = min(int(span * WIDER) + 1, most)
    yield most
