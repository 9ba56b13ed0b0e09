"""`StepRecord`: what one step did, measured; the sinks it flows to; and the summary of many."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from oktopk.algorithms.base import Outcome
from oktopk.comm import Traffic
from oktopk.select import num_selected
from oktopk.wire import WORD_BYTES

PAIR_BYTES = 2 * WORD_BYTES

PHASES = ("accumulate", "select", "pack", "exchange", "reduce", "gather", "apply", "agree", "side")
"""Of the built-in algorithms, in the order in which a step goes through them; "side" is what travels dense."""

SINK_PATIENCE_S = 30.0
"""Seconds that a sink may take for one record: a slow disk does, a server that does not answer is given up."""

GRACE_S = 1.0
"""Seconds more for a sink that seems to hang: it may be the whole process that was stopped, and goes on."""

BACKLOG = 1024
"""Calls of sinks that may wait: some 10 MB of records. Beyond that training waits for the sinks."""

_log = logging.getLogger("oktopk")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank. What could not be measured is None, never NaN; `docs/accounting.md` defines every figure.

    step                 from 0, skipped steps included
    phase                "dense" or "sparse"
    numel                elements of the gradient
    wanted               k: elements that a sparse step is asked for; numel for a dense step
    selected             elements that this rank chose to send
    nnz                  elements of the result
    sparsity             1 - nnz / numel; 0.0 for a dense step
    compression_ratio    numel / nnz; 1.0 for a dense step; None if nothing was delivered
    nominal_bytes        nnz * 8 (int32 index + float32 value); numel * 4 for a dense step
    sent_bytes           measured: what this rank handed to the network for other ranks
    received_bytes       measured: what came from other ranks
    messages             measured: messages this rank sent
    seconds              measured: by phase of the algorithm
    sent_by_phase        measured: bytes sent, by phase of the algorithm
    collectives          measured: calls, bytes and message sizes, by "phase/collective"
    world_size           P
    side_numel           elements that travelled dense beside the sparse ones; numel for a dense step
    nnz_by_owner         elements of the result in each rank's region, as the regions are cut after the step; empty if
                         there are none
    threshold            the local threshold of this step, as a score; None if there was none
    global_threshold     the smallest score that was delivered, or the threshold for it; None if there was none
    skipped              the step was refused (non-finite) and nothing was delivered
    reason               why it was: which rank, which parameter; None if it was not
    wait_seconds         measured: how long backward waited for the exchange, after its own work was done; None for a
                         `Reducer`, whose caller waits for all of it
    buckets              the same for each group of parameters that was reduced together; empty for a `Reducer`
    """

    step: int
    phase: str
    numel: int
    wanted: int
    selected: int
    nnz: int
    sparsity: float
    compression_ratio: float | None
    nominal_bytes: int
    sent_bytes: int
    received_bytes: int
    messages: int
    seconds: dict[str, float] = field(default_factory=dict)
    sent_by_phase: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, dict[str, Any]] = field(default_factory=dict)
    world_size: int | None = None
    side_numel: int | None = None
    nnz_by_owner: tuple[int, ...] = ()
    threshold: float | None = None
    global_threshold: float | None = None
    skipped: bool = False
    reason: str | None = None
    wait_seconds: float | None = None
    buckets: tuple[StepRecord, ...] = ()

    def to_json(self) -> str:
        """Return the record as one line."""
        return json.dumps(asdict(self), allow_nan=False)


def sparsity_of(nnz: int, numel: int) -> float:
    """Return 1 - nnz / numel; an empty gradient is not sparse."""
    return 1.0 - nnz / numel if numel else 0.0


def ratio_of(nnz: int, numel: int) -> float | None:
    """Return numel / nnz; None where nothing was delivered, since there is no such number."""
    if not numel:
        return 1.0
    return numel / nnz if nnz else None


def record_of(
    outcome: Outcome, traffic: Traffic, *, step: int, phase: str, numel: int, side: int, density: float, size: int
) -> StepRecord:
    """Return the record of a reduction of `numel` elements, the last `side` of which travelled dense."""
    pairs = outcome.pairs or 0
    nnz = numel if outcome.pairs is None else side + pairs
    return StepRecord(
        step=step,
        phase=phase,
        numel=numel,
        wanted=side + num_selected(numel - side, density),
        selected=side + outcome.selected,
        nnz=nnz,
        sparsity=sparsity_of(nnz, numel),
        compression_ratio=ratio_of(nnz, numel),
        nominal_bytes=pairs * PAIR_BYTES + (nnz - pairs) * WORD_BYTES,
        sent_bytes=traffic.sent_bytes,
        received_bytes=traffic.received_bytes,
        messages=traffic.messages,
        seconds=dict(traffic.phase_seconds),
        sent_by_phase=traffic.sent_by_phase,
        collectives=traffic.by_collective,
        world_size=size,
        side_numel=numel if phase == "dense" else side,
        nnz_by_owner=outcome.owners,
        threshold=outcome.threshold,
        global_threshold=outcome.global_threshold,
    )


