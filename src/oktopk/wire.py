"""How pairs travel: one integer message for each block, header first.

    word 0      how many pairs the block holds
    word 1      zero
    word 2, 3   a note: one 62-bit number that rides along (low 31 bits first)
    then        `capacity` indices, int32 while the vector has fewer than 2**31 elements, int64 beyond
    then        `capacity` values: float32, or bfloat16 two in a word

Indices are never floats, so they are exact at any length. What a codec rounds away is `rounding`'s to tell, and the
algorithms give it back to the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.errors import one_of
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
        return HEADER_WORDS + capacity * self.index_words + self.value_words(capacity)

    def encode(self, part: Sparse, capacity: int | None = None, note: int = 0) -> Tensor:
        """Return a new block that holds `part`, with room for `capacity` pairs (default: just enough)."""
        capacity = part.nnz if capacity is None else capacity
        block = torch.zeros(self.words(capacity), dtype=torch.int32, device=part.index.device)
        self.encode_into_(block, part, capacity, note)
        return block

    def encode_into_(self, block: Tensor, part: Sparse, capacity: int, note: int = 0) -> None:
        """Write `part` and `note` into `block`; words beyond the count are left as they are."""
        block[:HEADER_WORDS] = torch.tensor([part.nnz, 0, note & _LOW, note >> 31], dtype=torch.int32)
        indices, values = self._fields(block, capacity)
        indices[: part.nnz] = part.index
        values[: part.nnz] = round_to(part.value, values.dtype)

    def decode(self, block: Tensor, dtype: torch.dtype, capacity: int | None = None) -> tuple[Sparse, int]:
        """Return what `encode` was given: the part, its values as `dtype`, and the note."""
        count, _, low, high = block[:HEADER_WORDS].tolist()
        indices, values = self._fields(block, count if capacity is None else capacity)
        return Sparse(indices[:count].long(), values[:count].to(dtype), self.numel), high << 31 | low

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
        middle = HEADER_WORDS + capacity * self.index_words
        indices = block[HEADER_WORDS:middle]
        values = block[middle : middle + self.value_words(capacity)]
        return (indices if self.index_words == 1 else indices.view(torch.int64)), values.view(value_dtype(self.wire))
