import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import OktopkError
from oktopk.train.data.labels import BLANK, LABELS, LabelError, ctc_frames, decode, encode


@given(st.text(alphabet=LABELS[1:]))
def test_a_text_is_decoded_and_needs_a_path_without_equal_neighbours(text):
    assert decode(encode(text)) == text
    path = []
    for label in encode(text):
        path += [BLANK, label] if path[-1:] == [label] else [label]
    assert ctc_frames(encode(text)) == len(path)


@given(st.text(alphabet=st.characters() | st.sampled_from("_ab1")).filter(lambda text: set(text) - set(LABELS[1:])))
def test_every_character_outside_is_named_once(text):
    with pytest.raises(LabelError) as caught:
        encode(text)
    named = [repr(c) for c in dict.fromkeys(text) if c not in LABELS[1:]]
    assert f"found {' '.join(named)}." in str(caught.value)


def test_there_are_29_and_the_blank_is_first():
    assert (len(LABELS), BLANK, encode("'AZ ")) == (29, 0, [1, 2, 27, 28])
    assert decode([2, 2, 0, 2]) == "AA_A"
    with pytest.raises(OktopkError, match="capitals"):
        encode("yes")
