"""Sparse allreduce for data-parallel training on PyTorch.

    reducer = oktopk.Reducer(oktopk.OkTopk(density=0.01), oktopk.ProcessGroupComm())
    mean = reducer.all_reduce(grad)

See `Reducer`, the algorithms (`OkTopk` first), and `run_local` for trying them without processes.
"""

from oktopk.algorithms import (
    ALGORITHMS,
    Algorithm,
    Dense,
    GaussianK,
    GTopk,
    OkTopk,
    Reduced,
    TopkA,
    TopkDSA,
    make_algorithm,
)
from oktopk.comm import Comm, Metered, ProcessGroupComm, Traffic, run_local
from oktopk.errors import (
    InputError,
    MismatchError,
    NonFiniteError,
    OktopkError,
    PeerError,
    SettingError,
    StateError,
)
from oktopk.reducer import Reducer
from oktopk.sparse import Sparse
from oktopk.telemetry import StepRecord

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Comm",
    "Dense",
    "GTopk",
    "GaussianK",
    "InputError",
    "Metered",
    "MismatchError",
    "NonFiniteError",
    "OkTopk",
    "OktopkError",
    "PeerError",
    "ProcessGroupComm",
    "Reduced",
    "Reducer",
    "SettingError",
    "Sparse",
    "StateError",
    "StepRecord",
    "TopkA",
    "TopkDSA",
    "Traffic",
    "make_algorithm",
    "run_local",
]
