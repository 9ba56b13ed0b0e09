"""Text to continue, byte by byte: a folder that `oktopk data text` made, or the sources of the standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.telemetry.figures import finite
from oktopk.train.config import Config
from oktopk.train.data.errors import DataError
from oktopk.train.data.text import (
    FILES,
    TextBatch,
    Windows,
    make_text,
    read_text,
    standard_library,
    standard_library_name,
)
from oktopk.train.models.gpt import SIZES
from oktopk.train.workload import Workload, cache_dir


class Language(Workload):
    """The bytes of a text; an epoch has `utterances` windows of them."""

    error = "bits_per_byte"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.train, self.val = read_text(self.data_dir_of(config))
        val = self._windows(self.val, samples=config.val_utterances, evaluation=True)
        self.num_train, self.num_val = config.utterances, val.samples
        self.sizes = len(self.train), len(self.val)

    @staticmethod
    def data_dir_of(config: Config) -> Path:
        """Return the folder of the data; Python's sources go into the user's cache unless a folder is named."""
        if config.data_dir:
            return Path(config.data_dir)
        if config.dataset == "text":
            wanted = "dataset text wants a folder; oktopk data text FOLDER --out DIR makes it, and "
            raise DataError("missing", "--data-dir", wanted + "--dataset python does without")
        return cache_dir(standard_library_name())

    @classmethod
    def prepare(cls, config: Config) -> None:
        """Gather the sources of the standard library, unless that is done."""
        if config.dataset == "python" and not cls.is_there(config):
            make_text(standard_library(), cls.data_dir_of(config), force=True)

    @classmethod
    def is_there(cls, config: Config) -> bool:
        """Return whether the text is there, or should be."""
        return config.dataset == "text" or all((cls.data_dir_of(config) / name).exists() for name in FILES)

    def batches(self, workers: int, rank: int = 0) -> tuple[Windows, Windows]:
        """Return the windows of a rank; raise if an epoch would have no step, or a worker nothing to validate with."""
        config = self.config
        size = config.batch_size * config.nsteps_update
        self._windows(self.train, samples=config.utterances, batch_size=size, world_size=workers)
        make = partial(self._windows, rank=rank, world_size=workers)
        val = make(self.val, samples=config.val_utterances, evaluation=True)
        return make(self.train, samples=config.utterances), val

    def _windows(self, content: Tensor, **settings: Any) -> Windows:
        context, config = SIZES[self.config.dnn].context, self.config
        return Windows(content, **{"batch_size": config.batch_size, **settings}, context=context, seed=config.seed)

    def loss(self, net: nn.Module, batch: TextBatch) -> Tensor:
        """Return the cross entropy in nats a byte."""
        scores = net(batch.texts[:, :-1])
        return cross_entropy(scores.float().flatten(0, 1), batch.texts[:, 1:].flatten())

    def loss_per_character(self, figures: Mapping[str, Any]) -> float:
        """Return the loss, which is one of a byte."""
        return float(figures["loss"])

    def evaluate(self, net: nn.Module, batch: TextBatch) -> Sequence[float]:
        """Return the sum of losses, and the number of bytes."""
        return [float(self.loss(net, batch)) * batch.characters, batch.characters]

    def figures(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Return the loss in nats, and in bits a byte."""
        loss = finite(sums[0] / sums[1])
        return {"val_loss": loss, "bits_per_byte": None if loss is None else loss / math.log(2)}
