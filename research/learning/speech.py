"""The corpus in memory: recordings as one packed file that can be carried, spectrograms on the device, batches of them.

The order of the data is the trainer's (`Batches.plan`): a function of seed, epoch and worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oktopk.train.config import Config
from oktopk.train.data.audio import FULL_SCALE, RATE_HZ, read_pcm
from oktopk.train.data.features import Augmentation, spectrogram
from oktopk.train.data.labels import encode
from oktopk.train.data.loader import Batch, Batches
from oktopk.train.data.manifest import Utterance

VAL_BATCH = 64


@dataclass(frozen=True)
class Recordings:
    """What is trained on, then what is validated with: int16 samples and texts, `num_train` of them the former."""

    samples: Sequence[Tensor]
    texts: Sequence[str]
    num_train: int

    def save(self, path: Path) -> None:
        """Write one file, half as large as the samples: their differences, low and high bytes apart, deflated."""
        gaps = np.diff(torch.cat(list(self.samples)).numpy(), prepend=np.int16(0))
        planes = ((gaps << 1) ^ (gaps >> 15)).view(np.uint8).reshape(-1, 2).T.tobytes()  # the sign comes last
        deflate = zlib.compressobj(strategy=zlib.Z_RLE)  # quicker than to look for repeats in noise, and smaller
        packed = torch.frombuffer(bytearray(deflate.compress(planes) + deflate.flush()), dtype=torch.uint8)
        lengths = [len(each) for each in self.samples]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"packed": packed, "lengths": lengths, "texts": list(self.texts), "train": self.num_train}, path)

    @staticmethod
    def load(path: Path) -> Recordings:
        """Read what `save` wrote; the same samples."""
        saved = torch.load(path, weights_only=True)
        planes = np.frombuffer(zlib.decompress(saved["packed"].numpy().tobytes()), np.uint8)
        folded = np.ascontiguousarray(planes.reshape(2, -1).T).view(np.uint16).ravel()
        joined = np.cumsum(((folded >> 1) ^ -(folded & 1)).view(np.int16), dtype=np.int16)
        return Recordings(torch.split(torch.from_numpy(joined), saved["lengths"]), saved["texts"], saved["train"])

    @staticmethod
    def read(config: Config) -> Recordings:
        """Read the folder that a run of the trainer would; speech is made if that is wanted and not there."""
        from oktopk.train.speech import Speech as Corpus  # not where a packed file is all there is

        Corpus.prepare(config)
        corpus = Corpus(config)
        utterances = [*corpus.train, *corpus.val]
        samples = [torch.from_numpy(read_pcm(utterance.wav)) for utterance in utterances]
        return Recordings(samples, [utterance.text for utterance in utterances], len(corpus.train))


class Speech:
    """Batches on the device, for the workers and for the evaluation."""

    def __init__(
        self,
        recordings: Recordings,
        *,
        seed: int,
        workers: int,
        batch_size: int,
        device: torch.device,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._recordings, self._seed, self._device, self._augmentation = recordings, seed, device, augmentation
        self._targets = [torch.tensor(encode(text), device=device) for text in recordings.texts]
        plain = enumerate(recordings.samples)
        skipped = recordings.num_train if augmentation else 0
        self._plain = {i: self._spectrogram(_floats(each)) for i, each in plain if i >= skipped}
        utterances = [_utterance(*both) for both in zip(recordings.samples, recordings.texts, strict=True)]
        train, self._num_val = utterances[: recordings.num_train], len(utterances) - recordings.num_train
        self._plans = [
            Batches(train, batch_size=batch_size, rank=rank, world_size=workers, seed=seed) for rank in range(workers)
        ]
        self.steps_per_epoch = len(self._plans[0])

    def batch(self, step: int, worker: int) -> Batch:
        """Return what a worker has in a step, counted over all epochs."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        chosen = self._plans[worker].plan(epoch)[step_of_epoch]
        return self._batch([self._features(epoch, i) for i in chosen], chosen)

    def val_batches(self) -> Iterator[Batch]:
        """Yield what is validated with, in order."""
        everything = range(self._recordings.num_train, self._recordings.num_train + self._num_val)
        for first in everything[::VAL_BATCH]:
            chosen = list(range(first, min(first + VAL_BATCH, everything.stop)))
            yield self._batch([self._plain[i] for i in chosen], chosen)

    def _features(self, epoch: int, index: int) -> Tensor:
        if self._augmentation is None:
            return self._plain[index]
        words = np.random.SeedSequence((self._seed, epoch, index)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(words[0]) >> 1)
        samples, text = _floats(self._recordings.samples[index]), self._recordings.texts[index]
        return self._spectrogram(self._augmentation.apply(samples, text, generator))

    def _spectrogram(self, samples: Tensor) -> Tensor:
        """Return [frames, bins]."""
        return spectrogram(samples.to(self._device)).t().contiguous()

    def _batch(self, features: list[Tensor], indices: list[int]) -> Batch:
        targets = [self._targets[i] for i in indices]
        return Batch(
            inputs=pad_sequence(features, batch_first=True).transpose(1, 2).unsqueeze(1).contiguous(),
            frames=torch.tensor([len(each) for each in features]),
            targets=torch.cat(targets),
            target_lengths=torch.tensor([len(target) for target in targets]),
            indices=tuple(indices),
        )


def _floats(samples: Tensor) -> Tensor:
    return samples.float() / FULL_SCALE


def _utterance(samples: Tensor, text: str) -> Utterance:
    return Utterance(Path(), text, len(samples) / RATE_HZ)
