"""`Run`: the records of a run as columns, made in one pass, and the figures of a step that follow from them."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from oktopk.telemetry.reader import MetricsReader, Record, metrics_of
from oktopk.telemetry.schema import PHASES, SPLIT, EpochRecord, TrainStep, catalogue
from oktopk.words import HEADER_WORDS, WORD_BYTES

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Container = TypeVar("Container", dict[Any, Any], list[Any])

COMMUNICATION = ("exchange", "gather", "agree", "dense_tail")
"""Phases in which messages travel; the exchange's others compute."""

PAIRS = ("exchange", "gather")
"""Phases whose messages are blocks of pairs, with a header each."""

LARGEST = 1e60
"""Largest number that counts as measured, because sums of such numbers stay finite."""

HEADER_BYTES = HEADER_WORDS * WORD_BYTES
ENDS = {"end": "ended", "failed": "failed", "stopped": "stopped"}
"""State of a run whose last record is this event."""

BOUND_WORDS = {"oktopk": 5, "oktopkpaper": 6}
"""Words of a bound by k(P-1)/P: `OkTopk` never sends more, `OkTopkPaper` rarely. The others have none of that form."""

SILENCE_S = 120.0
"""Seconds without a record after which a run counts as killed, because a validation may take a minute."""


def load_run(path: Path) -> Run:
    """Return the run of a folder or file, as far as its records are there."""
    reader = MetricsReader(metrics_of(path))
    run = Run(reader.new(), reader.name)
    run.bad_lines, run.is_cut, run.silent_s = reader.bad_lines, reader.is_cut, reader.silent_s
    return run


