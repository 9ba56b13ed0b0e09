"""The trainer's speech recogniser as a workload: the recipes `an4` and `an4-small`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from oktopk.train.config import Config, make_config
from oktopk.train.ctc import count_edits, ctc_loss, error_rates, greedy, references
from oktopk.train.data.features import Augmentation
from oktopk.train.models import make_model
from oktopk.train.recipes import load_recipe
from research.learning.speech import Recordings, Speech
from research.learning.workload import Asked, Sgd

METRIC = "wer"
STEPS, WORKERS = 560, 4


@dataclass(frozen=True)
class SpeechRecipe:
    """The trainer's settings, and how long."""

    config: Config
    steps: int = STEPS
    workers: int = WORKERS

    metric: ClassVar[str] = METRIC
    dense_steps: ClassVar[int] = 128

    @property
    def seed(self) -> int:
        """The trainer's."""
        return self.config.seed

    @property
    def data(self) -> str:
        """The trainer's."""
        return self.config.dataset

    def with_seed(self, seed: int) -> SpeechRecipe:
        """Return the same with other weights and in another order."""
        return replace(self, config=replace(self.config, seed=seed))

    def open(self, corpus: Path | None, workers: int, device: torch.device) -> Recognition:
        """Return the workload; recordings are read once in a process."""
        config = self.config
        speech = Speech(
            _recordings(corpus, replace(config, seed=0)),
            seed=config.seed,
            workers=workers,
            batch_size=config.batch_size,
            device=device,
            augmentation=Augmentation() if config.augment else None,
        )
        return Recognition(config, speech, device)

    def pack(self, path: Path) -> None:
        """Write the recordings as one file."""
        Recordings.read(self.config).save(path)


class Recognition:
    """Speech, and the net that writes it down; CTC, greedy decoding."""

    metric = METRIC

    def __init__(self, config: Config, speech: Speech, device: torch.device) -> None:
        self.config, self.speech, self.device = config, speech, device
        self.window = speech.steps_per_epoch
        self.optimizer = Sgd(config.momentum, True, config.clip)

    def make_net(self) -> nn.Module:
        """Return the trainer's net."""
        torch.manual_seed(self.config.seed)
        return make_model(self.config.dnn).to(self.device)

    def lr_at(self, step: int) -> float:
        """Return the trainer's: a little less after each epoch."""
        return self.config.rates_at(step // self.speech.steps_per_epoch, "dense").lr

    def loss(self, net: nn.Module, step: int, worker: int) -> Tensor:
        """Return the CTC loss of a batch."""
        batch = self.speech.batch(step, worker)
        log_probs, frames = net(batch.inputs, batch.frames)
        return ctc_loss(log_probs, frames, batch.targets, batch.target_lengths)

    def evaluate(self, net: nn.Module) -> dict[str, float]:
        """Return WER, CER and loss over what is validated with."""
        said, written, loss_sum = list[str](), list[str](), 0.0
        for batch in self.speech.val_batches():
            log_probs, frames = net(batch.inputs, batch.frames)
            loss = ctc_loss(log_probs, frames, batch.targets, batch.target_lengths)
            loss_sum += float(loss) * len(frames)
            said += references(batch.targets, batch.target_lengths)
            written += greedy(log_probs, frames)
        rates = error_rates(count_edits(said, written))
        return {"wer": rates["wer"] or 0.0, "cer": rates["cer"] or 0.0, "val_loss": loss_sum / len(said)}


def recipe_of(name: str, **ours: Any) -> Callable[[Asked], SpeechRecipe]:
    """Return what makes a recipe of the trainer's, of what is other here, and of what is asked for."""

    def make(asked: Asked) -> SpeechRecipe:
        recipe = load_recipe(name)
        given = {"data_dir": str(asked.data_dir)} if asked.data_dir else {}
        given |= {"batch_size": asked.batch} if asked.batch else {}
        # with a packed corpus no folder is looked at
        here = {key: value for key, value in ours.items() if key != "dataset" or (asked.data_dir and not asked.corpus)}
        config = make_config(recipe.settings | here | given | dict(asked.pairs) | {"recipe": name})
        workers = WORKERS if recipe.nproc == 1 else recipe.nproc
        return SpeechRecipe(config, steps=asked.steps or STEPS, workers=workers)

    return make


@lru_cache(maxsize=1)
def _recordings(corpus: Path | None, config: Config) -> Recordings:
    return Recordings.read(config) if corpus is None else Recordings.load(corpus)
