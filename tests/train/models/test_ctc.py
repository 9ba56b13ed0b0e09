from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oktopk.errors import InputError
from oktopk.train.data.labels import encode
from oktopk.train.models.ctc import ctc_loss

TEXTS = ["HELLO", "TWO", "", "BOOKKEEPER"]
FRAMES = [20, 9, 6, 13]  # the last is just enough: ten letters and three doubles


def logits() -> Tensor:
    return 3 * torch.randn(max(FRAMES), len(TEXTS), 29, generator=torch.Generator().manual_seed(1))


def batch(texts: list[str]) -> tuple[Tensor, Tensor]:
    rows = [encode(text) for text in texts]
    return torch.tensor([label for row in rows for label in row]), torch.tensor([len(row) for row in rows])


def by_forward_algorithm(log_probs: Tensor, target: list[int]) -> float:
    """-log of the probability of `target`, by Graves' forward variables in float64."""
    probs = log_probs.double().exp().tolist()
    spaced = [0, *itertools.chain.from_iterable((label, 0) for label in target)]
    alpha = [1.0] + [0.0] * (len(spaced) - 1)  # before the first frame: nothing but the start
    for t, row in enumerate(probs):
        alpha = [
            row[label] * sum(alpha[s - back] for back in reachable(spaced, s, first=t == 0))
            for s, label in enumerate(spaced)
        ]
    return -math.log(alpha[-1] + (alpha[-2] if len(alpha) > 1 else 0.0))


def reachable(spaced: list[int], s: int, first: bool) -> list[int]:
    """How far back the label at `s` may come from: itself, its neighbour, or over a blank to another label."""
    if first:
        return [s] if s < 2 else []
    skips = s >= 2 and spaced[s] != 0 and spaced[s] != spaced[s - 2]
    return [back for back in range(3 if skips else 2) if back <= s]


def expected(log_probs: Tensor) -> float:
    losses = [by_forward_algorithm(log_probs[: FRAMES[i], i], encode(text)) for i, text in enumerate(TEXTS)]
    return sum(losses) / len(losses)


def test_the_independent_computation_sums_over_all_paths() -> None:
    log_probs = logits()[:4, 0, :3].log_softmax(-1)
    paths = itertools.product(range(3), repeat=4)
    collapsed = {path: [k for k, _ in itertools.groupby(path) if k] for path in paths}
    total = sum(
        math.exp(sum(log_probs[t, k].item() for t, k in enumerate(p))) for p, c in collapsed.items() if c == [1, 1]
    )
    assert by_forward_algorithm(log_probs, [1, 1]) == pytest.approx(-math.log(total), abs=1e-6)


def test_equals_an_independent_computation() -> None:
    log_probs = logits().log_softmax(-1)
    loss = ctc_loss(log_probs, torch.tensor(FRAMES), *batch(TEXTS))
    assert loss.item() == pytest.approx(expected(log_probs), abs=1e-4)


def test_raw_logits_would_not_and_are_refused() -> None:
    targets, lengths = batch(TEXTS)
    wrong = F.ctc_loss(logits(), targets, torch.tensor(FRAMES), lengths, reduction="sum") / len(TEXTS)
    assert abs(wrong.item() - expected(logits().log_softmax(-1))) > 1
    with pytest.raises(InputError, match="apply log_softmax"):
        ctc_loss(logits(), torch.tensor(FRAMES), targets, lengths)


def test_twice_the_batch_is_the_same_loss_and_gradient_of_each() -> None:
    def loss_and_gradient(times: int) -> tuple[Tensor, Tensor]:
        raw = logits().requires_grad_()
        log_probs = raw.log_softmax(-1).repeat(1, times, 1)
        loss = ctc_loss(log_probs, torch.tensor(FRAMES * times), *batch(TEXTS * times))
        return loss, torch.autograd.grad(loss, raw)[0]

    (once, gradient), (twice, again) = loss_and_gradient(1), loss_and_gradient(2)
    assert torch.allclose(once, twice)
    assert torch.allclose(gradient, again, atol=1e-6)


def test_a_text_too_long_is_an_error_that_names_it() -> None:
    log_probs = logits().log_softmax(-1)
    frames = torch.tensor([20, 9, 6, 12])
    with pytest.raises(
        InputError, match=r"utterance 3 of the batch has 12 output frames .* 'BOOKKEEPER' wants at least 13"
    ):
        ctc_loss(log_probs, frames, *batch(TEXTS))


def test_nan_stays_visible() -> None:
    log_probs = logits().log_softmax(-1)
    log_probs[:, 1] = math.nan
    assert ctc_loss(log_probs, torch.tensor(FRAMES), *batch(TEXTS)).isnan()
