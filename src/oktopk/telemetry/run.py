"""`Run`: the records of a run as columns, made in one pass, and the figures of a step that follow from them."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oktopk.codec import HEADER_WORDS, WORD_BYTES
from oktopk.telemetry.reader import MetricsReader, Record, metrics_of
from oktopk.telemetry.schema import PHASES, SPLIT, VERSION, EpochRecord, TrainStep, catalogue

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

COMMUNICATION = ("exchange", "gather", "agree", "dense_tail")
"""Phases in which messages travel; the exchange's others compute."""

PAIRS = ("exchange", "gather")
"""Phases whose messages are blocks of pairs, with a header each."""

LARGEST = 1e60
"""Largest number that counts as measured, because sums of such numbers stay finite."""

HEADER_BYTES = HEADER_WORDS * WORD_BYTES
ENDS = ("end", "failed")

_STEP = [name for name, figure in catalogue(TrainStep).items() if figure.is_scalar]
_MAPPINGS = [name for name, figure in catalogue(TrainStep).items() if figure.parts]
_EPOCH = [name for name, figure in catalogue(EpochRecord).items() if figure.unit != "count"]


def load_run(path: Path, name: str | None = None) -> Run:
    """Return the run of a folder or file, as far as its records are there."""
    file = metrics_of(path)
    default = file.parent.resolve().name if path.is_dir() else path.stem if path.stem != "metrics" else file.parent.name
    reader = MetricsReader(file)
    run = Run.of(reader.new(), name or default or path.name)
    run.bad_lines, run.is_cut = reader.bad_lines, reader.is_cut
    return run


