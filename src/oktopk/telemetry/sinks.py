"""Sinks: places to which step records go, on a thread of their own that cannot hold training up."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from oktopk.telemetry.schema import AnyRecord, StepRecord, scalars_of, to_json

SINK_PATIENCE_S = 30.0
"""Seconds that a sink may take for one record, because a slow disk answers in that time and a dead server does not."""

GRACE_S = 1.0
"""Seconds more for a sink that seems to hang, because the whole process may have been stopped and goes on now."""

BACKLOG = 1024
"""Calls of sinks that may wait, because they hold some 10 MB of records. Training waits for the sinks beyond that."""

_log = logging.getLogger("oktopk")


class Sink(Protocol):
    """A place to which records go.

    A sink that has a method `log(record)` also gets the records that are not of a step, as mappings: the settings
    ("run"), what a script logs ("log"), and what happened ("event").
    """

    def write(self, record: StepRecord) -> None:
        """Take one record."""

    def close(self) -> None:
        """Take no more."""
        return


class MemorySink(Sink):
    """Keeps the records in a list."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        """Append the record to `records`."""
        self.records.append(record)


class CallbackSink(Sink):
    """Hands the records to a function."""

    def __init__(self, callback: Callable[[StepRecord], object]) -> None:
        self._callback = callback

    def write(self, record: StepRecord) -> None:
        """Call the function."""
        self._callback(record)


class JsonlSink(Sink):
    """Appends one JSON line a record, flushed every step: a killed job's file is whole up to its last line.

    Every rank that attaches with one writes, so that each rank needs a `path` of its own.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, record: AnyRecord) -> None:
        """Append the record; a NaN in it is a ValueError."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    log = write

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink(Sink):
    """Writes the figures of each step as TensorBoard scalars. Needs `pip install oktopk[train]`.

    directory     the folder of the event files
    prefix        the beginning of every tag; the catalogue of figures has the rest
    purge_step    step from which on TensorBoard forgets what an earlier sink wrote to the same folder
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, prefix: str = "oktopk/", purge_step: int | None = None
    ) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardSink needs TensorBoard: pip install 'oktopk[train]'") from error
        self._prefix = prefix
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, record: AnyRecord) -> None:
        """Write the scalars of a step or an epoch; other records have none."""
        if not isinstance(record, Mapping):
            for tag, value in scalars_of(record).items():
                self._writer.add_scalar(self._prefix + tag, value, record.step)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write what a script logged."""
        for name, value in record.get("figures", {}).items():
            if value is not None:
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Sinks:
    """Several sinks, none of which can break training or hold it up: a thread of their own writes to them, in order.

    A sink that fails, or takes longer than `patience_s` for a record, is reported once and dropped.
    """

    def __init__(
        self, sinks: Sequence[Sink | Callable[[StepRecord], object]], patience_s: float = SINK_PATIENCE_S
    ) -> None:
        self._sinks: list[Any] = [sink if hasattr(sink, "write") else CallbackSink(sink) for sink in sinks]
        self._patience_s = patience_s
        self._changed = threading.Condition()  # guards all below
        self._due: deque[tuple[Sink, Callable[[], None]]] = deque()
        self._at: tuple[Sink, float] | None = None  # the one that is being called, since when
        self._thread: threading.Thread | None = None
        self._start()

    def write(self, record: StepRecord) -> None:
        """Hand the record to every sink, soon; wait only for those that are far behind."""
        self._hand(record, "write")

    def log(self, record: Mapping[str, Any]) -> None:
        """Hand a record that is not of a step to every sink that takes such records."""
        self._hand(record, "log")

    def _hand(self, record: AnyRecord, method: str) -> None:
        with self._changed:
            at = self._at
            if at is not None and time.monotonic() - at[1] > self._patience_s:
                self._wait_for(lambda: self._at is not at, GRACE_S)
            self._wait_for(lambda: len(self._due) < BACKLOG, self._patience_s)
            takers = [(sink, getattr(sink, method, None)) for sink in self._sinks]
            self._due.extend((sink, partial(take, record)) for sink, take in takers if take is not None)
            self._changed.notify_all()

    def close(self) -> None:
        """Close every sink, after its last record; wait for none longer than the patience."""
        with self._changed:
            self._due.extend((sink, sink.close) for sink in self._sinks)
            self._changed.notify_all()
            self._wait_for(lambda: not self._due and self._at is None, self._patience_s)
            thread, self._thread = self._thread, None
            self._sinks.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(self._patience_s)

    def _start(self) -> None:
        """Start a thread that makes the calls, if there is a sink to call."""
        self._thread = threading.Thread(target=self._run, name="oktopk sinks", daemon=True) if self._sinks else None
        if self._thread is not None:
            self._thread.start()

    def _wait_for(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait; each time that takes too long, drop the sink that is being called."""
        while not self._changed.wait_for(ready, seconds) and self._at is not None:
            (sink, _), self._at = self._at, None
            self._drop(sink)
            _log.warning("sink %s hangs, and gets no more records: it took over %g s", _name_of(sink), self._patience_s)
            try:
                self._start()  # another thread: this one may never come back
            except RuntimeError as error:  # Python is ending, and starts no more threads
                _log.warning("the last records did not reach %s: %r", [_name_of(each) for each in self._sinks], error)
                self._due.clear()

    def _drop(self, sink: Sink) -> None:
        self._sinks.remove(sink)
        self._due = deque(each for each in self._due if each[0] is not sink)

    def _run(self) -> None:
        """Make the calls, until another thread makes them or there are no more sinks."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._is_given_up())
                if self._is_given_up():
                    return
                sink, call = self._due.popleft()
                self._at = sink, time.monotonic()
            error: Exception | None = None
            try:
                call()
            except Exception as raised:  # of a user's sink: training goes on without it
                error = raised
            with self._changed:
                if self._is_given_up():
                    return
                self._at = None
                if error is not None:
                    self._drop(sink)
                    _log.warning("sink %s failed, and gets no more records: %r", _name_of(sink), error)
                self._changed.notify_all()

    def _is_given_up(self) -> bool:
        return self._thread is not threading.current_thread()


def _name_of(sink: Sink) -> str:
    return f"{sink._callback!r}" if isinstance(sink, CallbackSink) else type(sink).__name__
