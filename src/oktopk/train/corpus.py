"""Where a run's utterances come from: a folder with manifests, or speech that is made when it is not there yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from oktopk.train.config import Config
from oktopk.train.data.errors import DataError
from oktopk.train.data.folder import TRAIN_MANIFEST, VAL_MANIFEST
from oktopk.train.data.grammar import Grammar
from oktopk.train.data.loader import Batches
from oktopk.train.data.manifest import Utterance, read_manifest
from oktopk.train.data.synth import make_speech


@dataclass(frozen=True)
class Corpus:
    """What is trained on and what is validated with."""

    train: list[Utterance]
    val: list[Utterance]


def data_dir_of(config: Config) -> Path:
    """Return the folder of the data; without a name, synthetic speech goes into the user's cache."""
    if config.data_dir:
        return Path(config.data_dir)
    if config.dataset == "an4":
        raise DataError(
            "missing",
            "--data-dir",
            "dataset an4 wants the folder with its manifests; oktopk data an4 ARCHIVE --out DIR makes it, and "
            "--dataset synth-an4 does without the corpus",
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "oktopk" / f"synth-an4-{config.grammar}-{config.utterances}-{config.val_utterances}"


def prepare(config: Config) -> None:
    """Make synthetic speech, if that is wanted and not there."""
    if config.dataset == "synth-an4":
        make_speech(
            data_dir_of(config),
            config.utterances,
            val_utterances=config.val_utterances,
            grammar=cast(Grammar, config.grammar),
        )


def check_enough(config: Config, corpus: Corpus, workers: int) -> None:
    """Refuse a run whose epochs would have no step, or whose workers would have nothing to validate with."""
    Batches(corpus.train, batch_size=config.batch_size * config.nsteps_update, world_size=workers)
    Batches(corpus.val, batch_size=config.batch_size, world_size=workers, evaluation=True)


def load(config: Config) -> Corpus:
    """Return the utterances; whatever would stop the training later is an error that names the file, now."""
    folder = data_dir_of(config)
    if not folder.is_dir():
        raise DataError("missing", folder, "there is no such folder; oktopk data an4 ARCHIVE --out DIR makes one")
    return Corpus(read_manifest(folder / TRAIN_MANIFEST), read_manifest(folder / VAL_MANIFEST))
