"""`Workload`: the data of a run, its loss and its figures. Speech and text have a class each, in a file each."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from oktopk.train.config import Config


class AnyBatch(Protocol):
    """Samples of one forward pass."""

    @property
    def utterances(self) -> int:
        """The number of samples."""
        ...

    @property
    def characters(self) -> int:
        """The number of characters or bytes in them."""
        ...

    def to(self, device: torch.device | str) -> AnyBatch:
        """Return the batch on a device."""
        ...


class AnyBatches(Protocol):
    """The batches of one rank, the same whenever they are asked for."""

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Any]:
        """Return the batches of an epoch from `start_step` on."""
        ...

    def order(self, epoch: int) -> Sequence[int]:
        """Return all samples of an epoch, each once, in an order that does not depend on the ranks."""
        ...

    def batch(self, epoch: int, samples: Sequence[int]) -> Any:
        """Return these samples of an epoch as a batch."""
        ...


class Workload(ABC):
    """The data of the settings, as `load` finds it.

    num_train, num_val    samples of an epoch, and to validate with
    sizes                 of the data itself, by which workers of several machines see that they read the same
    """

    error: ClassVar[str]  # the figure of a validation, the less the better, that chooses the best epoch
    num_train: int
    num_val: int
    sizes: tuple[int, int]

    def __init__(self, config: Config) -> None:
        self.config = config

    @staticmethod
    @abstractmethod
    def data_dir_of(config: Config) -> Path:
        """Return the folder of the data."""

    @classmethod
    @abstractmethod
    def prepare(cls, config: Config) -> None:
        """Make the data that is made offline, unless it is there."""

    @classmethod
    @abstractmethod
    def is_there(cls, config: Config) -> bool:
        """Return whether the data is there; `prepare` makes it else, or `load` raises."""

    @abstractmethod
    def batches(self, workers: int, rank: int = 0) -> tuple[AnyBatches, AnyBatches]:
        """Return the batches of a rank to train on and to validate with; raise if there are too few samples."""

    @abstractmethod
    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""

    @abstractmethod
    def loss_per_character(self, figures: Mapping[str, Any]) -> float:
        """Return the loss of a rank's step as one of a character or byte."""

    @abstractmethod
    def evaluate(self, net: nn.Module, batch: Any) -> Sequence[float]:
        """Return numbers of a validation batch that are summed over batches and ranks."""

    @abstractmethod
    def figures(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Return the figures of an epoch's record of these sums."""


def cache_dir(name: str) -> Path:
    """Return a folder in the user's cache for data that is made offline."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oktopk" / name
