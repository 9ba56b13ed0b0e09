"""Images, classified by a convolutional net: the recipe `fashion`, for Fashion-MNIST.

The net is VGG's: pairs of 3 x 3 convolutions, each pair with twice the channels and half the side, then two linear
layers; batch normalisation after each layer but the last. 3.5 M parameters at the default width and 28 x 28 pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oktopk.errors import SettingError, within
from research.learning.images import Images
from research.learning.workload import FolderRecipe, Sgd

METRIC = "error"
TEST_BATCH = 1000
WINDOW = 50
PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(FolderRecipe):
    """What `--set` can change.

    width       channels of the first convolutions; the others and the linear layer follow from it
    batch_size  images of a worker in a step
    lr          of the first step; from there it falls linearly, to nothing after the last of `steps`
    clip        largest norm of the gradient; 0: no limit
    """

    width: int = 64
    batch_size: int = 32
    lr: float = 0.02
    momentum: float = 0.9
    nesterov: bool = True
    clip: float = 0.0
    steps: int = 1500

    source: ClassVar[type] = Images
    data: ClassVar[str] = "fashion-mnist"
    metric: ClassVar[str] = METRIC
    dense_steps: ClassVar[int] = 128

    def __post_init__(self) -> None:
        for name in ("width", "batch_size", "steps", "workers"):
            within(name, getattr(self, name), 1)
        within("lr", self.lr, 0, open_low=True)

    def open(self, corpus: Path | None, workers: int, device: torch.device) -> Classification:
        """Return the workload; images are read once in a process."""
        return Classification(self, self.content(corpus), workers, device)


class Classification:
    """Images on the device, their order, and the net that names them."""

    metric = METRIC
    window = WINDOW

    def __init__(self, recipe: ImageRecipe, images: Images, workers: int, device: torch.device) -> None:
        self.recipe, self.device, self.num_train = recipe, device, images.num_train
        self.optimizer = Sgd(recipe.momentum, recipe.nesterov, recipe.clip)
        self._pixels, self._labels = images.pixels.to(device), images.labels.to(device)
        self._num_classes, self._side = images.num_classes, tuple(images.pixels.shape[1:])
        train = self._pixels[: self.num_train].float()
        self._mean, self._std = float(train.mean()), float(train.std()) or 1.0
        self._step_images = workers * recipe.batch_size
        self.steps_per_epoch = self.num_train // self._step_images
        if not self.steps_per_epoch:
            raise SettingError(f"{self.num_train} images to train on are too few: a step takes {self._step_images}")

    def make_net(self) -> nn.Module:
        """Return the net."""
        torch.manual_seed(self.recipe.seed)
        return make_net(self.recipe.width, self._side, self._num_classes).to(self.device)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step: it falls linearly."""
        return self.recipe.lr * max(0.0, 1 - step / self.recipe.steps)

    def indices(self, step: int, worker: int) -> Tensor:
        """Return which images a worker has in a step: those of all workers and steps of an epoch are different."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self._step_images + worker * self.recipe.batch_size
        return _order(self.recipe.seed, epoch, self.num_train, self.device)[first : first + self.recipe.batch_size]

    def loss(self, net: nn.Module, step: int, worker: int) -> Tensor:
        """Return the cross entropy of a batch."""
        chosen = self.indices(step, worker)
        return cross_entropy(net(self._inputs(self._pixels[chosen])), self._labels[chosen])

    def evaluate(self, net: nn.Module) -> dict[str, float]:
        """Return the part of the test images that is named wrong, and their loss."""
        figures = [_figures(net(self._inputs(pixels)), labels) for pixels, labels in self._test_batches()]
        wrong, loss = (torch.stack(figures).sum(0) / (len(self._labels) - self.num_train)).tolist()
        return {"error": wrong, "val_loss": loss}

    def _test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        pixels, labels = self._pixels[self.num_train :], self._labels[self.num_train :]
        return zip(pixels.split(TEST_BATCH), labels.split(TEST_BATCH), strict=True)

    def _inputs(self, pixels: Tensor) -> Tensor:
        """Return [images, 1, height, width] of mean 0 and deviation 1, over all that is trained on."""
        return pixels.unsqueeze(1).float().sub_(self._mean).div_(self._std)


def make_net(width: int, side: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return the net for images of that height and width.

    >>> sum(parameter.numel() for parameter in make_net(64, (28, 28), 10).parameters())
    3516746
    """
    layers: list[nn.Module] = []
    channels = 1
    for pair in range(PAIRS):
        for _ in range(2):
            layers += _convolution(channels, width << pair)
            channels = width << pair
        layers.append(nn.MaxPool2d(2))
    height, wide = (length >> PAIRS for length in side)
    hidden = 16 * width
    layers += [nn.Flatten(), nn.Linear(channels * height * wide, hidden, bias=False), nn.BatchNorm1d(hidden)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(hidden, num_classes))


def _convolution(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def _figures(scores: Tensor, labels: Tensor) -> Tensor:
    """Return how many are wrong, and the sum of their losses."""
    wrong = (scores.argmax(1) != labels).sum()
    return torch.stack([wrong.double(), cross_entropy(scores, labels, reduction="sum").double()])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int, device: torch.device) -> Tensor:
    """Return the order of an epoch, the same on every device."""
    words = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    return torch.randperm(count, generator=torch.Generator().manual_seed(int(words[0]) >> 1)).to(device)
