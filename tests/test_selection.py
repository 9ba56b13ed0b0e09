import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oktopk import selection
from oktopk.selection import Ranking, at_least, exact_threshold, kth_largest
from tests.harness import on_threads

SMALL = st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.0, 2.5, 7.0, 1e-45]), max_size=40)


@pytest.mark.parametrize(
    ("numel", "density", "k"),
    [(0, 0.5, 0), (1, 1e-9, 1), (10, 0.1, 1), (10, 0.99, 9), (10, 1.0, 10), (27_569_568, 0.02, 551_391)],
)
def test_k_is_at_least_one_if_there_is_one(numel: int, density: float, k: int) -> None:
    assert selection.num_selected(numel, density) == k
    assert [selection.in_band(count, 100) for count in (79, 80, 125, 126)] == [False, True, True, False]


@given(score=SMALL, k=st.integers(0, 50))
def test_top_k_takes_the_largest_and_of_equals_the_first(score: list[float], k: int) -> None:
    order = sorted((i for i, x in enumerate(score) if x > 0), key=lambda i: (-score[i], i))
    assert selection.top_k(torch.tensor(score), k).tolist() == sorted(order[:k])
    expected = sorted(score, reverse=True)[k - 1] if 1 <= k <= len(score) else 0.0
    assert kth_largest(torch.tensor(score), k) == float(torch.tensor(expected))


@given(scores=st.lists(SMALL | st.lists(st.floats(0, width=32)), min_size=1, max_size=4), k=st.integers(0, 100))
def test_the_kth_largest_of_all_ranks(scores: list[list[float]], k: int) -> None:
    """A radix select over the bits has to be right for every exponent, Inf included."""

    def job(comm: Any) -> float:
        return selection.kth_largest_of_all(torch.tensor(scores[comm.rank]), k, comm)

    everything = sorted((x for score in scores for x in score), reverse=True)
    expected = everything[k - 1] if 1 <= k <= len(everything) else 0.0
    assert on_threads(len(scores), job) == [float(torch.tensor(expected))] * len(scores)


@given(length=st.integers(0, 40), limit=st.integers(1, 45), start=st.integers(0, 500))
def test_in_turn_is_some_of_them_in_order_and_leaves_nobody_out(length: int, limit: int, start: int) -> None:
    index, seen = torch.arange(length) * 3, set()
    for turn in range(start, start + math.ceil(length / limit) + 1):
        chosen = selection.in_turn(index, limit, turn)
        assert len(chosen) == min(length, limit)
        assert bool((chosen.diff() > 0).all())
        seen |= set(chosen.tolist())
    assert seen == set(index.tolist())
    assert len(selection.in_turn(index, 0, start)) == 0


@given(score=st.lists(st.integers(0, 4), max_size=40), limit=st.integers(1, 45), turn=st.integers(0, 100))
def test_the_largest_go_first_and_equals_in_turn(score: list[int], limit: int, turn: int) -> None:
    size = torch.tensor(score, dtype=torch.float32)
    chosen = selection.largest(size, limit, turn)
    assert bool((chosen.diff() > 0).all())
    assert sorted(size[chosen].tolist()) == sorted(score)[-limit:]
    rounds = [selection.largest(size, limit, turn + later) for later in range(len(score) + 1)]
    least = min(size[chosen].tolist(), default=0)
    equal = {place for place, each in enumerate(score) if each == least}
    assert equal <= {int(place) for each in rounds for place in each}


@given(seed=st.integers(0, 100), k=st.sampled_from([1, 7, 500, 4999]), scaled=st.booleans())
def test_the_exact_threshold_selects_exactly_k(seed: int, k: int, scaled: bool) -> None:
    acc = _heavy(5000, seed)
    ranking = _scaled(acc, (100, 0, 1900, 3000) if scaled else ())
    threshold = exact_threshold(acc, k, ranking)
    assert threshold > 0
    assert len(at_least(acc, threshold, ranking)) == k


def test_the_sampled_threshold_is_near_k() -> None:
    """1024 hits above it: 3 % standard error, so that 5 of them are within the band."""
    numel, k = 500_000, 20_000
    acc, ranking = _heavy(numel, 0), Ranking.by_magnitude(numel)
    random_state = torch.random.get_rng_state()
    thresholds = [selection.sampled_threshold(acc, k, ranking, seed) for seed in range(6)]
    assert all(0.85 * k <= len(at_least(acc, threshold, ranking)) <= 1.15 * k for threshold in thresholds)
    assert thresholds == [
        selection.sampled_threshold(acc, k, ranking, seed) for seed in range(6)
    ]  # as on a repeated run
    assert len(set(thresholds)) == 6
    assert torch.equal(torch.random.get_rng_state(), random_state)
    small = Ranking.by_magnitude(20_000)  # of which the sample is the whole
    for few in (200, selection.SAMPLE_HITS):
        exact = exact_threshold(acc[:20_000], few, small)
        assert selection.sampled_threshold(acc[:20_000], few, small, seed=9) == exact


