"""How pairs travel: one integer message for each block, header first.

    word 0      how many pairs the block holds
    word 1      how many slots their indices take, where they are packed
    word 2, 3   a note: one 62-bit number that rides along (low 31 bits first)
    then        room for `capacity` indices: int32, or int64 for vectors of 2**31 elements and more; with bfloat16
                values the gaps between them, packed into 8, 12 or 16 bits each, if that is less (see `packing`)
    then        room for `capacity` values: float32, or bfloat16 two in a word

Indices are never floats, so they are exact at any length. What a codec rounds away is `rounding`'s to tell, and the
algorithms give it back to the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.errors import one_of
from oktopk.packing import PLAIN, best_width, pack, packed_words, unpack
from oktopk.sparse import Sparse

HEADER_WORDS = 4
WORD_BYTES = 4
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_LOW = (1 << 31) - 1


def value_dtype(wire: str) -> torch.dtype:
    """Return the dtype that values have on this wire."""
    return WIRES[one_of("wire", wire, WIRES)]


def round_to(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` as `dtype`; what would overflow becomes the largest finite number, the rest stays to be sent."""
    limit = torch.finfo(dtype).max
    if torch.finfo(value.dtype).max <= limit:
        return value.to(dtype)
    return torch.where(value.isinf(), value, value.clamp(-limit, limit)).to(dtype)  # a sum that overflowed must show


@dataclass(frozen=True)
class Codec:
    """Pairs of a vector of `numel` elements as words, and back."""

    numel: int
    wire: str = "fp32"

    @property
    def index_words(self) -> int:
        """Words an index takes."""
        return 1 if self.numel < 1 << 31 else 2

    def value_words(self, capacity: int) -> int:
        """Words that `capacity` values take, padded so that int64 indices of the next block stay aligned."""
        words = capacity if self.wire == "fp32" else (capacity + 1) // 2
        return words + (words % 2 if self.index_words == 2 else 0)

    def words(self, capacity: int) -> int:
        """Words a block of `capacity` pairs takes."""
        return HEADER_WORDS + self._all_index_words(capacity) + self.value_words(capacity)

    def _width(self, capacity: int) -> int:
        """Return the bits of an index's slot; PLAIN where indices are not packed."""
        return best_width(self.numel, capacity) if self.wire != "fp32" and self.index_words == 1 else PLAIN

    def _all_index_words(self, capacity: int) -> int:
        if self.index_words == 2:
            return 2 * capacity
        return packed_words(self.numel, capacity, self._width(capacity)) if self.wire != "fp32" else capacity

    def encode(self, part: Sparse, capacity: int | None = None, note: int = 0) -> Tensor:
        """Return a new block that holds `part`, with room for `capacity` pairs (default: just enough)."""
        capacity = part.nnz if capacity is None else capacity
        block = torch.zeros(self.words(capacity), dtype=torch.int32, device=part.index.device)
        self.encode_into_(block, part, capacity, note)
        return block

    def encode_into_(self, block: Tensor, part: Sparse, capacity: int, note: int = 0) -> None:
        """Write `part` and `note` into `block`; words beyond the count are left as they are."""
        indices, values = self._fields(block, capacity)
        width, slots = self._width(capacity), 0
        if width == PLAIN:
            (indices.view(torch.int64) if self.index_words == 2 else indices)[: part.nnz] = part.index
        elif part.nnz:
            packed, slots = pack(part.index, width)
            indices.view(torch.uint8)[: len(packed)] = packed
        values[: part.nnz] = round_to(part.value, values.dtype)
        block[:HEADER_WORDS] = torch.tensor([part.nnz, slots, note & _LOW, note >> 31], dtype=torch.int32)

    def decode(self, block: Tensor, dtype: torch.dtype, capacity: int | None = None) -> tuple[Sparse, int]:
        """Return what `encode` was given: the part, its values as `dtype`, and the note."""
        count, slots, low, high = block[:HEADER_WORDS].tolist()
        capacity = count if capacity is None else capacity
        indices, values = self._fields(block, capacity)
        width = self._width(capacity)
        if width == PLAIN:
            index = (indices.view(torch.int64) if self.index_words == 2 else indices)[:count].long()
        else:
            index = unpack(indices.view(torch.uint8), slots, width)
        return Sparse(index, values[:count].to(dtype), self.numel), high << 31 | low

    def rounding(self, part: Sparse) -> Sparse | None:
        """Return what sending `part` loses, or None where nothing is lost."""
        target = value_dtype(self.wire)
        if torch.finfo(target).eps <= torch.finfo(part.value.dtype).eps:
            return None
        return Sparse(part.index, part.value - round_to(part.value, target).to(part.value.dtype), part.numel)

    def rounded(self, part: Sparse) -> Sparse:
        """Return `part` as it arrives."""
        return Sparse(part.index, round_to(part.value, value_dtype(self.wire)).to(part.value.dtype), part.numel)

    def _fields(self, block: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        middle = HEADER_WORDS + self._all_index_words(capacity)
        values = block[middle : middle + self.value_words(capacity)]
        return block[HEADER_WORDS:middle], values.view(value_dtype(self.wire))
