"""Batches of a corpus: neighbours in length together, reshuffled every epoch, each rank its own share.

The utterances of a step are a function of (seed, epoch, rank), and the variation of an utterance one of (seed, epoch,
utterance), so that a resumed run sees the same batches as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oktopk.errors import SettingError, within
from oktopk.train.data.audio import FULL_SCALE, read_pcm
from oktopk.train.data.features import BINS, HOP_SAMPLES, Augmentation, spectrogram
from oktopk.train.data.labels import ctc_frames, encode
from oktopk.train.data.manifest import TIME_STRIDE, Utterance

CACHE_BYTES = 1 << 30

# Durations are blurred by up to this part before they are sorted, so that the neighbours differ from epoch to epoch.
_JITTER = 0.1
_ORDER, _VARIATION = 1, 2  # purposes of a generator: the same (seed, epoch) must not give both the same numbers


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some utterances, ready for the model and the loss.

    inputs           [B, 1, 161, T]: spectrograms, zeros beyond their frames
    frames           [B]: frames of each that count
    targets          [sum of target_lengths]: the labels of all texts, one after the other
    target_lengths   [B]
    indices          the utterances' places in the corpus
    """

    inputs: Tensor
    frames: Tensor
    targets: Tensor
    target_lengths: Tensor
    indices: tuple[int, ...]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with `inputs` and `targets` on `device`; the loss wants the lengths on the CPU."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


class Batches:
    """The batches of one rank.

    For training each epoch has the same number of steps on every rank and uses an utterance at most once. Up to
    `batch_size * world_size - 1` utterances fill no step; they are others every epoch. For `evaluation` every
    utterance comes once over all ranks, in the order of length; a rank may have one step fewer than another, and its
    last step may be smaller.

    batch_size     utterances of a step on each rank
    seed           of the order and of the augmentation
    augmentation   how utterances are varied; None leaves them alone
    cache_bytes    memory for recordings or spectrograms, so that the disk is read once
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        evaluation: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        within("batch_size", batch_size, 1)
        within("world_size", world_size, 1)
        within("rank", rank, 0, world_size - 1)
        within("seed", seed, 0)
        if evaluation and augmentation is not None:
            raise SettingError("an evaluation wants the recordings as they are: leave the augmentation out")
        _check_enough(len(utterances), batch_size, world_size, evaluation)
        self.utterances = list(utterances)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.seed, self.augmentation, self.evaluation = seed, augmentation, evaluation
        self._durations = torch.tensor([utterance.duration_s for utterance in utterances], dtype=torch.float64)
        self._cache = _Cache(cache_bytes)

    def __len__(self) -> int:
        """Return the steps of an epoch on this rank."""
        if self.evaluation:
            return -(-len(range(self.rank, len(self.utterances), self.world_size)) // self.batch_size)
        return len(self.utterances) // (self.batch_size * self.world_size)

    def plan(self, epoch: int) -> list[list[int]]:
        """Return the utterances of each step of this rank."""
        if self.evaluation:
            share: list[int] = self._durations.argsort(stable=True).tolist()[self.rank :: self.world_size]
            return [share[at : at + self.batch_size] for at in range(0, len(share), self.batch_size)]
        first = self.rank * self.batch_size
        steps: list[list[int]] = self._neighbourhoods(epoch)[:, first : first + self.batch_size].tolist()
        return steps

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_step` on; nothing is read for the steps before it.

        Each is made when it is asked for: a thread that makes the next one ahead gains nothing where every core has
        a worker (0.144 s a step with it, 0.140 without; two workers, two cores).
        """
        within("epoch", epoch, 0)
        within("start_step", start_step, 0, len(self))
        return (self._batch(epoch, indices) for indices in self.plan(epoch)[start_step:])

    def _neighbourhoods(self, epoch: int) -> Tensor:
        """Return [steps, batch_size * world_size]: utterances of similar length, the steps in random order."""
        generator = _generator(_ORDER, self.seed, epoch)
        steps, size, total = len(self), self.batch_size * self.world_size, len(self.utterances)
        used = torch.randperm(total, generator=generator)[: steps * size]
        blur = 1 + _JITTER * (2 * torch.rand(total, generator=generator, dtype=torch.float64) - 1)
        by_length = used[(self._durations * blur)[used].argsort(stable=True)].view(steps, size)
        # Within a step too, or the last rank would have the longest utterances every time.
        within_step = torch.rand(steps, size, generator=generator, dtype=torch.float64).argsort(stable=True)
        return by_length.gather(1, within_step)[torch.randperm(steps, generator=generator)]

    def _batch(self, epoch: int, indices: list[int]) -> Batch:
        spectrograms = [self._spectrogram(epoch, index) for index in indices]
        targets = [encode(self.utterances[index].text) for index in indices]
        frames = torch.tensor([each.shape[1] for each in spectrograms])
        inputs = torch.zeros(len(indices), 1, BINS, int(frames.max()))
        for row, each in zip(inputs, spectrograms, strict=True):
            row[0, :, : each.shape[1]] = each
        return Batch(
            inputs=inputs,
            frames=frames,
            targets=torch.tensor([label for target in targets for label in target], dtype=torch.int64),
            target_lengths=torch.tensor([len(target) for target in targets]),
            indices=tuple(indices),
        )

    def _spectrogram(self, epoch: int, index: int) -> Tensor:
        """Return an utterance's spectrogram in an epoch; the cache holds that, or the samples where they vary."""
        utterance = self.utterances[index]
        if self.augmentation is None:
            return self._cache.get(index, lambda: spectrogram(_floats(_read(utterance))))
        samples = _floats(self._cache.get(index, lambda: _read(utterance)))
        fewest = HOP_SAMPLES * TIME_STRIDE * (ctc_frames(encode(utterance.text)) - 1)  # that can spell the text
        return spectrogram(self.augmentation.apply(samples, _generator(_VARIATION, self.seed, epoch, index), fewest))


def _check_enough(total: int, batch_size: int, world_size: int, evaluation: bool) -> None:
    if evaluation and total < world_size:
        raise SettingError(
            f"there are {total} utterances to evaluate for {world_size} workers, which wants one each: "
            "use fewer workers or more data"
        )
    if not evaluation and total < batch_size * world_size:
        raise SettingError(
            f"a step takes {batch_size} utterances on each of {world_size} workers, {batch_size * world_size} in all, "
            f"and there are {total}: use a smaller batch size, fewer workers or more data"
        )


def _read(utterance: Utterance) -> Tensor:
    return torch.from_numpy(read_pcm(utterance.wav))


def _floats(samples: Tensor) -> Tensor:
    return samples.float() / FULL_SCALE


class _Cache:
    """Tensors by key, up to a number of bytes.

    None is thrown out: an epoch uses each once, so that the oldest is the one that is wanted next.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes
        self._tensors: dict[int, Tensor] = {}

    def get(self, key: int, make: Callable[[], Tensor]) -> Tensor:
        if key in self._tensors:
            return self._tensors[key]
        made = make()
        if made.nbytes <= self._left_bytes:
            self._left_bytes -= made.nbytes
            self._tensors[key] = made
        return made


def _generator(*words: int) -> torch.Generator:
    """Return a generator seeded by all the words; neighbouring words give unrelated numbers."""
    state = np.random.SeedSequence(words).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)  # torch takes 63 bits without wrapping