@dataclass
class Messages:
    """Messages of one collective in one phase: calls, bytes, and the number of messages of each size."""

    calls: int = 0
    sent_bytes: int = 0
    sizes: Counter[int] = field(default_factory=Counter)

    @property
    def median(self) -> float | None:
        """The size in the middle, or the mean of the two there."""
        count, sizes = self.sizes.total(), sorted(self.sizes)
        if not count:
            return None
        ends = np.cumsum([self.sizes[size] for size in sizes])
        low, high = (sizes[np.searchsorted(ends, place, "right")] for place in ((count - 1) // 2, count // 2))
        return (low + high) / 2


class Run:
    """One run. A figure that a record does not have, or that is no number, is NaN in its column and None elsewhere."""

    def __init__(self, records: Iterable[Record] = (), name: str = "") -> None:
        self.name = name
        self.header: Record = {}
        self.epochs: list[Record] = []
        self.events: list[Record] = []
        self.messages: dict[tuple[str, str], Messages] = {}
        self.bad_lines: list[int] = []
        self.is_cut = False
        self.silent_s = math.inf
        self.num_steps = 0
        self.num_ranks = 0
        self.writers: set[Any] = set()  # ranks whose headers are there
        self.last_event: str | None = None
        self._columns: dict[str, array[float]] = {}
        self._logged: dict[str, dict[int, float]] = {}  # what a script logged, by name and step
        for record in records:
            self.add_(record)

    def add_(self, record: Record) -> None:
        """Take the next record; a kind that this version does not know is left out."""
        kind = record["kind"]
        self.last_event = None
        if kind == "run":
            self.header = {**record, "config": _typed(dict, record.get("config"))}
            self.writers.add(str(record.get("rank")))
        elif kind == "step":
            self._add_step(record)
        elif kind == "epoch":
            figures = {name: _number(record.get(name)) for name in catalogue(EpochRecord)}
            places = {name: _whole(record.get(name)) for name in ("epoch", "step")}
            seconds, sent = float(np.nansum(self.step_seconds)), int(np.nansum(self.column("sent_bytes")))
            self.epochs.append({**figures, **places, "seconds": seconds, "sent_bytes": sent})
        elif kind == "log":
            self._add_logged(_whole(record.get("step")), _typed(dict, record.get("figures")))
        elif kind == "event":
            texts = {name: str(record.get(name, "")) for name in ("event", "message")}
            self.events.append({**texts, "step": _whole(record.get("step"))})
            self.last_event = texts["event"]

    def _add_step(self, record: Record) -> None:
        ranks = _typed(list, record.get("ranks"))
        self.num_ranks = max(self.num_ranks, len(ranks))
        figures = {name: record.get(name) for name in catalogue(TrainStep)}
        figures["is_sparse"] = record.get("phase") == "sparse"
        figures["is_local"] = record.get("phase") == "local"
        figures["ranks"] = dict(enumerate(ranks))
        figures["nnz_by_owner"] = dict(enumerate(_typed(list, record.get("nnz_by_owner"))))
        figures["header_bytes"] = self._add_messages(_typed(dict, figures.pop("collectives")))
        self._set(self.num_steps, figures)
        self.num_steps += 1

    def _add_logged(self, step: int | None, figures: Record) -> None:
        numbers = {name: _number(value) for name, value in figures.items()}
        for name, number in numbers.items():
            if step is not None and number is not None:
                self._logged.setdefault(str(name), {})[step] = number

    def _add_messages(self, collectives: Record) -> dict[str, int]:
        """Count the messages of a step; return the bytes of their blocks' headers, by phase."""
        headers = Counter[str]()
        for key, made in ((key, _typed(dict, made)) for key, made in collectives.items()):
            phase, _, collective = key.partition("/")
            known = self.messages.setdefault((phase, collective), Messages())
            known.calls += _count(made.get("calls"))
            known.sent_bytes += _count(made.get("sent_bytes"))
            pairs = [pair for pair in _typed(list, made.get("sizes")) if isinstance(pair, list) and len(pair) == 2]
            sizes = {_count(size): _count(count) for size, count in pairs}
            known.sizes.update(sizes)
            if phase in PAIRS and collective != "all_reduce":
                headers[phase] += sum(min(size, HEADER_BYTES) * count for size, count in sizes.items())
        return headers

    def _set(self, row: int, values: Mapping[Any, Any], prefix: str = "") -> None:
        """Set the columns of a mapping, and of the mappings in it."""
        for name, value in values.items():
            if isinstance(value, Mapping):
                self._set(row, value, f"{prefix}{name}.")
            elif (number := _number(value)) is not None:
                column = self._columns.setdefault(f"{prefix}{name}", array("d"))
                column.extend([math.nan] * (row - len(column)))
                if len(column) == row:  # else the record has the name twice
                    column.append(number)

    def column(self, name: str) -> Floats:
        """Return a figure of every step; NaN where it is not known."""
        known = self._columns.get(name, array("d"))
        values = np.full(self.num_steps, np.nan)
        values[: len(known)] = np.frombuffer(known, dtype=np.float64) if known else []
        return values

    @property
    def logged_names(self) -> list[str]:
        """Names of the figures that a script logged."""
        return list(self._logged)

    def logged(self, name: str) -> Floats:
        """Return a figure that a script logged, for every step; NaN where it logged none."""
        known = self._logged.get(name, {})
        return np.array([known.get(int(step), math.nan) for step in self.steps])

    @property
    def loss(self) -> Floats:
        """The loss of each step, as the trainer recorded it, or as a script logged it."""
        return self.column("loss") if "loss" in self._columns else self.logged("loss")

    def names(self, prefix: str) -> list[str]:
        """Return the known names under a prefix: parts and phases first, in their order."""
        found = [name[len(prefix) + 1 :] for name in self._columns if name.startswith(f"{prefix}.")]
        order = {name: i for i, name in enumerate((*SPLIT, *PHASES))}
        return sorted((name for name in found if "." not in name), key=lambda name: (order.get(name, 99), name))

    @property
    def error(self) -> str:
        """The figure of a validation, the less the better: WER of speech, or bits a byte of text."""
        is_text = any(epoch.get("bits_per_byte") is not None for epoch in self.epochs)
        return "bits_per_byte" if is_text else "wer"

    @property
    def is_sparse(self) -> Bools:
        """Whether a step was sparse."""
        return np.equal(self.column("is_sparse"), 1.0)

    @property
    def masks(self) -> dict[str, Bools]:
        """The dense and the sparse steps, and those of local steps in which nothing was exchanged."""
        local = np.equal(self.column("is_local"), 1.0)
        masks = {"dense": ~self.is_sparse & ~local, "sparse": self.is_sparse}
        return {**masks, "local": local} if local.any() else masks

    @property
    def phases(self) -> list[str]:
        """The phase of each step."""
        names, made = list(self.masks), np.array(list(self.masks.values()))
        return [names[place] for place in made.argmax(axis=0)]

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
        said = (self.header.get("workers"), *self.column("world_size")[-1:], self.num_ranks)
        return next((int(number) for number in map(_number, said) if number is not None and number >= 1), None)

    @property
    def dense_bytes(self) -> Floats:
        """Bytes of a dense step: 2n(P-1)/P words."""
        known = _number(self.header.get("dense_bytes"))
        if known is not None:
            return np.full(self.num_steps, known)
        size = self.workers or math.nan
        return np.floor(2 * WORD_BYTES * self.column("numel") * (size - 1) / size)

    @property
    def bound_words(self) -> int | None:
        """Words of the algorithm's bound by k(P-1)/P; None if it has none, or is not known."""
        return BOUND_WORDS.get(str(self.header.get("config", {}).get("compressor")).lower().replace("_", ""))

    @property
    def bound_bytes(self) -> Floats:
        """The bound of a sparse step with float32 values; elements that travel dense take 2(P-1)/P words each."""
        size, side = self.workers or math.nan, self.column("dense_tail_numel")
        words = ((self.bound_words or math.nan) * (self.column("wanted") - side) + 2 * side) * (size - 1) / size
        return np.where(self.is_sparse, WORD_BYTES * words, np.nan)

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
        """Seconds of each step, on rank 0: by part if a trainer wrote them, else from one step's end to the next's."""
        parts = sum_known(list(self.split_of().values()))
        return np.where(np.isnan(parts), self.column("step_seconds"), parts)

    def communication(self, rank: int | None = None) -> tuple[Floats, Floats]:
        """Return the seconds of communication and of computation in each step, which overlap."""
        phases, split = self.phases_of(rank), self.split_of(rank)
        travelling = [seconds for name, seconds in phases.items() if name in COMMUNICATION]
        computing = [seconds for name, seconds in phases.items() if name not in COMMUNICATION]
        nothing = np.full(self.num_steps, np.nan)
        return sum_known(travelling or [nothing]), sum_known([*computing, split["compute"], split["update"]])

    @property
    def state(self) -> str:
        """ "ended", "failed", "stopped" by Ctrl-C, "running", or "unfinished": it was killed, or has no planned end."""
        if self.last_event in ENDS:
            return ENDS[self.last_event]
        planned = _number(self.header.get("steps"))
        if planned is None:
            return "unfinished"
        return "ended" if 0 < planned <= self.num_steps else "running" if self.silent_s < SILENCE_S else "unfinished"


def quotients(above: Floats, below: Floats) -> Floats:
    """Return above / below; NaN where below is not positive."""
    return above / np.where(below > 0, below, np.nan)


def sum_known(columns: Sequence[Floats]) -> Floats:
    """Return the sum, step by step, of what is known; NaN where nothing is."""
    stacked = np.array(columns)
    return np.where(np.isnan(stacked).all(axis=0), np.nan, np.nansum(stacked, axis=0))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) <= LARGEST else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= LARGEST else 0


def _typed(kind: type[Container], value: Any) -> Container:
    """Return the value; an empty one if it is of another type."""
    return value if isinstance(value, kind) else kind()
