"""The catalogue of figures: unit, definition, heading, TensorBoard tag and more for every field of a record.

Sinks, trainer, report and docs/accounting.md read it. A new figure is a field of this file and the line that fills it.
"""

from __future__ import annotations

# ruff: noqa: RUF009 - figure() returns a dataclass field
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import zip_longest
from typing import Any

VERSION = 1
"""Version of the form of metrics.jsonl."""

PHASES = ("accumulate", "select", "pack", "exchange", "reduce", "gather", "apply", "agree", "dense_tail")
"""Phases of the built-in algorithms, in the order of a step; parameters that travel dense do so in "dense_tail"."""

SPLIT = {"data": "data", "compute": "forward and backward", "wait": "wait for the exchange", "update": "update"}
"""Parts of a training step on the training thread, with their headings."""


@dataclass(frozen=True)
class Figure:
    """An entry of the catalogue."""

    unit: str  # a key of `format.WRITTEN`, or "object" for a figure that is not one number
    definition: str  # a sentence for docs/accounting.md
    tag: str = ""  # name in TensorBoard; empty: it is not written there
    heading: str = ""  # of a table's column; empty: the name of the field
    per_rank: bool = False  # whether the trainer gathers the figure from every rank
    parts: tuple[str, ...] = ()  # names in the mapping, if the figure is one
    merge: Callable[[Sequence[Any]], Any] | None = None  # a step's figure of its groups' ones; None: it has its own


def figure(unit: str, definition: str, tag: str = "", heading: str = "", *, default: Any = MISSING, **more: Any) -> Any:
    """Return the field of a record that is a figure; `default=dict` makes an empty mapping."""
    kind = "default_factory" if default is dict else "default"
    return field(**{kind: default}, metadata={"figure": Figure(unit, definition, tag, heading, **more)})


def add(values: Sequence[Any]) -> Any:
    """Return the sum of the known values; None if there are only unknown ones."""
    known = [value for value in values if value is not None]
    return sum(known) if known or not values else None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None, never NaN, if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def largest(values: Sequence[Any]) -> Any:
    """Return the largest of the known values."""
    return max((value for value in values if value is not None), default=None)