@dataclass
class Messages:
    """Messages of one collective in one phase: calls, bytes, and the number of messages of each size."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    sizes: Counter[int] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Messages."""
        return sum(self.sizes.values())

    @property
    def median(self) -> float | None:
        """The size in the middle, or the mean of the two there."""
        if not self.count:
            return None
        sizes = sorted(self.sizes)
        ends = np.cumsum([self.sizes[size] for size in sizes])
        low, high = (sizes[np.searchsorted(ends, place, "right")] for place in ((self.count - 1) // 2, self.count // 2))
        return (low + high) / 2


class Run:
    """One run. A figure that a record does not have, or that is no number, is NaN in its column and None elsewhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.header: Record = {}
        self.epochs: list[Record] = []
        self.events: list[Record] = []
        self.messages: dict[tuple[str, str], Messages] = {}
        self.bad_lines: list[int] = []
        self.is_cut = False
        self.num_steps = 0
        self.num_ranks = 0
        self.num_headers = 0
        self.last_event: str | None = None
        self._columns: dict[str, array[float]] = {}
        self._sparse = bytearray()
        self._so_far: Record = {"seconds": 0.0, "sent_bytes": 0}

    @staticmethod
    def of(records: Iterable[Record], name: str = "") -> Run:
        """Return the run that has these records."""
        run = Run(name)
        for record in records:
            run.add_(record)
        return run

    def add_(self, record: Record) -> None:
        """Take the next record; a kind that this version does not know is left out."""
        kind = record["kind"]
        self.last_event = None
        if kind == "run":
            self.header = {**record, "config": _mapping(record.get("config"))}
            self.num_headers += 1
        elif kind == "step":
            self._add_step(record)
        elif kind == "epoch":
            figures = {name: _number(record.get(name)) for name in _EPOCH}
            places = {name: _whole(record.get(name)) for name in ("epoch", "step")}
            self.epochs.append({**places, **figures, **self._so_far})
        elif kind == "event":
            texts = {name: str(record.get(name, "")) for name in ("event", "message")}
            self.events.append({**texts, "step": _whole(record.get("step"))})
            self.last_event = texts["event"]

    def _add_step(self, record: Record) -> None:
        row = self.num_steps
        self.num_steps += 1
        self._sparse.append(record.get("phase") == "sparse")
        for name in _STEP:
            self._set(name, row, record.get(name))
        for name in _MAPPINGS:
            self._set_all(name, row, _mapping(record.get(name)))
        self._so_far["seconds"] += math.fsum(_number(x) or 0.0 for x in _mapping(record.get("split")).values())
        self._so_far["sent_bytes"] += int(_number(record.get("sent_bytes")) or 0)
        ranks = _sequence(record.get("ranks"))
        self.num_ranks = max(self.num_ranks, len(ranks))
        for rank, figures in enumerate(ranks):
            self._set_all(f"ranks.{rank}", row, _mapping(figures))
        self._set_all("nnz_by_owner", row, dict(enumerate(_sequence(record.get("nnz_by_owner")))))
        for key, made in _mapping(record.get("collectives")).items():
            self._add_collective(row, str(key), _mapping(made))

    def _add_collective(self, row: int, key: str, made: Mapping[str, Any]) -> None:
        phase, _, collective = key.partition("/")
        known = self.messages.setdefault((phase, collective), Messages())
        known.calls += _count(made.get("calls"))
        known.sent_bytes += _count(made.get("sent_bytes"))
        known.received_bytes += _count(made.get("received_bytes"))
        pairs = [pair for pair in _sequence(made.get("sizes")) if isinstance(pair, list) and len(pair) == 2]
        sizes = {_count(size): _count(count) for size, count in pairs}
        known.sizes.update(sizes)
        if phase in PAIRS and collective != "all_reduce":
            name, headers = f"header_bytes.{phase}", sum(min(size, HEADER_BYTES) * n for size, n in sizes.items())
            column = self._columns.get(name, array("d"))
            self._set(name, row, headers + (column.pop() if len(column) > row else 0.0))

    def _set_all(self, prefix: str, row: int, values: Mapping[Any, Any]) -> None:
        """Set the columns of a mapping, and of the mappings in it."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                self._set_all(f"{prefix}.{name}", row, value)
            else:
                self._set(f"{prefix}.{name}", row, value)

    def _set(self, name: str, row: int, value: Any) -> None:
        number = _number(value)
        if number is None:
            return
        column = self._columns.setdefault(name, array("d"))
        column.extend([math.nan] * (row - len(column)))
        if len(column) == row:  # else the record has the name twice
            column.append(number)

    def column(self, name: str) -> Floats:
        """Return a figure of every step; NaN where it is not known."""
        known = self._columns.get(name, array("d"))
        values = np.full(self.num_steps, np.nan)
        values[: len(known)] = np.frombuffer(known, dtype=np.float64) if known else []
        return values

    def names(self, prefix: str) -> list[str]:
        """Return the known names under a prefix: parts and phases first, in their order."""
        found = [name[len(prefix) + 1 :] for name in self._columns if name.startswith(f"{prefix}.")]
        order = {name: i for i, name in enumerate((*SPLIT, *PHASES))}
        return sorted((name for name in found if "." not in name), key=lambda name: (order.get(name, 99), name))

    def scalars(self) -> list[str]:
        """Return the figures of a step that are one number and known."""
        return [name for name in _STEP if name in self._columns]

    @property
    def is_sparse(self) -> Bools:
        """Whether a step was sparse."""
        return np.frombuffer(bytes(self._sparse), dtype=np.bool_)

    @property
    def is_skipped(self) -> Bools:
        """Whether a step was refused."""
        return np.equal(self.column("skipped"), 1.0)

    @property
    def steps(self) -> Floats:
        """The number of each step."""
        numbers = self.column("step")
        return np.where(np.isnan(numbers), np.arange(len(numbers)), numbers)

    @property
    def workers(self) -> int | None:
        """P: as the run says, or its steps do."""
        for value in (self.header.get("workers"), *self.column("world_size")[-1:], self.num_ranks or None):
            number = _number(value)
            if number is not None and number >= 1:
                return int(number)
        return None

    @property
    def dense_bytes(self) -> Floats:
        """Bytes of a dense step: 2n(P-1)/P words."""
        known = _number(self.header.get("dense_bytes"))
        if known is not None:
            return np.full(self.num_steps, known)
        size = self.workers or math.nan
        return np.floor(2 * WORD_BYTES * self.column("numel") * (size - 1) / size)

    @property
    def bound_bytes(self) -> Floats:
        """The paper's bound on a sparse step: 6k(P-1)/P words, and 2(P-1)/P for each element that travels dense."""
        size, side = self.workers or math.nan, self.column("dense_tail_numel")
        words = (6 * (self.column("wanted") - side) + 2 * side) * (size - 1) / size
        return np.where(self.is_sparse, WORD_BYTES * words, np.nan)

    def of_wanted(self, name: str) -> Floats:
        """Return elements of a step, selected or delivered, over k."""
        wanted = self.column("wanted")
        return np.divide(self.column(name), wanted, out=np.full_like(wanted, np.nan), where=wanted > 0)

    def bytes_by_part(self) -> dict[str, Floats]:
        """Return the bytes that rank 0 sent in each step by phase, the headers of blocks apart."""
        phases = {name: np.nan_to_num(self.column(f"sent_by_phase.{name}")) for name in self.names("sent_by_phase")}
        headers = {name: np.nan_to_num(self.column(f"header_bytes.{name}")) for name in self.names("header_bytes")}
        for name, part in headers.items():
            phases[name] = phases.get(name, np.zeros(self.num_steps)) - part
        return {**phases, "headers": sum(headers.values(), np.zeros(self.num_steps))} if headers else phases

    def split_of(self, rank: int | None = None) -> dict[str, Floats]:
        """Return the seconds of the training thread by part, of rank 0 or another."""
        prefix = "split" if rank is None else f"ranks.{rank}"
        return {name: self.column(f"{prefix}.{name}") for name in SPLIT}

    def phases_of(self, rank: int | None = None) -> dict[str, Floats]:
        """Return the seconds of the exchange by phase, of rank 0 or another."""
        prefix = "seconds" if rank is None else f"ranks.{rank}.seconds"
        return {name: np.nan_to_num(self.column(f"{prefix}.{name}")) for name in self.names(prefix)}

    @property
    def step_seconds(self) -> Floats:
        """Seconds of each step, on rank 0."""
        return sum_known(list(self.split_of().values()))

    @property
    def seconds(self) -> Floats:
        """Training seconds at the end of each step: without validation and checkpoints."""
        return np.nancumsum(self.step_seconds)

    @property
    def sent_so_far(self) -> Floats:
        """Bytes that rank 0 had sent at the end of each step."""
        return np.nancumsum(self.column("sent_bytes"))

    def communication(self, rank: int | None = None) -> tuple[Floats, Floats]:
        """Return the seconds of communication and of computation in each step, which overlap."""
        phases, split = self.phases_of(rank), self.split_of(rank)
        travelling = [seconds for name, seconds in phases.items() if name in COMMUNICATION]
        computing = [seconds for name, seconds in phases.items() if name not in COMMUNICATION]
        nothing = np.full(self.num_steps, np.nan)
        return sum_known(travelling or [nothing]), sum_known([*computing, split["compute"], split["update"]])

    @property
    def boundary(self) -> int | None:
        """The first sparse step."""
        found = np.flatnonzero(self.is_sparse)
        return int(self.steps[found[0]]) if len(found) else None

    @property
    def density_changes(self) -> list[tuple[int, float, float]]:
        """The steps at which k changed from one sparse step to the next, with k before and after."""
        sparse = np.flatnonzero(self.is_sparse & ~np.isnan(self.column("wanted")))
        wanted, steps = self.column("wanted")[sparse], self.steps[sparse]
        return [(int(steps[i]), wanted[i - 1], wanted[i]) for i in np.flatnonzero(np.diff(wanted)) + 1]

    @property
    def state(self) -> str:
        """ "ended", "failed", or "unfinished": running still, or killed."""
        if self.last_event in ENDS:
            return "ended" if self.last_event == "end" else "failed"
        planned = _number(self.header.get("steps"))
        return "ended" if planned is not None and 0 < planned <= self.num_steps else "unfinished"

    @property
    def version(self) -> Any:
        """The version of the file's form, as it says."""
        return self.header.get("version", VERSION)


def sum_known(columns: Sequence[Floats]) -> Floats:
    """Return the sum, step by step, of what is known; NaN where nothing is."""
    stacked = np.array(columns)
    return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= LARGEST else 0


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