def total_of(parts: Sequence[StepRecord], *, step: int, phase: str) -> StepRecord:
    """Return the record of a step made of several reductions."""
    numel, nnz = sum(part.numel for part in parts), sum(part.nnz for part in parts)
    seconds: defaultdict[str, float] = defaultdict(float)
    sent: Counter[str] = Counter()
    for part in parts:
        sent.update(part.sent_by_phase)
        for name, spent in part.seconds.items():
            seconds[name] += spent
    return StepRecord(
        step=step,
        phase=phase,
        numel=numel,
        wanted=sum(part.wanted for part in parts),
        selected=sum(part.selected for part in parts),
        nnz=nnz,
        sparsity=sparsity_of(nnz, numel),
        compression_ratio=ratio_of(nnz, numel),
        nominal_bytes=sum(part.nominal_bytes for part in parts),
        sent_bytes=sum(part.sent_bytes for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        messages=sum(part.messages for part in parts),
        seconds=dict(seconds),
        sent_by_phase=dict(sent),
        collectives=_all_collectives(part.collectives for part in parts),
        world_size=parts[0].world_size if parts else None,
        side_numel=_total([part.side_numel for part in parts]),
        nnz_by_owner=tuple(map(sum, zip_longest(*(part.nnz_by_owner for part in parts), fillvalue=0))),
        threshold=_mean([part.threshold for part in parts]),
        global_threshold=_mean([part.global_threshold for part in parts]),
        buckets=tuple(parts),
    )


def _all_collectives(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the collectives of several reductions together."""
    together: dict[str, dict[str, Any]] = {}
    for name, made in (item for part in parts for item in part.items()):
        known = together.setdefault(name, {"calls": 0, "sent_bytes": 0, "received_bytes": 0, "sizes": []})
        for count in ("calls", "sent_bytes", "received_bytes"):
            known[count] += made[count]
        sizes = Counter(dict(known["sizes"]))
        sizes.update(dict(made["sizes"]))
        known["sizes"] = [[size, count] for size, count in sorted(sizes.items())]
    return together


class Sink(Protocol):
    """Where records go."""

    def write(self, record: StepRecord) -> None:
        """Take one record."""

    def close(self) -> None:
        """Take no more."""


class MemorySink:
    """Keeps the records in a list."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        self.records.append(record)

    def close(self) -> None:
        """See `Sink`."""


class CallbackSink:
    """Hands the records to a function."""

    def __init__(self, callback: Callable[[StepRecord], object]) -> None:
        self._callback = callback

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        self._callback(record)

    def close(self) -> None:
        """See `Sink`."""


class JsonlSink:
    """Appends one JSON line a record, flushed every step: a killed job's file is whole up to its last line."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Sink`."""
        self._file.close()


class TensorBoardSink:
    """Writes the figures of each step as TensorBoard scalars. Needs `pip install oktopk[train]`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardSink needs TensorBoard: pip install 'oktopk[train]'") from error
        self._writer: Any = SummaryWriter(str(directory))

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        for name in ("sparsity", "compression_ratio", "selected", "nnz", "sent_bytes", "received_bytes", "threshold"):
            value = getattr(record, name)
            if value is not None:
                self._writer.add_scalar(f"oktopk/{name}", value, record.step)
        for phase, seconds in record.seconds.items():
            self._writer.add_scalar(f"oktopk/seconds/{phase}", seconds, record.step)

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


class Sinks:
    """Several sinks, none of which can break training or hold it up: a thread of their own writes to them, in order.

    One that fails, or takes longer than `patience_s` for a record, is reported once and dropped.
    """

    def __init__(
        self, sinks: Sequence[Sink | Callable[[StepRecord], object]], patience_s: float = SINK_PATIENCE_S
    ) -> None:
        self._sinks: list[Sink] = [_as_sink(sink) for sink in sinks]
        self._patience_s = patience_s
        self._changed = threading.Condition()  # guards all below
        self._due: deque[tuple[Sink, Callable[[], None]]] = deque()
        self._at: Sink | None = None  # the one that is being called, since when
        self._since_s = 0.0
        self._thread: threading.Thread | None = None
        self._start()

    def write(self, record: StepRecord) -> None:
        """Hand the record to every sink, soon; wait only for those that are far behind."""
        with self._changed:
            if self._at is not None and time.monotonic() - self._since_s > self._patience_s:
                self._wait_for(self._is_elsewhere_than(self._at), GRACE_S)
            self._wait_for(lambda: len(self._due) < BACKLOG, self._patience_s)
            self._call_all([(sink, partial(sink.write, record)) for sink in self._sinks])

    def close(self) -> None:
        """Close every sink, after its last record; wait for none longer than the patience."""
        with self._changed:
            self._call_all([(sink, sink.close) for sink in self._sinks])
            self._wait_for(lambda: not self._due and self._at is None, self._patience_s)
            thread, self._thread = self._thread, None
            self._sinks.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(self._patience_s)

    def _call_all(self, calls: Sequence[tuple[Sink, Callable[[], None]]]) -> None:
        self._due.extend(calls)
        self._changed.notify_all()

    def _start(self) -> None:
        """Start a thread that makes the calls, if there is a sink to call."""
        self._thread = threading.Thread(target=self._run, name="oktopk sinks", daemon=True) if self._sinks else None
        if self._thread is not None:
            self._thread.start()

    def _wait_for(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait; as often as that takes too long, drop the sink that is being called."""
        while not self._changed.wait_for(ready, seconds) and self._at is not None:
            sink, self._at = self._at, None
            self._drop(sink)
            _log.warning("sink %s hangs, and gets no more records: it took over %g s", _name_of(sink), self._patience_s)
            try:
                self._start()  # another thread: this one may never come back
            except RuntimeError as error:  # Python is ending, and starts no more threads
                _log.warning("the last records did not reach %s: %r", [_name_of(each) for each in self._sinks], error)
                self._due.clear()

    def _is_elsewhere_than(self, sink: Sink) -> Callable[[], bool]:
        since_s = self._since_s
        return lambda: self._at is not sink or self._since_s != since_s

    def _drop(self, sink: Sink) -> None:
        self._sinks.remove(sink)
        self._due = deque(each for each in self._due if each[0] is not sink)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            sink, write = call
            error: Exception | None = None
            try:
                write()
            except Exception as raised:  # whatever a user's sink raises, training goes on without it
                error = raised
            self._is_over(sink, error)

    def _next(self) -> tuple[Sink, Callable[[], None]] | None:
        """Wait for the next call; None when this thread is not to make any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._is_given_up())
            if self._is_given_up():
                return None
            call = self._due.popleft()
            self._at, self._since_s = call[0], time.monotonic()
            return call

    def _is_over(self, sink: Sink, error: Exception | None) -> None:
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


def _as_sink(sink: Sink | Callable[[StepRecord], object]) -> Sink:
    return sink if hasattr(sink, "write") else CallbackSink(sink)  # type: ignore[return-value]


@dataclass
class PhaseSummary:
    """The steps of one phase. A mean over nothing is None, and shown as n/a."""

    steps: int = 0
    skipped: int = 0
    numel: int = 0
    nnz: int = 0
    wanted: int = 0
    selected: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add_(self, record: StepRecord) -> None:
        """Count a step; one that was skipped delivered nothing, and is in no mean."""
        self.steps += 1
        self.sent_bytes += record.sent_bytes
        self.received_bytes += record.received_bytes
        for name, spent in record.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        if record.skipped:
            self.skipped += 1
            return
        self.numel += record.numel
        self.nnz += record.nnz
        self.wanted += record.wanted
        self.selected += record.selected

    @property
    def sparsity(self) -> float | None:
        """1 - nnz / numel over all steps."""
        return sparsity_of(self.nnz, self.numel) if self.numel else None

    @property
    def compression_ratio(self) -> float | None:
        """numel / nnz over all steps."""
        return ratio_of(self.nnz, self.numel) if self.numel else None

    @property
    def selected_per_wanted(self) -> float | None:
        """selected / k over all steps."""
        return self.selected / self.wanted if self.wanted else None


@dataclass
class Summary:
    """All steps so far, by phase. `print(summary)` shows it."""

    dense: PhaseSummary = field(default_factory=PhaseSummary)
    sparse: PhaseSummary = field(default_factory=PhaseSummary)

    def add_(self, record: StepRecord) -> None:
        """Count a step."""
        (self.dense if record.phase == "dense" else self.sparse).add_(record)

    @property
    def steps(self) -> int:
        """All steps."""
        return self.dense.steps + self.sparse.steps

    @property
    def nonfinite(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return self.dense.skipped + self.sparse.skipped

    def __str__(self) -> str:
        names = ("steps", "sparsity", "compression_ratio", "selected_per_wanted", "sent_bytes", "received_bytes")
        rows = [(name, getattr(self.dense, name), getattr(self.sparse, name)) for name in names]
        for name in sorted({*self.dense.seconds, *self.sparse.seconds}):
            rows.append((f"seconds in {name}", self.dense.seconds.get(name), self.sparse.seconds.get(name)))
        lines = [f"{'':24}{'dense':>16}{'sparse':>16}"]
        lines += [f"{name:24}{_shown(dense):>16}{_shown(sparse):>16}" for name, dense, sparse in rows]
        lines.append(f"compression was active on {self.sparse.steps} of {self.steps} steps")
        if self.nonfinite:
            lines.append(f"skipped {self.nonfinite} steps with a non-finite gradient")
        return "\n".join(lines)


def _shown(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
