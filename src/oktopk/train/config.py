"""`Config`: every setting of a training run, where each comes from, and what it means."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from oktopk.algorithms import ALGORITHMS, Algorithm, make_algorithm
from oktopk.algorithms.oktopk import AUTO
from oktopk.errors import SettingError, one_of, within
from oktopk.train.data.features import Augmentation
from oktopk.train.models import MODELS

DATASETS = ("an4", "synth-an4")
OFF = ("no", "off", "false", "0")
ON = ("yes", "on", "true", "1")
MAX_SEED = 2**63 - 1
MAX_FLOAT = sys.float_info.max
MOST_MOMENTUM = 0.9999
"""From 1 on a gradient never ends to move the weights."""


@dataclass(frozen=True)
class Rates:
    """The optimizer's figures in one step."""

    lr: float
    momentum: float


def setting(default: Any, text: str) -> Any:
    """Return a field with its help text, which `oktopk train --settings` shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run. Recipes give values to some, flags and `--set key=value` to others; the rest is here."""

    recipe: str = setting("", "the recipe that the settings began with")
    dnn: str = setting("lstman4-small", "the net: " + " or ".join(sorted(MODELS)))
    dataset: str = setting("synth-an4", "an4: the manifests in data_dir; synth-an4: speech made offline, if need be")
    data_dir: str = setting("", "where the data is; for synth-an4 a cache folder is used if this is empty")
    utterances: int = setting(948, "synth-an4: how many to train on")
    val_utterances: int = setting(130, "synth-an4: how many to validate with")
    grammar: str = setting("an4", "synth-an4: an4, or commands (digits and commands only: quick to learn)")
    augment: bool = setting(False, "vary speed and gain of the training utterances")

    max_epochs: int = setting(30, "passes over the training data")
    max_steps: int = setting(0, "stop after so many steps, whatever the epochs; 0: no limit")
    batch_size: int = setting(8, "utterances a worker, for each forward pass")
    nsteps_update: int = setting(1, "forward passes a step: their gradients are averaged before the exchange")
    lr: float = setting(0.001, "learning rate of the first epoch")
    lr_anneal: float = setting(1.01, "the learning rate is divided by this after each epoch")
    momentum: float = setting(0.9, "of SGD")
    sparse_momentum: float = setting(
        0.5,
        "of SGD in sparse steps, if that is less: the learning rate rises so that lr / (1 - momentum) stays; "
        "not with momentum_correction",
    )
    nesterov: bool = setting(True, "Nesterov's momentum")
    weight_decay: float = setting(0.0, "of SGD")
    clip: float = setting(400.0, "largest norm of the gradient; 0: no limit")
    clip_place: str = setting(
        "global",
        "global: the mean is clipped after the exchange; local: each worker's before it, to clip / sqrt(workers); "
        "dense steps are clipped globally",
    )

    compressor: str = setting("oktopk", "the algorithm: " + ", ".join(sorted(ALGORITHMS)))
    density: float = setting(0.03, "the part of the gradient that a sparse step sends")
    dense_steps: int = setting(128, "steps before the first sparse one")
    ranking: str = setting(
        "magnitude", "oktopk: what is large: magnitude, or scaled (by the rms of its row's gradient)"
    )
    mode: str = setting("bounded", "oktopk: bounded (a hard cap on traffic) or paper")
    wire: str = setting(AUTO, "values as they travel: fp32, bf16, int8; auto: int8 with oktopk, fp32 with the others")
    momentum_correction: bool = setting(False, "DGC: momentum before selection, in place of the optimizer's")

    seed: int = setting(0, "of weights, order and augmentation")
    device: str = setting("auto", "auto: a GPU if there is one; cpu; cuda")
    threads: int = setting(0, "threads of each worker on the CPU; 0: its share of the cores")
    timeout_s: float = setting(300.0, "after which a worker that waits for another gives up")
    validate_every: int = setting(1, "epochs between validations; the last epoch is always validated")
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: one at the end of each epoch")
    on_nonfinite: str = setting("stop", "what a NaN or Inf does: stop the run, or skip the step")

    def __post_init__(self) -> None:
        one_of("net", self.dnn, MODELS)
        one_of("dataset", self.dataset, DATASETS)
        one_of("grammar", self.grammar, ("an4", "commands"))
        one_of("compressor", self.compressor, ALGORITHMS)
        one_of("place to clip", self.clip_place, ("global", "local"))
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("choice for on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        for name in ("max_epochs", "batch_size", "nsteps_update", "utterances", "val_utterances", "validate_every"):
            within(name, getattr(self, name), 1)
        for name in ("weight_decay", "clip", "dense_steps", "max_steps", "threads"):
            within(name, getattr(self, name), 0)
        for name in ("momentum", "sparse_momentum"):
            within(name, getattr(self, name), 0, MOST_MOMENTUM)
        within("checkpoint_every", self.checkpoint_every, 0)
        within("seed", self.seed, 0, MAX_SEED)
        for name in ("lr", "lr_anneal", "clip", "weight_decay", "timeout_s"):
            within(name, getattr(self, name), 0, MAX_FLOAT)  # neither NaN nor Inf
        for name in ("lr", "lr_anneal", "timeout_s"):
            within(name, getattr(self, name), 0, open_low=True)
        within("density", self.density, 0, 1, open_low=True)
        self.algorithm()  # refuses what the algorithm would, before any worker starts

    def algorithm(self) -> Algorithm:
        """Return the algorithm of the sparse steps."""
        known = ALGORITHMS[self.compressor].__dataclass_fields__
        chosen = {name: getattr(self, name) for name in ("density", "ranking", "mode", "wire") if name in known}
        return make_algorithm(self.compressor, **{name: value for name, value in chosen.items() if value != AUTO})

    @property
    def is_dense(self) -> bool:
        """Whether no step is sparse, however long the run."""
        return self.compressor == "dense"

    def augmentation(self) -> Augmentation | None:
        """Return how the training utterances are varied."""
        return Augmentation() if self.augment else None

    def rates_at(self, epoch: int, phase: str) -> Rates:
        """Return the learning rate and the momentum of the optimizer in a dense or a sparse step of an epoch."""
        lr = self.lr_at(epoch)
        if self.momentum_correction:
            return Rates(lr, 0.0)
        momentum = min(self.momentum, self.sparse_momentum) if phase == "sparse" else self.momentum
        return Rates(lr * (1 - momentum) / (1 - self.momentum) if momentum != self.momentum else lr, momentum)

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch's dense steps, from 0."""
        return self.lr / self.lr_anneal**epoch

    def to_json(self) -> str:
        """Return the settings, one a line."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str, path: Path) -> Config:
        """Return the settings that `to_json` wrote."""
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ValueError("wanted an object with a value for each setting")
            return make_config(values)
        except ValueError as error:  # of JSON, or of a setting
            raise SettingError(f"{path} is no config of a run: {error}") from error


def make_config(values: Mapping[str, Any]) -> Config:
    """Return a config of these values; text is read as the setting's type, an unknown name is an error with a hint."""
    known = {each.name: each for each in fields(Config)}
    return Config(**{one_of("setting", name, known): _read(known[name], value) for name, value in values.items()})


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """Return {"key": "value"} for each "key=value"."""
    parsed = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingError(f"--set wants key=value, not {pair!r}")
        parsed[name.strip().replace("-", "_")] = value.strip()
    return parsed


def describe_settings() -> list[tuple[str, str, str]]:
    """Return (name, default, help) of every setting."""
    return [(each.name, _shown(each), str(each.metadata["help"])) for each in fields(Config)]


def _shown(each: Field[Any]) -> str:
    assert each.default is not MISSING
    return str(each.default).lower() if isinstance(each.default, bool) else str(each.default)


def _read(each: Field[Any], value: Any) -> Any:
    kind = type(each.default)
    wanted = {bool: "yes or no", int: "a whole number", float: "a number", str: "text"}[kind]
    try:
        return _converted(kind, value)
    except ValueError:
        raise SettingError(f"{each.name} wants {wanted}, not {value!r} ({each.metadata['help']})") from None


def _converted(kind: type, value: Any) -> Any:
    """Return the value as `kind`: as it is, or read from text; a number stays what it is."""
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, str):
        return _read_bool(value) if kind is bool else kind(value)
    raise ValueError(value)


def _read_bool(text: str) -> bool:
    if text.lower() in (*ON, *OFF):
        return text.lower() in ON
    raise ValueError(text)
