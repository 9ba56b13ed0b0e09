"""The public names. `oktopk` itself imports this module when one of them is first used."""

from oktopk.algorithms import ALGORITHMS, Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA, make_algorithm
from oktopk.algorithms.base import Algorithm, Reduced
from oktopk.comm import Comm, MeteredComm, ProcessGroupComm, Traffic, run_local
from oktopk.ddp.attach import Attached, attach
from oktopk.ddp.checkpoint import load_distributed, save_distributed
from oktopk.ddp.exclude import small_or_vector
from oktopk.ddp.local import LocalSteps
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
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.sinks import CallbackSink, JsonlSink, MemorySink, TensorBoardSink
from oktopk.telemetry.summary import Summary

__all__ = [
    "ALGORITHMS", "Algorithm", "Attached", "CallbackSink", "Comm", "Dense", "GTopk", "GaussianK", "InputError",
    "JsonlSink", "LocalSteps", "MalformedError", "MemorySink", "MeteredComm", "MismatchError", "NonFiniteError",
    "OkTopk", "OkTopkPaper", "OktopkError", "PeerError", "ProcessGroupComm", "Reduced", "Reducer", "SettingError",
    "Sparse", "StateError", "StepRecord", "Summary", "TensorBoardSink", "TopkA", "TopkDSA", "Traffic", "attach",
    "load_distributed", "make_algorithm", "run_local", "save_distributed", "small_or_vector",
]  # fmt: skip