def add_by_name(values: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return the sums by name."""
    total = Counter[Any]()
    for each in values:
        total.update(each)
    return dict(total)


def add_by_place(values: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the sums by place."""
    return tuple(map(sum, zip_longest(*values, fillvalue=0)))


def add_collectives(values: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the collectives of several groups together."""
    total: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for each in values for name in each):
        made = [each[name] for each in values if name in each]
        sizes = add_by_name(dict(each["sizes"]) for each in made)
        counts = {count: sum(each[count] for each in made) for count in ("calls", "sent_bytes", "received_bytes")}
        total[name] = {**counts, "sizes": [[size, count] for size, count in sorted(sizes.items())]}
    return total


# fmt: off
@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank. A figure that could not be measured is None, never NaN.

    `buckets` has the same record for each group of parameters that was reduced together; a `Reducer` has none.
    """

    step: int = figure("count", "Steps before this one, skipped ones included.")
    phase: str = figure("text", '"dense" or "sparse"; of local steps "local" where nothing was exchanged.')
    numel: int = figure("count", "Elements of the gradient.", merge=add)
    wanted: int = figure("count", "k: elements that a sparse step is asked for; numel in a dense step.", merge=add)
    selected: int = figure("count", "Elements that this rank sent or kept for its own region; numel in a dense step.",
        per_rank=True, merge=add)
    nnz: int = figure("count", "Elements of the result, the same on all ranks; numel in a dense step.",
        "compression/nnz", merge=add)
    sparsity: float = figure("number", "1 - nnz / numel; 0.0 in a dense step.", "compression/sparsity")
    compression_ratio: float | None = figure("times",
        "numel / nnz; 1.0 in a dense step, None if nothing was delivered.", "compression/ratio", "ratio")
    nominal_bytes: int = figure("bytes", "nnz x 8 (an int32 index, a float32 value); numel x 4 in a dense step.",
        merge=add)
    sent_bytes: int = figure("bytes", "Bytes that this rank handed to the network for other ranks.", "bytes/sent",
        "sent", per_rank=True, merge=add)
    received_bytes: int = figure("bytes", "Bytes that came from other ranks.", "bytes/received", "received",
        per_rank=True, merge=add)
    messages: int = figure("count", "Messages that this rank sent, empty ones aside.", "bytes/messages", per_rank=True,
        merge=add)
    seconds: dict[str, float] = figure("seconds", "Wall time of the exchange, by phase of the algorithm.",
        "seconds_of_exchange", per_rank=True, parts=PHASES, merge=add_by_name, default=dict)
    sent_by_phase: dict[str, int] = figure("bytes", "Bytes sent, by phase of the algorithm.", "bytes_by_phase",
        per_rank=True, parts=PHASES, merge=add_by_name, default=dict)
    collectives: dict[str, dict[str, Any]] = figure("object",
        "Calls, bytes each way and [message size, count] pairs, by phase and collective.", merge=add_collectives,
        default=dict)
    world_size: int | None = figure("count", "P: ranks of the exchange.", merge=largest, default=None)
    dense_tail_numel: int | None = figure("count",
        "Elements that travelled dense beside the sparse ones; numel in a dense step.", merge=add, default=None)
    nnz_by_owner: tuple[int, ...] = figure("object",
        "Elements of the result in each rank's region, as cut after the step.", merge=add_by_place, default=())
    threshold: float | None = figure("number", "Local threshold of the step, as a score.", "threshold/local",
        merge=mean, default=None)
    global_threshold: float | None = figure("number",
        "Threshold of the result, as a score; with `OkTopk` the smallest score delivered.", "threshold/global",
        merge=mean, default=None)
    oldest_wait_steps: int | None = figure("count",
        "Longest wait of an element with mass in a sample of the residual; None on the GPU device path.", "wait/oldest",
        "oldest wait", per_rank=True, merge=largest, default=None)
    skipped: bool = figure("count", "Whether the step was refused as non-finite and delivered nothing.", default=False)
    reason: str | None = figure("text", "Rank and parameter that made the step skipped.", default=None)
    wait_seconds: float | None = figure("seconds",
        "Time that backward waited for the exchange after its own work; None for a `Reducer`.", default=None)
    step_seconds: float | None = figure("seconds",
        "Time from the end of the last step's backward to the end of this one's; None in the first.", default=None)
    predicted_seconds: float | None = figure("seconds",
        "`step_seconds` of a sparse step as the dense ones before predict it; None on the GPU device path.",
        default=None)
    lost_mass: float | None = figure("number",
        "Largest norm that the mean can lack for members that left since the last step; None if none did.",
        "membership/lost_mass", "lost mass", default=None)
    buckets: tuple[StepRecord, ...] = ()

    def to_json(self) -> str:
        """Return the record as one line."""
        return to_json(self)

    def scalars(self) -> dict[str, float]:
        """Return the known figures by their tags, for a logger such as TensorBoard's, wandb's or mlflow's."""
        return scalars_of(self)


@dataclass(frozen=True, kw_only=True)
class TrainStep(StepRecord):
    """One step of a training run, as rank 0 writes it; `ranks` has the per-rank figures of every rank."""

    epoch: int = figure("count", "Epochs before this one.")
    loss: float | None = figure("number", "Mean over workers of the loss of an utterance, or of a byte of text.",
        "loss/each_step", per_rank=True)
    lr: float = figure("number", "Learning rate of the optimizer.", "learning/lr")
    momentum: float = figure("number", "Momentum of SGD, or beta1 of AdamW.", "learning/momentum")
    grad_norm: float | None = figure("number",
        "Norm of the mean that the step delivered, before clipping; with local steps of rank 0's own gradient.",
        "norm/gradient_delivered")
    residual_norm: float | None = figure("number",
        "Norm of the residual after the step, measured in every tenth sparse step, or at each exchange of local steps.",
        "norm/residual", per_rank=True)
    utterances: int = figure("count", "Utterances, or windows of text, of all workers.", per_rank=True)
    characters: int = figure("count", "Characters in the texts of the utterances; bytes of text.", per_rank=True)
    split: dict[str, float] = figure("seconds", "Time of the training thread, by part.", "seconds_of_step",
        per_rank=True, parts=tuple(SPLIT))
    ranks: list[dict[str, Any]]
    kind: str = "step"


@dataclass(frozen=True, kw_only=True)
class EpochRecord:
    """One epoch of a training run; figures of the validation are None where there was none."""

    epoch: int = figure("count", "Epochs before this one.")
    step: int = figure("count", "Steps made up to the end of the epoch.")
    train_loss: float | None = figure("number", "Mean of the losses of the epoch's steps.", "loss/training",
        "train loss")
    val_loss: float | None = figure("number", "Mean loss of a validation utterance, or of a byte of text.",
        "loss/validation", "val loss", default=None)
    wer: float | None = figure("number", "Word edits divided by the words of all references.", "errors/WER", "WER",
        default=None)
    cer: float | None = figure("number", "Character edits divided by the characters of all references.", "errors/CER",
        "CER", default=None)
    bits_per_byte: float | None = figure("number", "Text: `val_loss` in bits.", "errors/bits_per_byte", "bits a byte",
        default=None)
    lr: float = figure("number", "Learning rate in the epoch's last step.")
    epoch_seconds: float = figure("seconds", "Wall time of the epoch's steps.")
    validated: bool = figure("count", "Whether the epoch ended with a validation.")
    kind: str = "epoch"
# fmt: on


AnyRecord = StepRecord | EpochRecord | Mapping[str, Any]
"""A record of this file, or the fields of one that has no class: the start of a run, an event."""


@cache
def catalogue(record: type) -> dict[str, Figure]:
    """Return the figures of a class of records, by name."""
    return {each.name: each.metadata["figure"] for each in fields(record) if "figure" in each.metadata}


def to_json(record: AnyRecord) -> str:
    """Return a record as one line of metrics.jsonl; raise a ValueError on NaN."""
    return json.dumps(record if isinstance(record, Mapping) else vars(record), default=vars, allow_nan=False)


def scalars_of(record: StepRecord | EpochRecord) -> dict[str, float]:
    """Return the known figures of a record that have a TensorBoard tag, by tag."""
    found: dict[str, float | None] = {}
    kind: type = type(record)
    for name, each in catalogue(kind).items():
        value = getattr(record, name)
        if each.parts:
            found |= {f"{each.tag}/{part}": number for part, number in value.items()}
        elif each.tag:
            found[each.tag] = value
    if isinstance(record, StepRecord) and record.wanted:
        found["compression/selected_of_k"] = record.selected / record.wanted
    return {tag: value for tag, value in found.items() if value is not None}


def _rank_figures() -> dict[str, Figure]:
    return {name: each for name, each in catalogue(TrainStep).items() if each.per_rank}


def to_row(values: Mapping[str, Any]) -> list[float]:
    """Return the per-rank figures of a step as numbers, NaN for None, in the order of the catalogue."""
    row: list[float | None] = []
    for name, each in _rank_figures().items():
        row += [values[name].get(part, 0) for part in each.parts] if each.parts else [values.get(name)]
    return [math.nan if value is None else float(value) for value in row]


def from_row(row: Sequence[float]) -> dict[str, Any]:
    """Return the per-rank figures of which `to_row` made these numbers; the parts of `split` stand by themselves."""
    numbers, found = iter(row), dict[str, Any]()
    for name, each in _rank_figures().items():
        if not each.parts:
            value = next(numbers)
            found[name] = value if math.isfinite(value) else None
            continue
        parts = {part: next(numbers) for part in each.parts}
        found |= parts if name == "split" else {name: {part: value for part, value in parts.items() if value}}
    return found
