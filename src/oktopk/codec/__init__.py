"""The layout of a block of pairs: one int32 message, header first.

    word 0      the number of pairs
    word 1      the low bits of an index, where indices are packed, or 0
    word 2, 3   a note: one 62-bit number that rides along (low 31 bits first)
    then        capacity for the indices: int32, or int64 for vectors of 2**31 elements and more; on the narrower wires
                packed, where that is less: low bits, then the bit vector of their high parts (see `indices`)
    then        capacity for the values, as wide as the wire makes them (see `values`)

Indices are never floats, so they are exact at any length. `encode` returns the rounding error of the values with the
block, and the algorithms give it back to the residual.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oktopk.codec import values
from oktopk.codec.indices import PLAIN, best_low_bits, field_words
from oktopk.codec.values import num_words
from oktopk.errors import MalformedError
from oktopk.kernels import kernels_for
from oktopk.sparse import Sparse
from oktopk.words import HEADER_WORDS

_LOW = (1 << 31) - 1


class Layout(NamedTuple):
    """The places of the fields in a packed block of `capacity` pairs, in words; the indices begin behind the header."""

    capacity: int
    low_bits: int
    highs_at: int
    scales_at: int
    steps_at: int


@dataclass(frozen=True)
class Codec:
    """Encodes pairs of a vector of `numel` elements as words, and decodes them.

    The indices of a block lie within `span` elements from its `start` on (default: anywhere in the vector). Sender and
    receiver know both, and a shorter span makes a smaller block.
    """

    numel: int
    wire: str = "fp32"
    span: int | None = None

    @property
    def index_words(self) -> int:
        """Words of an index."""
        return 1 if self.numel < 1 << 31 else 2

    def value_words(self, capacity: int) -> int:
        """Return the words of `capacity` values, padded so that int64 indices of the next block stay aligned."""
        words = num_words(self.wire, capacity)
        return words + (words % 2 if self.index_words == 2 else 0)

    def words(self, capacity: int) -> int:
        """Return the words of a block of `capacity` pairs."""
        return HEADER_WORDS + sum(self._index_fields(capacity)) + self.value_words(capacity)

    def layout(self, capacity: int) -> Layout:
        """Return the places of the fields in a block of `capacity` pairs."""
        lows, *highs = self._index_fields(capacity)
        scales_at = HEADER_WORDS + lows + sum(highs)
        return Layout(
            capacity, self._low_bits(capacity), HEADER_WORDS + lows, scales_at,
            scales_at + values.num_scales(self.wire, capacity),
        )  # fmt: skip

    def _low_bits(self, capacity: int) -> int:
        """Return the low bits of an index; PLAIN where indices are not packed."""
        return best_low_bits(self._span, capacity) if self.wire != "fp32" and self.index_words == 1 else PLAIN

    @property
    def _span(self) -> int:
        return self.numel if self.span is None else self.span

    def _index_fields(self, capacity: int) -> tuple[int, ...]:
        """Return the words of the fields of the indices: plain ones, or low bits and bit vector."""
        low_bits = self._low_bits(capacity)
        return (self.index_words * capacity,) if low_bits == PLAIN else field_words(self._span, capacity, low_bits)

    def encode(
        self, part: Sparse, capacity: int | None = None, note: int = 0, start: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return a new block with `part` and capacity for `capacity` pairs (default: its own), and the rounding error.

        The error has one element for each value of `part`. It is None where the wire is exact.
        """
        capacity = part.nnz if capacity is None else capacity
        block = torch.zeros(self.words(capacity), dtype=torch.int32, device=part.index.device)
        return block, self.encode_into_(block, part, capacity, note, start)

    def encode_into_(self, block: Tensor, part: Sparse, capacity: int, note: int = 0, start: int = 0) -> Tensor | None:
        """Write `part` and `note` into `block`, which is zero; return the rounding error as `encode` does."""
        *indices, rest = self._fields(block, capacity)
        low_bits = self._low_bits(capacity)
        if low_bits == PLAIN:
            (indices[0].view(torch.int64) if self.index_words == 2 else indices[0])[: part.nnz] = part.index
        elif part.nnz:
            kernels_for(part.index).pack_(part.index, start, low_bits, *indices)
        block[:HEADER_WORDS] = torch.tensor([part.nnz, low_bits, note & _LOW, note >> 31], dtype=torch.int32)
        return values.write_(self.wire, rest, part.value)

    def decode(
        self,
        block: Tensor,
        dtype: torch.dtype,
        capacity: int | None = None,
        *,
        source: int | None = None,
        start: int = 0,
        between: tuple[int, int] | None = None,
        sums: bool = False,
    ) -> tuple[Sparse, int]:
        """Return the part that was encoded, its values as `dtype`, and the note.

        A malformed block raises a `MalformedError` that names its `source`, before anything of it is used. Indices must
        lie in the region `between` two cuts (default: anywhere). Infinite values are refused, except among `sums`,
        which may have overflowed.
        """
        try:
            count, low_bits, note = self._header(block, capacity)
            *indices, rest = self._fields(block, count if capacity is None else capacity)
            if low_bits == PLAIN:
                index = (indices[0].view(torch.int64) if self.index_words == 2 else indices[0])[:count].long()
            else:
                index = kernels_for(block).unpack(indices[0], indices[1], start, low_bits, count)
            value = values.read(self.wire, rest, count, dtype)
            squares = float(value.dot(value))  # NaN if a value is; finite only if all are
            if math.isnan(squares) or not (sums or math.isfinite(squares) or bool(value.isfinite().all())):
                raise MalformedError(f"a value is NaN{'' if sums else ' or infinite'}")
            part = Sparse(index, value, self.numel)
            if count and between is not None and not between[0] <= int(index[0]) <= int(index[-1]) < between[1]:
                raise MalformedError(f"indices {int(index[0])}..{int(index[-1])} leave {between[0]}..{between[1] - 1}")
        except MalformedError as error:
            raise error if source is None else MalformedError(str(error), source) from None
        return part, note

    def _header(self, block: Tensor, capacity: int | None) -> tuple[int, int, int]:
        """Return count, low bits and note of a block, checked against each other and against its length."""
        if block.dtype != torch.int32 or len(block) < HEADER_WORDS:
            raise MalformedError(f"a block is {HEADER_WORDS} words of int32 or more, not {len(block)} of {block.dtype}")
        count, low_bits, low, high = block[:HEADER_WORDS].tolist()
        most = self.numel if capacity is None else min(capacity, self.numel)
        if not 0 <= count <= most:
            raise MalformedError(f"the header says {count} pairs, where there can be 0 to {most}")
        capacity = count if capacity is None else capacity
        if len(block) != self.words(capacity):
            raise MalformedError(f"a block of {count} pairs has {self.words(capacity)} words here, not {len(block)}")
        if low_bits != self._low_bits(capacity):
            raise MalformedError(f"the header says {low_bits} low bits an index, and here {self._low_bits(capacity)}")
        if low < 0 or high < 0:
            raise MalformedError(f"a note is a number of 62 bits, not of the words {low} and {high}")
        return count, low_bits, high << 31 | low

    def round(self, part: Sparse) -> tuple[Sparse, Tensor | None]:
        """Return `part` as it arrives, and the rounding error as `encode` returns it."""
        value = values.rounded(self.wire, part.value)
        error = None if values.is_exact(self.wire, value.dtype) else part.value - value
        return Sparse(part.index, value, part.numel), error

    def _fields(self, block: Tensor, capacity: int) -> tuple[Tensor, ...]:
        """Return the words of the indices, in one field or two, and those of the values."""
        sizes = [*self._index_fields(capacity), num_words(self.wire, capacity)]
        return torch.split(block[HEADER_WORDS : HEADER_WORDS + sum(sizes)], sizes)


def join_errors(errors: Iterable[Tensor | None]) -> Tensor | None:
    """Return the rounding errors of several blocks as one; None where the wire is exact."""
    rounded = [error for error in errors if error is not None]
    return torch.cat(rounded) if rounded else None


def leftover(part: Sparse, error: Tensor | None) -> tuple[Sparse, ...]:
    """Return the rounding error of `part` as the parts that go back into the residual: one, or none."""
    return () if error is None else (Sparse(part.index, error, part.numel),)
