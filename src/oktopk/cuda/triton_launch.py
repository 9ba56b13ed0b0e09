"""`kernel`: triton's kernels with a short launch."""

# mypy: ignore-errors
# triton's language is not Python's, and mypy knows nothing of it.

import triton
from torch import Tensor


def kernel(*numbers: str):
    """Compile the function that follows; `numbers` are its arguments that are neither tensors nor constants."""
    return lambda fn: Kernel(fn, numbers)


class Kernel:
    """A kernel that is launched in a few microseconds, where triton takes several times as long to look it up.

    `numbers` names the arguments that are neither tensors nor constants: triton compiles one kernel for all of them.
    """

    def __init__(self, fn, numbers):
        self.jit = triton.jit(fn, do_not_specialize=numbers)
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        self._is_number = [name in numbers for name in names]
        self._compiled = {}

    def __call__(self, grid, *args):
        """Launch it with this grid, and compile it before if it has not run with such arguments."""
        key = (args[0].get_device(), *map(_kind, args, self._is_number))
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self.jit[grid](*args)
        else:
            compiled[(*grid, 1, 1)[:3]](*args)


def _kind(arg, is_number):
    """Return the property of an argument for which triton compiles another kernel."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    return -(2**31) <= arg < 2**31 if is_number and isinstance(arg, int) else is_number or arg
