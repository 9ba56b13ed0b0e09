"""CTC (Graves et al., 2006): the loss, with errors that name the fault, greedy decoding, and error rates."""

from collections.abc import Callable, Sequence
from typing import Any

import jiwer
import torch
from torch import Tensor
from torch.nn import functional as F

from oktopk.errors import InputError
from oktopk.train.data import labels

_SUM_TOLERANCE = 1e-3  # probabilities in float32 sum to 1 within about 1e-6


def ctc_loss(log_probs: Tensor, output_frames: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """Return the negative log-likelihood of the targets, summed over the utterances and divided by their number.

    `log_probs` [T, B, labels], `output_frames` [B], `targets` [sum of lengths] one after the other, `target_lengths`
    [B]. An `InputError` names an utterance too short for its text, or says that these are no log-probabilities.
    NaN comes back as NaN: the caller knows the step and the rank.
    """
    total = log_probs[:1].detach().exp().sum(-1)
    if ((total - 1).abs() > _SUM_TOLERANCE).any():
        worst = total.flatten()[(total - 1).abs().argmax()].item()
        raise InputError(
            f"CTC wants log-probabilities, whose exponentials sum to 1; these sum to {worst:.6g}: "
            "apply log_softmax over the labels first"
        )
    losses = F.ctc_loss(log_probs, targets, output_frames, target_lengths, blank=labels.BLANK, reduction="none")
    if not torch.isfinite(losses).all():
        texts = torch.split(targets, target_lengths.tolist())
        for i, (frames, text) in enumerate(zip(output_frames.tolist(), texts, strict=True)):
            needed = labels.ctc_frames(text.tolist())
            if needed > frames:
                raise InputError(
                    f"utterance {i} of the batch has {frames} output frames (20 ms each), and its text "
                    f"{labels.decode(text.tolist())!r} wants at least {needed}: correct it, or leave the utterance out"
                )
    return losses.sum() / len(losses)


def greedy(log_probs: Tensor, output_frames: Tensor) -> list[str]:
    """Return the text of each utterance of [T, B, labels]: the likeliest labels, repeats collapsed, blanks dropped."""
    best = log_probs.detach().argmax(-1).t().cpu()  # [B, T]
    rows = [torch.unique_consecutive(row[:n]).tolist() for row, n in zip(best, output_frames.tolist(), strict=True)]
    return [labels.decode([label for label in row if label != labels.BLANK]) for row in rows]


def references(targets: Tensor, target_lengths: Tensor) -> list[str]:
    """Return the texts of a batch's targets, which stand one after the other."""
    return [labels.decode(row.tolist()) for row in torch.split(targets.cpu(), target_lengths.tolist())]


def count_edits(said: Sequence[str], written: Sequence[str]) -> list[int]:
    """Return [word edits, words, character edits, characters] of references and hypotheses; sum them over ranks.

    >>> error_rates(count_edits(["ENTER SIX"], ["ENTER SICKS"]))["wer"]
    0.5
    """
    pairs = [(reference.strip(), text.strip()) for reference, text in zip(said, written, strict=True)]
    return [*_edits(pairs, jiwer.process_words, str.split), *_edits(pairs, jiwer.process_characters, list)]


def _edits(pairs: list[tuple[str, str]], align: Callable[..., Any], units: Callable[..., Any]) -> tuple[int, int]:
    # A hypothesis without a reference is all insertions; not every version of jiwer takes an empty reference.
    inserted = sum(len(units(text)) for reference, text in pairs if not reference)
    spoken = [pair for pair in pairs if pair[0]]
    if not spoken:
        return inserted, 0
    found = align(*map(list, zip(*spoken, strict=True)))
    edits = found.substitutions + found.deletions + found.insertions
    return inserted + edits, found.hits + found.substitutions + found.deletions


def error_rates(counts: Sequence[float]) -> dict[str, float | None]:
    """Return WER and CER of the counts of `count_edits`: above 1.0 with many insertions, None without references."""
    word_edits, words, character_edits, characters = counts
    return {"wer": word_edits / words if words else None, "cer": character_edits / characters if characters else None}
