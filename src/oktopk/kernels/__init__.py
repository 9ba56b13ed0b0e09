"""The loops over every element of a gradient, chosen once by device.

`Kernels` says what each means, in plain torch, on any device; the others give the same bits.
"""

from functools import cache

from torch import Tensor

from oktopk.kernels.numpy_cpu import NumpyKernels
from oktopk.kernels.reference import REFERENCE, Kernels

__all__ = ["NUMPY", "REFERENCE", "WORTH_COMPILING", "Kernels", "kernels_for"]

WORTH_COMPILING = 1 << 14
"""Minimum number of elements for numba, because numpy is as fast below and numba takes a second to start."""

NUMPY = NumpyKernels()


def kernels_for(tensor: Tensor) -> Kernels:
    """Return the fastest kernels for a tensor of this size, where it is."""
    if tensor.device.type != "cpu":
        return REFERENCE
    return NUMPY if tensor.numel() < WORTH_COMPILING else _compiled()


@cache
def _compiled() -> Kernels:
    """Return the compiled kernels, if numba is installed."""
    try:
        from oktopk.kernels.numba_cpu import NumbaKernels
    except ImportError:
        return NUMPY
    return NumbaKernels()
