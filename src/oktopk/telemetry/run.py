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

COMMUNICATION = ("exchange", "gather", "agree", "dense_tail")
"""Phases in which messages travel; the exchange's others compute."""

PAIRS = ("exchange", "gather")
"""Phases whose messages are blocks of pairs, with a header each."""

LARGEST = 1e60
"""What is larger was not measured; sums of what is not stay finite."""

HEADER_BYTES = HEADER_WORDS * WORD_BYTES
ENDS = ("end", "failed")

_STEP = {name: figure for name, figure in catalogue(TrainStep).items() if figure.is_scalar}
_MAPPINGS = [name for name, figure in catalogue(TrainStep).items() if figure.parts]
_EPOCH = [name for name in catalogue(EpochRecord) if name not in ("epoch", "step", "validated")]


def load_run(path: Path, name: str | None = None) -> Run:
    """Return the run of a folder or file, as far as its records are there."""
    file = metrics_of(path)
    default = file.parent.resolve().name if path.is_dir() else path.stem if path.stem != "metrics" else file.parent.name
    run, reader = Run(name or default or path.name), MetricsReader(file)
    for record in reader.new():
        run.add_(record)
    run.bad_lines, run.is_cut = reader.bad_lines, reader.is_cut
    return run


@dataclass
class Messages:
    """What the calls of one collective in one phase sent: how often, and how many messages of which size."""

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
        """The size in the middle; between the two there, if there are two."""
        if not self.count:
            return None
        low, high = (self.count - 1) // 2, self.count // 2
        return (self._size_at(low) + self._size_at(high)) / 2

    def _size_at(self, place: int) -> int:
        for size in sorted(self.sizes):
            place -= self.sizes[size]
            if place < 0:
                return size
        raise AssertionError("a place beyond the last message")


