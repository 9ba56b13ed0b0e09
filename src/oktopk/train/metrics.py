"""Greedy decoding, and word and character error rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jiwer
import torch
from torch import Tensor

from oktopk.errors import InputError
from oktopk.train.data import labels


def greedy(log_probs: Tensor, output_frames: Tensor) -> list[str]:
    """Return the text of each utterance of [T, B, labels]: the likeliest labels, repeats collapsed, blanks dropped."""
    best = log_probs.detach().argmax(-1).t().cpu()  # [B, T]
    return [_collapsed(row[:frames]) for row, frames in zip(best, output_frames.tolist(), strict=True)]


def references(targets: Tensor, target_lengths: Tensor) -> list[str]:
    """Return the texts of a batch's targets, which stand one after the other."""
    return [labels.decode(row.tolist()) for row in torch.split(targets.cpu(), target_lengths.tolist())]


def _collapsed(row: Tensor) -> str:
    return labels.decode([label for label in torch.unique_consecutive(row).tolist() if label != labels.BLANK])


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Edits, and the words and characters of the references; they may be summed over batches and ranks."""

    word_edits: int = 0
    words: int = 0
    character_edits: int = 0
    characters: int = 0

    @property
    def wer(self) -> float | None:
        """Word edits per word of the references, which may be above 1.0; None without words."""
        return self.word_edits / self.words if self.words else None

    @property
    def cer(self) -> float | None:
        """Character edits per character of the references, spaces included; None without characters."""
        return self.character_edits / self.characters if self.characters else None

    def to_tensor(self) -> Tensor:
        """Return the four counts, int64 [4], ready to be summed over ranks."""
        return torch.tensor(astuple(self))

    @staticmethod
    def from_tensor(counts: Tensor) -> Counts:
        """Return the counts of `to_tensor`, or of a sum of several."""
        return Counts(**dict(zip(Counts.__dataclass_fields__, counts.tolist(), strict=True)))


class Transcripts:
    """References and hypotheses of an evaluation, added batch by batch.

    >>> transcripts = Transcripts()
    >>> transcripts.add(["ENTER SIX"], ["ENTER SICKS"])
    >>> transcripts.counts().wer
    0.5
    """

    def __init__(self) -> None:
        self.references: list[str] = []
        self.hypotheses: list[str] = []

    def add(self, references: Iterable[str], hypotheses: Iterable[str]) -> None:
        """Add the texts of some utterances, in the same order."""
        said, written = list(references), list(hypotheses)
        if len(said) != len(written):
            raise InputError(f"wanted a hypothesis for each of {len(said)} references, not {len(written)} hypotheses")
        self.references += said
        self.hypotheses += written

    def counts(self) -> Counts:
        """Return the edits over all utterances added so far."""
        words = _edits(self.references, self.hypotheses, jiwer.process_words, str.split)
        characters = _edits(self.references, self.hypotheses, jiwer.process_characters, list)
        return Counts.from_tensor(torch.tensor([*words, *characters]))


def _edits(
    said: Sequence[str], written: Sequence[str], align: Callable[..., Any], units: Callable[[str], list[str]]
) -> tuple[int, int]:
    """Return the edits, and the units of the references.

    A hypothesis without a reference is all insertions; not every version of jiwer takes an empty reference.
    """
    pairs = [(a.strip(), b.strip()) for a, b in zip(said, written, strict=True)]
    inserted = sum(len(units(b)) for a, b in pairs if not a)
    spoken = [(a, b) for a, b in pairs if a]
    if not spoken:
        return inserted, 0
    found = align([a for a, _ in spoken], [b for _, b in spoken])
    edits = found.substitutions + found.deletions + found.insertions
    return inserted + edits, found.hits + found.substitutions + found.deletions
