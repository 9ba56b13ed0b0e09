"""The utterances of a run: a folder with manifests, or synthetic speech that is made once."""

import os
from pathlib import Path
from typing import NamedTuple, cast

from oktopk.train.config import Config
from oktopk.train.data.errors import DataError
from oktopk.train.data.grammar import Grammar
from oktopk.train.data.loader import Batches
from oktopk.train.data.manifest import TRAIN_MANIFEST, VAL_MANIFEST, Utterance, read_manifest
from oktopk.train.data.synth import make_speech


class Corpus(NamedTuple):
    """The utterances to train on and to validate with."""

    train: list[Utterance]
    val: list[Utterance]


def data_dir_of(config: Config) -> Path:
    """Return the folder of the data; synthetic speech goes into the user's cache unless a folder is named."""
    if config.data_dir:
        return Path(config.data_dir)
    if config.dataset == "an4":
        wanted = "dataset an4 wants the folder with its manifests; oktopk data an4 ARCHIVE --out DIR makes it, and "
        raise DataError("missing", "--data-dir", wanted + "--dataset synth-an4 does without the corpus")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "oktopk" / f"synth-an4-{config.grammar}-{config.utterances}-{config.val_utterances}"


def prepare(config: Config) -> None:
    """Make the synthetic speech of the settings, unless it is there."""
    if config.dataset == "synth-an4":
        grammar = cast(Grammar, config.grammar)
        make_speech(data_dir_of(config), config.utterances, val_utterances=config.val_utterances, grammar=grammar)


def check_enough(config: Config, corpus: Corpus, workers: int) -> None:
    """Refuse a run whose epochs would have no step, or whose workers would have nothing to validate with."""
    Batches(corpus.train, batch_size=config.batch_size * config.nsteps_update, world_size=workers)
    Batches(corpus.val, batch_size=config.batch_size, world_size=workers, evaluation=True)


def load(config: Config) -> Corpus:
    """Return the utterances; a file that would stop the training later is named in an error now."""
    folder = data_dir_of(config)
    if not folder.is_dir():
        raise DataError("missing", folder, "there is no such folder; oktopk data an4 ARCHIVE --out DIR makes one")
    return Corpus(read_manifest(folder / TRAIN_MANIFEST), read_manifest(folder / VAL_MANIFEST))
