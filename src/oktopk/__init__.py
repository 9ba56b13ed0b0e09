"""Sparse allreduce for data-parallel training on PyTorch.

    sparse = oktopk.attach(ddp_model, oktopk.OkTopk())

    reducer = oktopk.Reducer(oktopk.OkTopk(), oktopk.ProcessGroupComm())
    mean = reducer.all_reduce(grad)

See `attach`, `Reducer`, the algorithms (`OkTopk` first), and `run_local` for trying them without processes.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oktopk.api import *  # noqa: F403
    from oktopk.api import __all__ as __all__


def __getattr__(name: str) -> Any:
    """Import the public names on first use: torch takes seconds, and `oktopk --version` needs none of it."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    import oktopk.api

    if name in globals():  # a subpackage, which that import brought
        return globals()[name]
    return getattr(oktopk.api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
