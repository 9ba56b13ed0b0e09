"""The 29 labels of the recogniser: the CTC blank, an apostrophe, A to Z, a space."""

from collections.abc import Iterable
from itertools import pairwise

from oktopk.errors import OktopkError

LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "  # by output of the net; `_` stands for the blank and is no character of a text
BLANK = 0

_INDEX = {label: index for index, label in enumerate(LABELS) if index != BLANK}


class LabelError(OktopkError, ValueError):
    """A text with characters that no label stands for."""


def encode(text: str) -> list[int]:
    """Return the index of each character."""
    unknown = dict.fromkeys(c for c in text if c not in _INDEX)
    if unknown:
        capitals = " Write it in capitals." if any(c.upper() in _INDEX for c in unknown) else ""
        named = " ".join(map(repr, unknown))
        raise LabelError(f"wanted A to Z, apostrophe and space only, found {named}.{capitals}")
    return [_INDEX[c] for c in text]


def decode(indices: Iterable[int]) -> str:
    """Return the label of each index, blanks as `_`; repeats stay."""
    return "".join(LABELS[index] for index in indices)


def ctc_frames(target: list[int]) -> int:
    """Return the frames that CTC needs for `target`: one for each label and a blank between equal neighbours.

    >>> ctc_frames(encode("BOOK"))
    5
    """
    return len(target) + sum(a == b for a, b in pairwise(target))