class Run:
    """One run. What a record does not have, or what is no number, is NaN in its column, and None in any figure."""

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
        """Return the run that these records are."""
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
            self._add_epoch(record)
        elif kind == "event":
            told = {name: str(record.get(name, "")) for name in ("event", "message")}
            self.events.append({**told, "step": _whole(record.get("step"))})
            self.last_event = told["event"]

    def _add_epoch(self, record: Record) -> None:
        figures = {name: _number(record.get(name)) for name in _EPOCH}
        places = {name: _whole(record.get(name)) for name in ("epoch", "step")}
        self.epochs.append({**places, **figures, **self._so_far})

    def _add_step(self, record: Record) -> None:
        row = self.num_steps
        self.num_steps += 1
        self._sparse.append(record.get("phase") == "sparse")
        for name in _STEP:
            self._set(name, row, record.get(name))
        for group in _MAPPINGS:
            for name, value in _mapping(record.get(group)).items():
                self._set(f"{group}.{name}", row, value)
        self._so_far["seconds"] += math.fsum(_number(x) or 0.0 for x in _mapping(record.get("split")).values())
        self._so_far["sent_bytes"] += int(_number(record.get("sent_bytes")) or 0)
        self._add_ranks(row, record.get("ranks"))
        for owner, count in enumerate(_sequence(record.get("nnz_by_owner"))):
            self._set(f"nnz_by_owner.{owner}", row, count)
        self._add_collectives(row, _mapping(record.get("collectives")))

    def _add_ranks(self, row: int, ranks: Any) -> None:
        for rank, figures in enumerate(_sequence(ranks)):
            figures = _mapping(figures)
            self.num_ranks = max(self.num_ranks, rank + 1)
            for name, value in figures.items():
                for part, number in value.items() if isinstance(value, Mapping) else [("", value)]:
                    self._set(f"ranks.{rank}.{name}.{part}".rstrip("."), row, number)

    def _add_collectives(self, row: int, collectives: Mapping[str, Any]) -> None:
        for key, made in collectives.items():
            phase, _, collective = str(key).partition("/")
            made = _mapping(made)
            known = self.messages.setdefault((phase, collective), Messages())
            known.calls += _count(made.get("calls"))
            known.sent_bytes += _count(made.get("sent_bytes"))
            known.received_bytes += _count(made.get("received_bytes"))
            sizes = {_count(size): _count(count) for size, count in _pairs(made.get("sizes"))}
            known.sizes.update(sizes)
            if phase in PAIRS and collective != "all_reduce":
                headers = sum(min(size, HEADER_BYTES) * count for size, count in sizes.items())
                self._add(f"header_bytes.{phase}", row, headers)

    def _set(self, name: str, row: int, value: Any) -> None:
        number = _number(value)
        if number is None:
            return
        column = self._columns.setdefault(name, array("d"))
        if len(column) < row:
            column.extend([math.nan] * (row - len(column)))
        column.append(number)

    def _add(self, name: str, row: int, value: float) -> None:
        """Set a figure, or add to it where there is one already."""
        column = self._columns.get(name, array("d"))
        if len(column) > row:
            column[row] += value
        else:
            self._set(name, row, value)

    def column(self, name: str) -> Floats:
        """Return a figure of every step; NaN where it is not known."""
        known = self._columns.get(name, array("d"))
        values = np.full(self.num_steps, np.nan)
        values[: len(known)] = np.frombuffer(known, dtype=np.float64) if known else []
        return values

    def names(self, prefix: str) -> list[str]:
        """Return what is known under a prefix: of "seconds" the phases that were timed, ours first, in their order."""
        found = [name[len(prefix) + 1 :] for name in self._columns if name.startswith(f"{prefix}.")]
        order = {name: i for i, name in enumerate((*SPLIT, *PHASES))}
        return sorted((name for name in found if "." not in name), key=lambda name: (order.get(name, 99), name))

    def scalars(self) -> list[str]:
        """Return the figures of a step that are one number and known."""
        return [name for name in _STEP if name in self._columns]

    @property
    def is_sparse(self) -> NDArray[np.bool_]:
        """Whether a step was sparse."""
        return np.frombuffer(bytes(self._sparse), dtype=np.bool_)

    @property
    def is_skipped(self) -> NDArray[np.bool_]:
        """Whether a step was refused."""
        skipped: NDArray[np.bool_] = self.column("skipped") == 1.0
        return skipped

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
        """What a dense step would send: 2n(P-1)/P words."""
        known = _number(self.header.get("dense_bytes"))
        if known is not None:
            return np.full(self.num_steps, known)
        size = self.workers
        if size is None:
            return np.full(self.num_steps, np.nan)
        return np.floor(2 * WORD_BYTES * self.column("numel") * (size - 1) / size)

    @property
    def bound_bytes(self) -> Floats:
        """The paper's bound on a sparse step: 6k(P-1)/P words, and 2(P-1)/P for each element that travels dense."""
        size, side = self.workers, self.column("dense_tail_numel")
        if size is None:
            return np.full(self.num_steps, np.nan)
        words = (6 * (self.column("wanted") - side) + 2 * side) * (size - 1) / size
        return np.where(self.is_sparse, WORD_BYTES * words, np.nan)

    def of_wanted(self, name: str) -> Floats:
        """Return elements of a step, selected or delivered, over k."""
        wanted = self.column("wanted")
        return np.divide(self.column(name), wanted, out=np.full_like(wanted, np.nan), where=wanted > 0)

    def bytes_by_part(self) -> dict[str, Floats]:
        """Return what rank 0 sent in each step by phase; what is header of the blocks of pairs is apart from them."""
        phases = {name: np.nan_to_num(self.column(f"sent_by_phase.{name}")) for name in self.names("sent_by_phase")}
        headers = {name: np.nan_to_num(self.column(f"header_bytes.{name}")) for name in self.names("header_bytes")}
        for name, part in headers.items():
            phases[name] = phases.get(name, np.zeros(self.num_steps)) - part
        return {**phases, "headers": sum(headers.values(), np.zeros(self.num_steps))} if headers else phases

    def split_of(self, rank: int | None = None) -> dict[str, Floats]:
        """Return where the training thread's seconds went, of rank 0 or another."""
        prefix = "split" if rank is None else f"ranks.{rank}"
        return {name: self.column(f"{prefix}.{name}") for name in SPLIT}

    def phases_of(self, rank: int | None = None) -> dict[str, Floats]:
        """Return where the exchange's seconds went, by phase, of rank 0 or another."""
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
        """Return seconds of communication and of computation in each step, of rank 0 or another.

        Computation is forward and backward, update, and what the exchange itself computes. The two overlap.
        """
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
        """What became of the run: "ended", "failed", or "unfinished": running still, or killed."""
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


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    return [(pair[0], pair[1]) for pair in _sequence(value) if isinstance(pair, list) and len(pair) == 2]
