"""The recognisers with synthetic batches, for `oktopk bench step`: noise as long as an AN4 utterance, and letters."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from oktopk.train.ctc import ctc_loss
from oktopk.train.data.features import BINS
from oktopk.train.data.labels import LABELS
from oktopk.train.models import make_model

FRAMES, LETTERS = 300, 15  # of an utterance of 3 seconds

Pair = tuple[Tensor, Tensor]
Parts = tuple[nn.Module, Callable[[int, int], tuple[Pair, Pair]], Callable[[Pair, Pair], Tensor]]


def lstman4() -> Parts:
    """Return the paper's recogniser, 27.6 M parameters, its batches and the CTC loss."""
    return make_model("lstman4"), _batch, _loss


def an4_small() -> Parts:
    """Return the net of the recipe an4-small, about a million parameters, with the same batches and loss."""
    return make_model("lstman4-small"), _batch, _loss


def _batch(size: int, seed: int) -> tuple[Pair, Pair]:
    generator = torch.Generator().manual_seed(seed)
    spectrograms = torch.randn(size, 1, BINS, FRAMES, generator=generator)
    letters = torch.randint(1, len(LABELS), (size * LETTERS,), generator=generator)
    return (spectrograms, torch.full((size,), FRAMES)), (letters, torch.full((size,), LETTERS))


def _loss(output: Pair, targets: Pair) -> Tensor:
    return ctc_loss(*output, *targets)