@pytest.mark.parametrize("share", [1, 2, 3, 8])
def test_half_of_an_owners_share_goes_to_all_elements_in_rotation(share: int) -> None:
    every = selection.TURN_EVERY
    scores = [selection.turns_first_(torch.zeros(11), share, step) for step in range(11 * every)]
    first = torch.stack(scores) == torch.finfo(torch.float32).max
    counts = [max(share // 2, 1) if step % every == every - 1 else 0 for step in range(11 * every)]
    assert first.sum(1).tolist() == counts
    assert bool(first.any(0).all())


@pytest.mark.parametrize("density", [0.001, 0.1, 0.5])
def test_the_gaussian_threshold_fits_a_gaussian(density: float) -> None:
    numel = 400_000
    acc = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 3
    count = len(at_least(acc, selection.gaussian_threshold(acc, density), Ranking.by_magnitude(numel)))
    assert count == pytest.approx(density * numel, rel=0.1)
    for flat in (torch.empty(0), torch.ones(1), torch.ones(9)):
        assert selection.gaussian_threshold(flat, 1.0) == 0.0
        assert math.isfinite(selection.gaussian_threshold(flat, density))


def test_a_scaled_ranking_divides_by_the_rms_of_the_gradient() -> None:
    """Whatever residual waits: it does not change the scales."""
    grad = torch.tensor([4.0] * 4 + [-0.25] * 6)
    whole = math.sqrt((4 * 16 + 6 / 16) / 10)
    for held in (torch.zeros(10), torch.arange(10.0), 1000 * grad):
        ranking = Ranking.by_segment(10, [4, 6])
        ranking.rescale_(ranking.mean_squares(held + grad, held))
        expected = torch.tensor([4 / whole, 0.25 / whole], dtype=torch.float64)
        torch.testing.assert_close(ranking.scale, expected, rtol=1e-4, atol=0)


@given(
    exponents=st.lists(st.integers(-330, 308), min_size=2, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_no_score_is_nan_or_infinite(exponents: list[int], dtype: torch.dtype) -> None:
    """A row whose rms is a denormal, or overflows, has a scale like any other."""
    limit = torch.finfo(dtype).max
    rows = [torch.full((3,), min(10.0 ** max(each, -323), limit), dtype=torch.float64).to(dtype) for each in exponents]
    grad = torch.cat(rows)
    ranking = Ranking.by_segment(len(grad), [3] * len(exponents))
    for _ in range(3):
        ranking.rescale_(ranking.mean_squares(grad, torch.zeros_like(grad)))
        assert bool((ranking.scale > 0).all())
        assert bool(ranking.score(grad, torch.arange(len(grad))).isfinite().all())
    assert bool(ranking.score(torch.zeros_like(grad), torch.arange(len(grad))).eq(0).all())


def test_a_silent_segment_has_scale_one_until_it_wakes() -> None:
    ranking = Ranking.by_segment(5, [2, 2, 1])
    ranking.rescale_(torch.zeros(3, dtype=torch.float64))
    assert ranking.scale.tolist() == [1.0, 1.0, 1.0]
    ranking.rescale_(torch.tensor([9.0, 0.0, 16.0], dtype=torch.float64))
    assert float(ranking.scale[1]) == 1.0
    ranking.rescale_(torch.tensor([9.0, 9.0, 16.0], dtype=torch.float64))
    assert float(ranking.scale[1]) == float(ranking.scale[0])


def test_the_scores_agree_with_the_thresholds() -> None:
    """What reaches a threshold by its score reaches it by its magnitude: rounding loses nobody at the edge."""
    acc = _heavy(20_000, 5)
    ranking = _scaled(acc, (7000, 0, 1, 12_999))
    score = ranking.score(acc, torch.arange(20_000))
    for k in (1, 10, 1000, 19_000):
        threshold = kth_largest(score, k)
        reached = (score >= threshold).nonzero().view(-1)
        assert set(reached.tolist()) <= set(at_least(acc, threshold, ranking).tolist())


def _heavy(numel: int, seed: int) -> Tensor:
    normal = torch.randn(4, numel, generator=torch.Generator().manual_seed(seed))
    return normal[0] / normal[1:].square().mean(0).sqrt()


def _scaled(acc: Tensor, segments: tuple[int, ...]) -> Ranking:
    if not segments:
        return Ranking.by_magnitude(len(acc))
    ranking = Ranking.by_segment(len(acc), segments)
    ranking.rescale_(ranking.mean_squares(acc, torch.zeros_like(acc)))
    return ranking
