"""Speech to recognise: a folder with manifests, or synthetic speech that is made once. CTC, WER and CER."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from oktopk.telemetry.figures import finite
from oktopk.train.config import Config
from oktopk.train.ctc import count_edits, ctc_loss, error_rates, greedy, references
from oktopk.train.data.errors import DataError
from oktopk.train.data.features import Augmentation
from oktopk.train.data.grammar import Grammar
from oktopk.train.data.loader import Batch, Batches
from oktopk.train.data.manifest import TRAIN_MANIFEST, VAL_MANIFEST, read_manifest
from oktopk.train.data.synth import make_speech
from oktopk.train.workload import Workload, cache_dir


class Speech(Workload):
    """Utterances; a file that would stop the training later is named in an error now."""

    error = "wer"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        folder = self.data_dir_of(config)
        if not folder.is_dir():
            raise DataError("missing", folder, "there is no such folder; oktopk data an4 ARCHIVE --out DIR makes one")
        self.train, self.val = (read_manifest(folder / name) for name in (TRAIN_MANIFEST, VAL_MANIFEST))
        self.num_train, self.num_val = self.sizes = len(self.train), len(self.val)

    @staticmethod
    def data_dir_of(config: Config) -> Path:
        """Return the folder of the data; synthetic speech goes into the user's cache unless a folder is named."""
        if config.data_dir:
            return Path(config.data_dir)
        if config.dataset == "an4":
            wanted = "dataset an4 wants the folder with its manifests; oktopk data an4 ARCHIVE --out DIR makes it, and "
            raise DataError("missing", "--data-dir", wanted + "--dataset synth-an4 does without the corpus")
        return cache_dir(f"synth-an4-{config.grammar}-{config.utterances}-{config.val_utterances}")

    @classmethod
    def prepare(cls, config: Config) -> None:
        """Make the synthetic speech of the settings, unless it is there."""
        if config.dataset == "synth-an4":
            grammar, folder = cast(Grammar, config.grammar), cls.data_dir_of(config)
            make_speech(folder, config.utterances, val_utterances=config.val_utterances, grammar=grammar)

    @classmethod
    def is_there(cls, config: Config) -> bool:
        """Return whether there is a manifest, or should be."""
        return config.dataset == "an4" or (cls.data_dir_of(config) / TRAIN_MANIFEST).exists()

    def batches(self, workers: int, rank: int = 0) -> tuple[Batches, Batches]:
        """Return the batches of a rank; raise if an epoch would have no step, or a worker nothing to validate with."""
        config = self.config
        Batches(self.train, batch_size=config.batch_size * config.nsteps_update, world_size=workers)
        make = partial(Batches, batch_size=config.batch_size, rank=rank, world_size=workers, seed=config.seed)
        augmentation = Augmentation() if config.augment else None
        return make(self.train, augmentation=augmentation), make(self.val, evaluation=True)

    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of an utterance."""
        log_probs, frames = net(batch.inputs, batch.frames)
        return ctc_loss(log_probs, frames, batch.targets, batch.target_lengths)

    def loss_per_character(self, figures: Mapping[str, Any]) -> float:
        """Return the loss of a character, so that long utterances do not count as high."""
        return float(figures["loss"] * figures["utterances"] / max(1.0, figures["characters"]))

    def evaluate(self, net: nn.Module, batch: Batch) -> Sequence[float]:
        """Return the sum of losses, the number of utterances, and their edits."""
        log_probs, frames = net(batch.inputs, batch.frames)
        loss = ctc_loss(log_probs, frames, batch.targets, batch.target_lengths)
        edits = count_edits(references(batch.targets, batch.target_lengths), greedy(log_probs, frames))
        return [float(loss) * batch.utterances, batch.utterances, *edits]

    def figures(self, sums: Sequence[float]) -> dict[str, float | None]:
        """Return loss, WER and CER."""
        loss_sum, count, *edits = sums
        return {"val_loss": finite(loss_sum / count), **error_rates(edits)}
