"""Step records, their sinks, and their summary."""

from oktopk.telemetry.record import record_of, total_of
from oktopk.telemetry.schema import PHASES, StepRecord
from oktopk.telemetry.sinks import (
    SINK_PATIENCE_S,
    CallbackSink,
    JsonlSink,
    MemorySink,
    Sink,
    Sinks,
    TensorBoardSink,
)
from oktopk.telemetry.summary import Summary

__all__ = [
    "PHASES",
    "SINK_PATIENCE_S",
    "CallbackSink",
    "JsonlSink",
    "MemorySink",
    "Sink",
    "Sinks",
    "StepRecord",
    "Summary",
    "TensorBoardSink",
    "record_of",
    "total_of",
]
