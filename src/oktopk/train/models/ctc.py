"""The CTC loss (Graves et al., 2006): per utterance, on log-probabilities, with errors that name the fault."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from oktopk.errors import InputError
from oktopk.train.data.labels import BLANK, ctc_frames, decode

_SUM_TOLERANCE = 1e-3  # probabilities in float32 sum to 1 within about 1e-6


def ctc_loss(log_probs: Tensor, output_frames: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """Return the negative log-likelihood of the targets, summed over the utterances and divided by their number.

    `log_probs` [T, B, labels], `output_frames` [B], `targets` [sum of lengths] one after the other, `target_lengths`
    [B]. An `InputError` names an utterance too short for its text, or says that these are no log-probabilities.
    NaN comes back as NaN: the caller knows the step and the rank.
    """
    _check_normalised(log_probs)
    losses = F.ctc_loss(log_probs, targets, output_frames, target_lengths, blank=BLANK, reduction="none")
    if not torch.isfinite(losses).all():
        _check_possible(output_frames.tolist(), [row.tolist() for row in torch.split(targets, target_lengths.tolist())])
    return losses.sum() / len(losses)


def _check_normalised(log_probs: Tensor) -> None:
    """Raise if the first frame's probabilities do not sum to 1; raw logits give losses that mean nothing."""
    total = log_probs[:1].detach().exp().sum(-1)
    if ((total - 1).abs() > _SUM_TOLERANCE).any():
        worst = total.flatten()[(total - 1).abs().argmax()].item()
        raise InputError(
            f"CTC wants log-probabilities, whose exponentials sum to 1; these sum to {worst:.6g}: "
            "apply log_softmax over the labels first"
        )


def _check_possible(output_frames: list[int], targets: list[list[int]]) -> None:
    for i, (frames, target) in enumerate(zip(output_frames, targets, strict=True)):
        if ctc_frames(target) > frames:
            raise InputError(
                f"utterance {i} of the batch has {frames} output frames (20 ms each), and its text {decode(target)!r} "
                f"wants at least {ctc_frames(target)}: correct the text, or leave the utterance out"
            )
