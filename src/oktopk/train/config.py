"""`Config`: every setting of a training run with its default, its help text and its limits."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

import torch

from oktopk.algorithms import ALGORITHMS, Algorithm, make_algorithm, settings_of
from oktopk.algorithms.base import AUTO
from oktopk.ddp.local import OUTER
from oktopk.ddp.momentum import ADAM, SGD, Rates, lr_factor
from oktopk.errors import SettingError, one_of, within
from oktopk.train.models import MODELS
from oktopk.train.models.gpt import SIZES

BOOLEANS = {"yes": True, "on": True, "true": True, "1": True, "no": False, "off": False, "false": False, "0": False}
WANTED = {bool: "yes or no", int: "a whole number", float: "a number", str: "text"}
MAX_FLOAT = sys.float_info.max
"""Upper limit of every number that has none of its own; it refuses NaN and Inf."""
MAX_SEED = 2**63 - 1
SPEECH, TEXT = ("an4", "synth-an4"), ("text", "python")
"""Data sets by what their nets learn."""
WARM_UP = 0.04
"""Part of a run over which AdamW's and Muon's learning rate rises; it then falls to 0, linearly both."""
MAX_MOMENTUM = 0.9999
"""Upper limit of a momentum, because at 1 a gradient would move the weights for the rest of the run."""


def setting(default: Any, text: str, choices: Collection[str] = (), **limits: float) -> Any:
    """Return a field with its help text, and the choices of a text or the limits of a number, as of `within`."""
    limits = {"low": 0, "high": MAX_FLOAT, **limits}
    return field(default=default, metadata={"help": text, "choices": choices, "limits": limits})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run: a recipe gives some, flags and `--set key=value` others, and the defaults are here."""

    recipe: str = setting("", "recipe that the settings began with")
    dnn: str = setting(
        "lstman4-small",
        "net: lstman4 (27.6 M parameters) or lstman4-small (1.06 M) for speech; gpt-tiny (0.43 M), gpt-30m (31.6 M) or "
        "gpt-124m (126 M) for text",
        MODELS,
    )
    dataset: str = setting(
        "synth-an4",
        "an4: the manifests in data_dir; synth-an4: speech made offline, once; text: the text in data_dir; python: the "
        "sources of Python's standard library",
        (*SPEECH, *TEXT),
    )
    data_dir: str = setting("", "folder that oktopk data made; if empty, data made offline goes into a cache folder")
    utterances: int = setting(948, "synth-an4: utterances to train on; gpt: windows of text in an epoch", low=1)
    val_utterances: int = setting(130, "synth-an4, gpt: utterances or windows to validate with", low=1)
    grammar: str = setting(
        "an4", "synth-an4: an4, or commands (digits and commands only: quick to learn)", ("an4", "commands")
    )
    augment: bool = setting(False, "vary speed and gain of the training utterances")

    max_epochs: int = setting(30, "passes over the training data", low=1)
    max_steps: int = setting(0, "steps after which the run ends, if its epochs have more; 0: no limit")
    batch_size: int = setting(8, "utterances, or windows of text, of each worker in a forward pass", low=1)
    nsteps_update: int = setting(1, "forward passes a step; the exchange gets the mean of their gradients", low=1)
    optimizer: str = setting(
        "sgd",
        "sgd; adamw; muon, with adamw for embeddings and vectors. Both but sgd let lr rise first and fall to 0",
        ("sgd", "adamw", "muon"),
    )
    lr: float = setting(0.001, "learning rate of the first epoch", open_low=True)
    lr_anneal: float = setting(1.01, "divisor of the learning rate after each epoch", open_low=True)
    momentum: float = setting(0.9, "Nesterov momentum of SGD, or beta1 of AdamW", high=MAX_MOMENTUM)
    sparse_momentum: float = setting(
        0.5,
        "momentum in sparse steps, if it is less; SGD's lr rises so that lr / (1 - momentum) stays",
        high=MAX_MOMENTUM,
    )
    clip: float = setting(400.0, "largest norm of the gradient; 0: no limit")
    clip_place: str = setting(
        "global",
        "global: clip the mean after the exchange; local: clip each worker's gradient before it, to "
        "clip / sqrt(workers). Dense steps are clipped globally",
        ("global", "local"),
    )

    compressor: str = setting("oktopk", "algorithm: " + ", ".join(sorted(ALGORITHMS)), ALGORITHMS)
    local_steps: int = setting(
        0, "H: steps that each worker makes alone between two exchanges; 0: every step exchanges"
    )
    outer: str = setting(
        "sgd",
        "local steps: move by the mean of the workers' movements, or nesterov (DiLoCo's, with the compressor dense)",
        OUTER,
    )
    density: float = setting(0.03, "part of the gradient that a sparse step sends", high=1, open_low=True)
    dense_steps: int = setting(128, "dense steps before the first sparse one")
    ranking: str = setting("magnitude", "oktopk: select by magnitude, or scaled (by the rms of the row's gradient)")
    wire: str = setting(AUTO, "values on the wire: fp32, bf16 or int8; auto: int8 with oktopk on a CPU, else fp32")

    seed: int = setting(0, "seed of weights, order and augmentation", high=MAX_SEED)
    precision: str = setting(
        AUTO, "of the passes: fp32, or bf16 by autocast; auto: bf16 for gpt on a GPU", (AUTO, "fp32", "bf16")
    )
    device: str = setting("auto", "auto: a GPU if there is one; cpu; cuda", ("auto", "cpu", "cuda"))
    threads: int = setting(0, "CPU threads of each worker; 0: its share of the cores")
    timeout_s: float = setting(300.0, "seconds that a worker waits for another", open_low=True)
    validate_every: int = setting(1, "epochs from one validation to the next; the last is always validated", low=1)
    checkpoint_every: int = setting(0, "steps from one checkpoint to the next; 0: one at the end of each epoch")
    on_nonfinite: str = setting("raise", "a NaN or Inf: raise an error, or skip (a step of zeros)", ("raise", "skip"))

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if choices:
                one_of(each.name, value, choices)
            elif not isinstance(value, (str, bool)):
                within(each.name, value, **each.metadata["limits"])
        if (self.dataset in TEXT) != self.is_text:
            fitting = " or ".join(TEXT if self.is_text else SPEECH)
            raise SettingError(f"dataset {self.dataset} does not fit the net {self.dnn}, which wants {fitting}")
        if self.local_steps:
            self._check_local_steps()
        self.algorithm()  # refuses what the algorithm refuses, before any worker starts

    def _check_local_steps(self) -> None:
        """Refuse settings of an exchange in every step."""
        if self.dense_steps:
            raise SettingError("local_steps has no dense steps before it: leave dense_steps out, or set it to 0")
        if self.clip_place == "local":
            raise SettingError("local_steps clips each worker's own gradient anyhow: leave clip_place out")

    def algorithm(self) -> Algorithm:
        """Return the algorithm of the sparse steps."""
        known = settings_of(self.compressor)
        chosen = {name: getattr(self, name) for name in ("density", "ranking", "wire") if name in known}
        return make_algorithm(self.compressor, **{name: value for name, value in chosen.items() if value != AUTO})

    @property
    def is_text(self) -> bool:
        """Whether the net continues text; the others recognise speech."""
        return self.dnn in SIZES

    @property
    def unit(self) -> str:
        """The name of a sample."""
        return "window" if self.is_text else "utterance"

    def in_bf16(self, device: torch.device) -> bool:
        """Return whether autocast makes the passes on this device in bfloat16."""
        return self.is_text and device.type == "cuda" if self.precision == AUTO else self.precision == "bf16"

    @property
    def is_dense(self) -> bool:
        """Whether no step is sparse, however long the run."""
        return self.compressor == "dense"

    def rates_at(self, epoch: int, phase: str, part: float = 0.5, workers: int = 1) -> Rates:
        """Return the rates of a dense or a sparse step, `part` of the way through an epoch; epochs count from 0."""
        lr = self.lr / self.lr_anneal**epoch
        if self.optimizer == "sgd":
            return SGD.rates(lr, self.momentum, self.sparse_momentum) if phase == "sparse" else Rates(lr, self.momentum)
        done = (epoch + part) / self.max_epochs
        lr *= min(done / WARM_UP, (1 - done) / (1 - WARM_UP))
        if phase != "sparse":
            return Rates(lr, self.momentum)
        return ADAM.rates(lr, self.momentum, self.sparse_momentum, lr_factor(workers))  # they exchange updates


def make_config(values: Mapping[str, Any]) -> Config:
    """Return a config of these values; text is read as the setting's type."""
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


def _read(each: Field[Any], value: Any) -> Any:
    """Return `value` as the setting's type: as it is, or read from text."""
    kind: type = type(each.default)
    wrong = SettingError(f"{each.name} wants {WANTED[kind]}, not {value!r} ({each.metadata['help']})")
    if not isinstance(value, str):
        if type(value) is kind or (kind, type(value)) == (float, int):
            return kind(value)
        raise wrong
    try:
        return BOOLEANS[value.lower()] if kind is bool else kind(value)
    except (ValueError, KeyError):
        raise wrong from None
