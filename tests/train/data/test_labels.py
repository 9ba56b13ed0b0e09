from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import OktopkError
from oktopk.train.data.labels import BLANK, LABELS, LabelError, ctc_frames, decode, encode


@given(st.text(alphabet=LABELS[1:]))
def test_a_text_is_decoded_and_needs_a_path_without_equal_neighbours(text: str) -> None:
    assert decode(encode(text)) == text
    assert BLANK not in encode(text)
    path: list[int] = []
    for label in encode(text):
        path += [BLANK, label] if path[-1:] == [label] else [label]
    assert ctc_frames(encode(text)) == len(path)


@given(st.text())
def test_a_text_is_encoded_or_every_character_outside_is_named_once(text: str) -> None:
    outside = {c for c in text if c not in LABELS[1:]}
    if not outside:
        assert len(encode(text)) == len(text)
        return
    with pytest.raises(LabelError) as caught:
        encode(text)
    assert sorted(caught.value.characters) == sorted(outside)
    assert all(repr(c) in str(caught.value) for c in outside)


def test_there_are_29_the_blank_is_first_and_no_character_of_a_text() -> None:
    assert LABELS == "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
    assert len(LABELS) == 29
    assert (BLANK, encode("'AZ ")) == (0, [1, 2, 27, 28])
    assert decode([2, 2, 0, 2]) == "AA_A"
    with pytest.raises(LabelError, match="'_'"):
        encode("A_B")
    with pytest.raises(OktopkError, match="capitals"):
        encode("yes")
