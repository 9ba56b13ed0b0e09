"""What an experiment wants from a workload, and nothing of what it is: speech (`recognition.py`), images
(`classification.py`), text (`language.py`).

    Recipe      a frozen value that says what is learned and how dense learns it; it travels to the processes that train
    Workload    a recipe with its data on a device: nets, losses of batches, evaluations
    Metric      what an evaluation is compared by
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from oktopk.errors import SettingError, one_of

R = TypeVar("R")


@dataclass(frozen=True)
class Metric:
    """A figure of the evaluation, the less the better: its name to people; the goals that tables ask for by default."""

    label: str
    goals: Sequence[float]
    losses: Sequence[float]


METRICS = {
    "wer": Metric("WER", goals=(0.8, 0.7), losses=(10.0, 5.0)),
    "error": Metric("error", goals=(0.1, 0.07), losses=(0.3, 0.15)),
    "nats": Metric("nats a byte", goals=(1.6, 1.3), losses=(1.6, 1.3)),
}
"""By the name that an evaluation has them under."""


@dataclass(frozen=True)
class Sgd:
    """The recipe's optimizer, but for its learning rate; `clip` 0: none."""

    momentum: float
    nesterov: bool
    clip: float


@dataclass(frozen=True)
class AdamW:
    """The same, of one that has a variance for each element; `momentum` is its first beta."""

    momentum: float
    beta2: float
    weight_decay: float
    clip: float
    eps: float = 1e-8

    nesterov: ClassVar[bool] = False


class Workload(Protocol):
    """A net to train and its data, on a device, for a number of workers. All of it follows from the recipe's seed.

    metric  a name in METRICS
    window  steps over which a training loss is averaged; evaluations come at multiples of it
    """

    metric: str
    window: int

    @property
    def optimizer(self) -> Sgd | AdamW:
        """The recipe's, but for its learning rate."""
        ...

    def make_net(self) -> nn.Module:
        """Return the net with its first weights, on the device; torch's generator is seeded for it."""
        ...

    def lr_at(self, step: int) -> float:
        """Return the dense learning rate of a step."""
        ...

    def loss(self, net: nn.Module, step: int, worker: int) -> Tensor:
        """Return the net's loss on what a worker has in a step."""
        ...

    def evaluate(self, net: nn.Module) -> dict[str, float]:
        """Return the metric, and whatever else is worth a curve, on data that is not trained on."""
        ...


class Recipe(Protocol):
    """What is learned, from which weights and in which order."""

    @property
    def seed(self) -> int:
        """The seed of weights and order."""
        ...

    @property
    def steps(self) -> int:
        """How long a training is."""
        ...

    @property
    def dense_steps(self) -> int:
        """How many of them are dense, where neither a setting nor the command line says otherwise."""
        ...

    @property
    def workers(self) -> int:
        """How many there are by default."""
        ...

    @property
    def data(self) -> str:
        """The name of the data, where no packed file is given."""
        ...

    @property
    def metric(self) -> str:
        """The workload's."""
        ...

    def with_seed(self, seed: int) -> Recipe:
        """Return the same with other weights and in another order."""
        ...

    def open(self, corpus: Path | None, workers: int, device: torch.device) -> Workload:
        """Return the workload; its data is a packed file, or else what the recipe says."""
        ...

    def pack(self, path: Path) -> None:
        """Write what the recipe says as one file."""
        ...


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says about the data and the recipe; None: nothing."""

    data_dir: Path | None = None
    corpus: Path | None = None
    batch: int | None = None
    steps: int | None = None
    pairs: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class FolderRecipe:
    """A recipe whose data is read from a folder or a packed file by `source`, once in a process."""

    data_dir: str = ""
    seed: int = 0
    workers: int = 4

    source: ClassVar[Any]

    @classmethod
    def asked(cls: type[R], asked: Asked) -> R:
        """Return the recipe with what is asked for."""
        given: dict[str, Any] = {"batch_size": asked.batch, "steps": asked.steps}
        given["data_dir"] = str(asked.data_dir) if asked.data_dir else ""
        return changed(cls(), given, asked.pairs)

    def with_seed(self: R, seed: int) -> R:
        """Return the same with other weights and in another order."""
        return replace(self, seed=seed)  # type: ignore[type-var]

    def content(self, corpus: Path | None) -> Any:
        """Return the data."""
        return _content(self.source, corpus, self.data_dir)

    def pack(self, path: Path) -> None:
        """Write the data as one file."""
        self.content(None).save(path)


@lru_cache(maxsize=1)
def _content(source: Any, corpus: Path | None, data_dir: str) -> Any:
    if corpus is not None:
        return source.load(corpus)
    if not data_dir:
        raise SettingError("the recipe wants --data-dir, a folder with its data, or --corpus, a packed file")
    return source.read(Path(data_dir))


def changed(recipe: R, given: dict[str, Any], pairs: Sequence[tuple[str, str]]) -> R:
    """Return the recipe, a dataclass of plain fields, with what is given and not None, and with what `--set` says."""
    known = {each.name: type(each.default) for each in fields(recipe)}  # type: ignore[arg-type]
    changes = {one_of("setting of the recipe", name, known): _read(name, known[name], text) for name, text in pairs}
    return replace(recipe, **{name: value for name, value in (given | changes).items() if value is not None})  # type: ignore[type-var]


def _read(name: str, kind: type, text: str) -> Any:
    try:
        return text == "yes" if kind is bool else kind(text)
    except ValueError:
        raise SettingError(f"{name} wants a {kind.__name__}, not {text!r}") from None
