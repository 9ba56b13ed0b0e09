"""What is sent, held to what `predict` says. That no step of any input leaves the band is in `test_laws`."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, Reducer, SettingError, TopkA, TopkDSA
from oktopk.codec import HEADER_WORDS
from oktopk.cost import Call, Machine, exactly, predict
from tests.cases import NAMES, PLAIN, Case, algorithms, oktopk, trace
from tests.harness import on_threads
from tests.laws import WORD_BYTES, predicted, wanted

VERDICT_WORDS = 2  # the agreement before a step: one int64 to each peer
NUMEL, MANY = 8192, 64  # k = 512 gives each of many ranks a whole number of pairs, with slack and without
SETTLED = 20  # steps after which a run from an empty residual counts as stationary
SIZE_WORDS = 2  # an int64 that tells a peer, or everybody, how much is coming


def records(comm: Any, case: Case) -> list[Any]:
    return [step.record for step in trace(comm, case)]


@pytest.mark.parametrize("name", NAMES)
def test_no_step_sends_more_messages_than_predicted(name: str) -> None:
    size = 5
    case = Case(algorithms(0.02, rethreshold_every=2, repartition_every=3)[name], size, numel=900, kind="skew")
    for rank, steps in enumerate(on_threads(size, records, case)):
        assert max(record.messages for record in steps) <= predicted(case, rank).messages


@given(size=st.integers(1, 9), numel=st.integers(0, 99_999))
def test_the_cost_of_what_is_the_same_on_every_step_is_one_number(size: int, numel: int) -> None:
    for algorithm in (Dense(), TopkA(), GTopk(), OkTopk()):
        for rank in range(size):
            cost = predict(algorithm, numel, size, rank)
            assert cost.least == cost.typical == cost.most


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_predictions_are_the_literatures_formulas_plus_headers(size: int) -> None:
    numel, peers = 64_000, size - 1
    k = numel // 100
    agreed = VERDICT_WORDS * peers
    assert predict(Dense(), numel, size).most - agreed == pytest.approx(2 * numel * peers / size, abs=2)
    assert predict(TopkA(), numel, size).most - agreed == (2 * k + HEADER_WORDS) * peers
    assert predict(GaussianK(), numel, size).typical - 2 * agreed == (2 * k + HEADER_WORDS) * peers
    dsa = predict(TopkDSA(), numel, size)
    assert dsa.typical - 3 * agreed == pytest.approx(4 * k * peers / size)
    assert dsa.most - 3 * agreed <= (2 * k + numel * peers / size) + HEADER_WORDS * size + peers
    paper = predict(OkTopkPaper(density=0.01, **PLAIN), numel, size)
    assert paper.typical == pytest.approx(6 * k * peers / size)
    tree = [predict(GTopk(), numel, size, rank).most - agreed for rank in range(size)]
    assert sum(tree) == 2 * peers * (2 * k + HEADER_WORDS)  # each rank but the root sends up once and is sent to once
    assert max(tree) <= (2 * k + HEADER_WORDS) * (size - 1).bit_length()
    ways = [call for call in predict(GTopk(), numel, size).calls if call.collective == "sendrecv"]
    assert len(ways) == 2 * (size - 1).bit_length()  # up and down


def test_dsa_stays_in_its_band_where_every_block_holds_one_bf16_value() -> None:
    """Two bf16 values share a word; a block with one of them still takes a whole one, for each of many peers."""
    size, length = 16, 10
    case = Case(TopkDSA(density=(size - 1) / (size * length), wire="bf16"), size, size * length)
    assert wanted(case) == size - 1

    def job(comm: Any) -> int:
        grad = torch.zeros(case.numel)
        grad[::length] = 1.0
        grad[comm.rank * length] = 0.0
        reducer = case.reducer(comm)
        reducer.all_reduce(grad)
        return reducer.last.sent_bytes // WORD_BYTES

    for rank, words in enumerate(on_threads(size, job)):
        assert words <= predicted(case, rank).most


def test_paper_stays_in_its_band_with_many_segments() -> None:
    """The scales of all segments are agreed upon on repartition steps, and that is traffic too."""
    case = Case(OkTopkPaper(density=0.01, ranking="scaled"), size=4, numel=5000)

    def job(comm: Any) -> int:
        reducer = Reducer(case.algorithm, comm, segments=[1] * case.numel)
        reducer.all_reduce(case.gradient(comm.rank, 0))
        return reducer.last.sent_bytes // WORD_BYTES

    for rank, words in enumerate(on_threads(4, job)):
        assert words <= predict(case.algorithm, case.numel, 4, rank, segments=case.numel).most


@pytest.mark.parametrize("kind", ["heavy tails", "drifting"])
@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 8))])
def test_paper_sends_6k_words_in_the_median_of_a_stationary_run(size: int, kind: str) -> None:
    """6k(P-1)/P, and on top of it what does not depend on k: a verdict, two sizes, and two headers for each peer."""
    case = Case(OkTopkPaper(density=0.01, **PLAIN), size, numel=20_000, kind=kind, steps=100)
    fixed = (VERDICT_WORDS + 2 * SIZE_WORDS + 2 * HEADER_WORDS) * (size - 1)
    by_rank = on_threads(size, records, case)
    words = median(record.sent_bytes / WORD_BYTES for steps in by_rank for record in steps[SETTLED:])
    assert words <= 6 * wanted(case) * (size - 1) / size + fixed


@pytest.mark.parametrize("mode", ["bounded", pytest.param("paper", marks=pytest.mark.long)])
def test_the_words_a_rank_sends_do_not_grow_with_the_ranks(mode: str) -> None:
    """From P = 4 to 64 only the (P-1)/P of the formula, what is fixed for each peer, and ceil(k/P) for k/P in paper."""
    algorithm = oktopk(mode, density=1 / 16, **PLAIN)
    few, many = (_pair_words(algorithm, size) / ((size - 1) / size) for size in (4, MANY))
    rounding_up = 0 if mode == "bounded" else MANY / (NUMEL / 16)
    assert many <= few * (1 + rounding_up)
    few, many = (_pair_words(TopkA(density=1 / 16), size) for size in (4, MANY))
    assert many == pytest.approx(few * (MANY - 1) / 3)  # which do


def _pair_words(algorithm: Any, size: int) -> float:
    """Return what a rank sends on an average step after the first, less what it sends for each peer whatever k is."""
    case = Case(algorithm, size, NUMEL, kind="correlated ranks", steps=3)
    by_rank = on_threads(size, records, case)
    data = [
        record.sent_by_phase["gather"] + record.sent_by_phase.get("exchange", 0) for r in by_rank for record in r[1:]
    ]
    blocks = 1 if isinstance(algorithm, TopkA) else 2
    sizes = SIZE_WORDS if isinstance(algorithm, OkTopkPaper) else 0
    return sum(data) / len(data) / WORD_BYTES - (blocks * HEADER_WORDS + sizes) * (size - 1)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("cls", [Dense, TopkA, TopkDSA, GaussianK, OkTopk])
def test_a_step_calls_what_is_predicted(cls: Any, size: int) -> None:
    algorithm = cls()

    def job(comm: Any) -> Counter[str]:
        reducer, calls = Reducer(algorithm, comm), []
        for step in range(2):
            reducer.all_reduce(torch.randn(2000, generator=torch.Generator().manual_seed(9 * comm.rank + step)))
            calls.append(Counter(dict(reducer.traffic.calls)))
        counts: Counter[str] = Counter()
        for (_, collective), count in (calls[1] - calls[0]).items():
            twice = collective == "all_to_all_v"  # sizes, then what they are of
            counts["all_to_all_single" if twice else collective] += (1 + twice) * count
        return counts

    cost = predict(algorithm, 2000, size)
    assert on_threads(size, job)[0] == Counter(call.collective for call in cost.calls)
    assert sum(call.words for call in cost.calls) == pytest.approx(cost.typical)


def test_a_machine_takes_alpha_a_call_and_beta_a_word_of_its_collective() -> None:
    machine = Machine(alpha_s={"all_gather": 1.0, "sendrecv": 2.0}, beta_s={"all_gather": 0.5, "sendrecv": 0.25})
    cost = exactly(14, 2, Call("all_gather", 10), Call("sendrecv", 4))
    assert machine.seconds(cost) == 1 + 5 + 2 + 1
    assert machine.seconds(cost, computing_s=3.0) == 12.0


def test_an_algorithm_without_a_model_is_refused() -> None:
    with pytest.raises(SettingError, match="no cost model for object"):
        predict(object(), 10, 2)
