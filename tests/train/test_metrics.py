from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.errors import InputError
from oktopk.train.data.labels import LABELS, encode
from oktopk.train.metrics import Counts, Transcripts, greedy, references

texts = st.lists(st.sampled_from(["A", "B", "ONE", "TWO", "O'CLOCK", "SIX"]), max_size=5).map(" ".join)
pairs = st.lists(st.tuples(texts, texts), max_size=5)


def levenshtein(a: Sequence[str], b: Sequence[str]) -> int:
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        above, row = row, [i]
        for j, right in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (left != right)))
    return row[-1]


def counted(said_written: list[tuple[str, str]]) -> Counts:
    transcripts = Transcripts()
    transcripts.add([said for said, _ in said_written], [written for _, written in said_written])
    return transcripts.counts()


@given(said_written=pairs)
def test_edits_are_levenshtein_distances(said_written: list[tuple[str, str]]) -> None:
    assert counted(said_written) == Counts(
        word_edits=sum(levenshtein(said.split(), written.split()) for said, written in said_written),
        words=sum(len(said.split()) for said, _ in said_written),
        character_edits=sum(levenshtein(said, written) for said, written in said_written),
        characters=sum(len(said) for said, _ in said_written),
    )


@given(said_written=pairs, share=st.integers(0, 5))
def test_counts_sum_over_ranks(said_written: list[tuple[str, str]], share: int) -> None:
    parts = [counted(said_written[:share]), counted(said_written[share:])]
    summed = torch.stack([part.to_tensor() for part in parts]).sum(0)
    assert summed.dtype == torch.int64
    assert Counts.from_tensor(summed) == counted(said_written)


def test_rates_are_over_the_corpus_not_a_mean_of_utterances_and_may_pass_one() -> None:
    counts = counted([("ONE", "TWO"), ("A B C D E F G H I", "A B C D E F G H I")])
    assert (counts.wer, counts.cer) == pytest.approx((0.1, 3 / 20))
    assert counted([("A", "B C D")]).wer == 3.0
    assert (counted([("ONE TWO", "")]).wer, counted([("ONE TWO", "")]).cer) == (1.0, 1.0)


@pytest.mark.parametrize("said_written", [[], [("", "")], [("", "NOISE")], [("  ", "")]])
def test_a_rate_of_nothing_is_none(said_written: list[tuple[str, str]]) -> None:
    counts = counted(said_written)
    assert (counts.wer, counts.cer) == (None, None)
    assert counts.word_edits == sum(len(written.split()) for _, written in said_written)


def test_refuses_a_hypothesis_too_few() -> None:
    with pytest.raises(InputError, match="each of 2 references, not 1"):
        Transcripts().add(["A", "B"], ["A"])


def frames_of(paths: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities whose likeliest labels spell the paths; the padding after a path spells X."""
    length = max(len(path) for path in paths)
    rows = torch.tensor([[LABELS.index(c) for c in path.ljust(length, "X")] for path in paths])
    return torch.nn.functional.one_hot(rows.t(), 29).float().log_softmax(-1), torch.tensor([len(p) for p in paths])


@pytest.mark.parametrize(
    ("path", "text"),
    [("AAB", "AB"), ("A_A", "AA"), ("__A__", "A"), ("", ""), ("____", ""), ("H_EL_LLO", "HELLO"), ("A  _B", "A B")],
)
def test_greedy(path: str, text: str) -> None:
    assert greedy(*frames_of([path, "LONGER THAN THE OTHERS"])) == [text, "LONGER THAN THE OTHERS"]


def test_references_are_the_texts_of_the_targets() -> None:
    said = ["ONE", "", "O'CLOCK TWO"]
    rows = [encode(text) for text in said]
    targets = torch.tensor([label for row in rows for label in row])
    assert references(targets, torch.tensor([len(row) for row in rows])) == said
