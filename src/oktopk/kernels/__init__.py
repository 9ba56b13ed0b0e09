"""The loops over every element of a gradient, chosen once by device.

`reference` says what each kernel means, in plain torch, on any device; the others must give the same bits.
"""

from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

from torch import Tensor

from oktopk.kernels import numpy_cpu, reference
from oktopk.kernels.reference import Ends, Floors

WORTH_COMPILING = 1 << 14
"""Minimum number of elements for numba, because numpy is as fast below and numba takes a second to start."""


class Kernels(Protocol):
    """The functions of a kernel module."""

    NAME: str

    def accumulate(self, grad: Tensor, held: Tensor, out: Tensor, scale: float = 1.0, decay: float = 1.0) -> int:
        """Write decay * held + scale * grad into `out`; return the index of its first NaN or Inf, or -1."""

    def accumulate_above(
        self, grad: Tensor, held: Tensor, out: Tensor, bounds: Ends, floors: Floors
    ) -> tuple[int, Tensor, Tensor]:
        """Write held + grad into `out`; return as `accumulate`, and the indices and values where |out| >= the floor.

        Segment s is out[bounds[s]:bounds[s + 1]] and has its own floor; there may be tens of thousands.
        """

    def at_least(self, acc: Tensor, bounds: Ends, thresholds: Floors) -> Tensor:
        """Return the sorted indices where |acc| >= the threshold of its segment.

        A zero is never among them: a threshold below the smallest positive number means that one.
        """

    def mean_squares(self, acc: Tensor, held: Tensor, bounds: Ends) -> Tensor:
        """Return the mean of (acc - held)**2 over each segment, in float64 on the CPU, 0 for an empty one."""

    def kth_largest(self, score: Tensor, k: int) -> float:
        """Return the k-th largest of the scores, which are not negative; 1 <= k <= len(score)."""

    def is_increasing(self, index: Tensor) -> bool:
        """Whether every index is larger than the one before it."""

    def merge(self, index: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of sparse vectors, added in their order: sorted indices, and their values."""

    def shared(self, held: Tensor, index: Tensor) -> Tensor:
        """Return the places in `index` of the indices that `held` has, too; both are sorted."""

    def spread(self, index: Tensor, value: Tensor, out: Tensor) -> None:
        """Make `out` the vector that has `value` at `index`, which is sorted, and zeros elsewhere."""

    def pack(self, index: Tensor, width: int) -> tuple[Tensor, int]:
        """Return the gaps between sorted indices in slots of 8, 12 or 16 bits, as bytes, and the number of slots.

        A slot of all ones, the marker, adds its value to the gap of the next slot.
        """

    def unpack(self, packed: Tensor, num_slots: int, width: int) -> Tensor:
        """Return the indices that were packed into `num_slots` slots."""


def kernels_for(tensor: Tensor) -> Kernels:
    """Return the fastest kernels for a tensor of this size, where it is."""
    if tensor.device.type != "cpu":
        return reference
    return numpy_cpu if tensor.numel() < WORTH_COMPILING else _compiled()


@cache
def _compiled() -> Kernels:
    """Return the compiled kernels, if numba is installed."""
    try:
        from oktopk.kernels import numba_cpu
    except ImportError:
        return numpy_cpu
    return cast(Kernels, numba_cpu)
