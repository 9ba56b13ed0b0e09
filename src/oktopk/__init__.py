"""Sparse allreduce for data-parallel training on PyTorch.

    reducer = oktopk.Reducer(oktopk.OkTopk(), oktopk.ProcessGroupComm())
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
    OkTopkPaper,
    Reduced,
    TopkA,
    TopkDSA,
    make_algorithm,
)
from oktopk.comm import Comm, MeteredComm, ProcessGroupComm, Traffic, run_local
from oktopk.ddp.attach import Attached, attach, small_or_vector
from oktopk.ddp.checkpoint import load_distributed, save_distributed
from oktopk.errors import (
    InputError,
    MalformedError,
    MismatchError,
    NonFiniteError,
    OktopkError,
    PeerError,
    SettingError,
    StateError,
)
from oktopk.reducer import Reducer
from oktopk.sparse import Sparse
from oktopk.telemetry import CallbackSink, JsonlSink, MemorySink, StepRecord, Summary, TensorBoardSink

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Attached",
    "CallbackSink",
    "Comm",
    "Dense",
    "GTopk",
    "GaussianK",
    "InputError",
    "JsonlSink",
    "MalformedError",
    "MemorySink",
    "MeteredComm",
    "MismatchError",
    "NonFiniteError",
    "OkTopk",
    "OkTopkPaper",
    "OktopkError",
    "PeerError",
    "ProcessGroupComm",
    "Reduced",
    "Reducer",
    "SettingError",
    "Sparse",
    "StateError",
    "StepRecord",
    "Summary",
    "TensorBoardSink",
    "TopkA",
    "TopkDSA",
    "Traffic",
    "attach",
    "load_distributed",
    "make_algorithm",
    "run_local",
    "save_distributed",
    "small_or_vector",
]
