"""Models with synthetic batches, for `oktopk bench step` and `plan`: noise as long as an AN4 utterance, or bytes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.train.ctc import ctc_loss
from oktopk.train.data.features import BINS
from oktopk.train.data.labels import LABELS
from oktopk.train.models import make_model
from oktopk.train.models.gpt import BYTES, SIZES

FRAMES, LETTERS = 300, 15  # of an utterance of 3 seconds

Pair = tuple[Tensor, Tensor]
Parts = tuple[nn.Module, Callable[[int, int], tuple[Pair, Pair]], Callable[[Pair, Pair], Tensor]]


def lstman4() -> Parts:
    """Return the paper's recogniser, 27.6 M parameters, its batches and the CTC loss."""
    return make_model("lstman4"), _batch, _loss


def an4_small() -> Parts:
    """Return the net of the recipe an4-small, about a million parameters, with the same batches and loss."""
    return make_model("lstman4-small"), _batch, _loss


def gpt_tiny() -> tuple[nn.Module, Callable[[int, int], Pair], Callable[[Tensor, Tensor], Tensor]]:
    """Return the net of the recipe gpt-tiny, 0.43 M parameters, with random bytes."""
    context = SIZES["gpt-tiny"].context

    def batch(size: int, seed: int) -> Pair:
        texts = torch.randint(BYTES, (size, context + 1), generator=torch.Generator().manual_seed(seed))
        return texts[:, :-1], texts[:, 1:]

    return make_model("gpt-tiny"), batch, lambda scores, texts: F.cross_entropy(scores.flatten(0, 1), texts.flatten())


def _batch(size: int, seed: int) -> tuple[Pair, Pair]:
    generator = torch.Generator().manual_seed(seed)
    spectrograms = torch.randn(size, 1, BINS, FRAMES, generator=generator)
    letters = torch.randint(1, len(LABELS), (size * LETTERS,), generator=generator)
    return (spectrograms, torch.full((size,), FRAMES)), (letters, torch.full((size,), LETTERS))


def _loss(output: Pair, targets: Pair) -> Tensor:
    return ctc_loss(*output, *targets)
