"""Batches of a corpus: neighbours in length together, reshuffled every epoch, each rank its own share.

The utterances of a step are a function of (seed, epoch, rank), and the variation of an utterance one of (seed, epoch,
utterance), so that a resumed run sees the same batches as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oktopk.errors import SettingError, within
from oktopk.telemetry.format import count
from oktopk.train.data.audio import FULL_SCALE, read_pcm
from oktopk.train.data.features import BINS, Augmentation, spectrogram
from oktopk.train.data.labels import encode
from oktopk.train.data.manifest import Utterance

# Memory for recordings or spectrograms, so that the disk is read once. None of them is thrown out: an epoch uses each
# once, so that the oldest is the one that is wanted next.
CACHE_BYTES = 1 << 30

# Durations are blurred by up to this part before they are sorted, so that the neighbours differ from epoch to epoch.
_JITTER = 0.1
_ORDER, _VARIATION = 1, 2  # purposes of a generator: the same (seed, epoch) must not give both the same numbers


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some utterances, ready for the model and the loss."""

    inputs: Tensor  # [B, 1, 161, T]: spectrograms, zeros beyond their frames
    frames: Tensor  # [B]: frames of each that count
    targets: Tensor  # [sum of target_lengths]: the labels of all texts, one after the other
    target_lengths: Tensor  # [B]
    indices: tuple[int, ...]  # the utterances' places in the corpus

    @property
    def utterances(self) -> int:
        """The number of utterances."""
        return len(self.frames)

    @property
    def characters(self) -> int:
        """The number of characters in their texts."""
        return int(self.target_lengths.sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with `inputs` and `targets` on `device`; the loss wants the lengths on the CPU."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))


def check_enough(utterances: int, each: int, workers: int, what: str) -> None:
    """Refuse a corpus that has not `each` utterances for each of the workers."""
    if utterances < each * workers:
        wanted = f"one {what} takes {count(each, 'utterance')} on each of {count(workers, 'worker')}"
        found = f"{each * workers} in all, and there are {utterances}"
        raise SettingError(f"{wanted}, {found}: use a smaller batch size, fewer workers or more data")


class Batches:
    """The batches of one rank.

    For training each epoch has the same number of steps on every rank and uses an utterance at most once. Up to
    `batch_size * world_size - 1` utterances fill no step; they are others every epoch. For `evaluation` every
    utterance comes once over all ranks, in the order of length; a rank may have one step fewer than another, and its
    last step may be smaller.

    batch_size     utterances of a step on each rank
    seed           of the order and of the augmentation
    augmentation   how utterances are varied; None leaves them alone
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
    ) -> None:
        check_enough(
            len(utterances), 1 if evaluation else batch_size, world_size, "validation" if evaluation else "step"
        )
        self.utterances, self.batch_size, self.rank, self.world_size = utterances, batch_size, rank, world_size
        self.seed, self.augmentation, self.evaluation = seed, augmentation, evaluation
        self._durations = torch.tensor([utterance.duration_s for utterance in utterances], dtype=torch.float64)
        self._cache: dict[int, Tensor] = {}
        self._cache_left_bytes = CACHE_BYTES

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
        within("start_step", start_step, 0, len(self))
        return (self.batch(epoch, indices) for indices in self.plan(epoch)[start_step:])

    def _neighbourhoods(self, epoch: int) -> Tensor:
        """Return [steps, batch_size * world_size]: utterances of similar length, the steps in random order."""
        generator = seeded(_ORDER, self.seed, epoch)
        steps, size, total = len(self), self.batch_size * self.world_size, len(self.utterances)
        used = torch.randperm(total, generator=generator)[: steps * size]
        blur = 1 + _JITTER * (2 * torch.rand(total, generator=generator, dtype=torch.float64) - 1)
        by_length = used[(self._durations * blur)[used].argsort(stable=True)].view(steps, size)
        # Within a step too, or the last rank would have the longest utterances every time.
        within_step = torch.rand(steps, size, generator=generator, dtype=torch.float64).argsort(stable=True)
        return by_length.gather(1, within_step)[torch.randperm(steps, generator=generator)]

    def order(self, epoch: int) -> list[int]:
        """Return every utterance once: neighbours in length together, in batches whose order is random."""
        generator = seeded(_ORDER, self.seed, epoch)
        blur = 1 + _JITTER * (2 * torch.rand(len(self.utterances), generator=generator, dtype=torch.float64) - 1)
        batches = torch.split((self._durations * blur).argsort(stable=True), self.batch_size)
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [index for number in shuffled for index in batches[number].tolist()]

    def batch(self, epoch: int, indices: Sequence[int]) -> Batch:
        """Return these utterances as they are in an epoch."""
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
        utterance, augmentation = self.utterances[index], self.augmentation
        kept = self._cache.get(index)
        if kept is None:
            samples = torch.from_numpy(read_pcm(utterance.wav))
            kept = samples if augmentation else spectrogram(samples.float() / FULL_SCALE)
            if kept.nbytes <= self._cache_left_bytes:
                self._cache_left_bytes -= kept.nbytes
                self._cache[index] = kept
        if augmentation is None:
            return kept
        generator = seeded(_VARIATION, self.seed, epoch, index)
        return spectrogram(augmentation.apply(kept.float() / FULL_SCALE, utterance.text, generator))


def seeded(*words: int) -> torch.Generator:
    """Return a generator seeded by all the words; neighbouring words give unrelated numbers."""
    state = np.random.SeedSequence(words).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)  # torch takes 63 bits without wrapping
