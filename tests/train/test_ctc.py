import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from oktopk.errors import InputError
from oktopk.train.ctc import count_edits, ctc_loss, error_rates, greedy, references
from oktopk.train.data.labels import LABELS, encode

TEXTS = ["BAA", "ABB", "", "AABB"]
FRAMES = [6, 4, 2, 6]  # two are just enough: a letter each and a blank between equal ones
LOGITS = 3 * torch.randn(max(FRAMES), len(TEXTS), 4, generator=torch.Generator().manual_seed(1))  # labels up to B


def loss_of(log_probs, times=1, frames=FRAMES):
    """Return the loss of `TEXTS`, so many times over."""
    rows = [encode(text) for text in TEXTS * times]
    targets, lengths = torch.tensor([label for row in rows for label in row]), torch.tensor([len(row) for row in rows])
    return ctc_loss(log_probs, torch.tensor(frames * times), targets, lengths)


def test_it_is_the_probability_of_all_paths_that_spell_the_text():
    log_probs, losses = LOGITS.log_softmax(-1), []
    for i, (frames, text) in enumerate(zip(FRAMES, TEXTS, strict=True)):
        paths = itertools.product(range(4), repeat=frames)
        spelling = [path for path in paths if [k for k, _ in itertools.groupby(path) if k] == encode(text)]
        scores = [sum(log_probs[t, i, k].item() for t, k in enumerate(path)) for path in spelling]
        losses.append(-math.log(sum(map(math.exp, scores))))
    assert loss_of(log_probs).item() == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_twice_the_batch_is_the_same_loss_and_gradient_of_each():
    def loss_and_gradient(times):
        raw = LOGITS.clone().requires_grad_()
        loss = loss_of(raw.log_softmax(-1).repeat(1, times, 1), times)
        return loss, torch.autograd.grad(loss, raw)[0]

    (once, gradient), (twice, again) = loss_and_gradient(1), loss_and_gradient(2)
    assert torch.allclose(once, twice)
    assert torch.allclose(gradient, again, atol=1e-6)


def test_raw_logits_and_a_text_too_long_are_refused_and_nan_stays_visible():
    with pytest.raises(InputError, match="apply log_softmax"):
        loss_of(LOGITS)
    said = r"utterance 3 of the batch has 5 output frames .* 'AABB' wants at least 6"
    with pytest.raises(InputError, match=said):
        loss_of(LOGITS.log_softmax(-1), frames=[6, 4, 2, 5])
    log_probs = LOGITS.log_softmax(-1)
    log_probs[:, 1] = math.nan
    assert loss_of(log_probs).isnan()


texts = st.lists(st.sampled_from(["A", "B", "ONE", "TWO", "O'CLOCK", "SIX"]), max_size=5).map(" ".join)


def counted(pairs):
    return count_edits([said for said, _ in pairs], [written for _, written in pairs])


@given(st.lists(st.tuples(texts, texts), max_size=5))
def test_edits_are_levenshtein_distances(pairs):
    assert counted(pairs) == [
        sum(Levenshtein.distance(said.split(), written.split()) for said, written in pairs),
        sum(len(said.split()) for said, _ in pairs),
        sum(Levenshtein.distance(said, written) for said, written in pairs),
        sum(len(said) for said, _ in pairs),
    ]


def test_rates_are_over_the_corpus_and_those_of_nothing_are_none_and_a_hypothesis_too_few_is_refused():
    for pairs, wer, cer in (
        ([("ONE", "TWO"), ("A B C D E F G H I", "A B C D E F G H I")], 0.1, 3 / 20),  # no mean of utterances
        ([("A", "B C D")], 3.0, 5.0),  # above one
        ([("ONE TWO", "")], 1.0, 1.0),
        *[(nothing, None, None) for nothing in ([], [("", "")], [("", "NOISE")], [("  ", "")])],
    ):
        assert error_rates(counted(pairs)) == pytest.approx({"wer": wer, "cer": cer})
    with pytest.raises(ValueError, match="shorter"):
        count_edits(["A", "B"], ["A"])


def frames_of(paths):
    """Return log-probabilities whose likeliest labels spell the paths; the padding after a path spells X."""
    length = max(len(path) for path in paths)
    rows = torch.tensor([[LABELS.index(c) for c in path.ljust(length, "X")] for path in paths])
    return torch.nn.functional.one_hot(rows.t(), 29).float().log_softmax(-1), torch.tensor([len(p) for p in paths])


def test_greedy_writes_and_references_are_the_texts_of_the_targets():
    said = {"AAB": "AB", "A_A": "AA", "__A__": "A", "": "", "____": "", "H_EL_LLO": "HELLO", "A  _B": "A B"}
    assert greedy(*frames_of(list(said))) == list(said.values())
    rows = [torch.tensor(encode(text), dtype=torch.long) for text in said.values()]
    assert references(torch.cat(rows), torch.tensor([len(row) for row in rows])) == list(said.values())
