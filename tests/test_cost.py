"""Words sent, held to `predict`. `test_laws` holds every step to the band and to the number of messages."""

import math
from collections import Counter
from statistics import median
from typing import Any

import pytest
import torch

from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, Reducer, SettingError, TopkA, TopkDSA
from oktopk.cost import Call, Machine, exactly, predict
from oktopk.words import HEADER_WORDS
from tests.cases import PLAIN, Case, trace
from tests.harness import on_threads
from tests.laws import WORD_BYTES, wanted

VERDICT_WORDS = 2  # the agreement before a step: one int64 to each peer
SETTLED = 20  # steps after which a run from an empty residual counts as stationary
SIZE_WORDS = 2  # an int64 that tells a peer, or everybody, how much is coming


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
    bounded = predict(OkTopk(density=0.01, **PLAIN), numel, size)
    assert bounded.most == (4 * math.ceil(1.25 * k / size) + 2 * HEADER_WORDS) * peers
    tree = [predict(GTopk(), numel, size, rank).most - agreed for rank in range(size)]
    assert sum(tree) == 2 * peers * (2 * k + HEADER_WORDS)  # each rank but the root sends up once and is sent to once
    assert max(tree) <= (2 * k + HEADER_WORDS) * (size - 1).bit_length()
    ways = [call for call in predict(GTopk(), numel, size).calls if call.collective == "sendrecv"]
    assert len(ways) == 2 * (size - 1).bit_length()  # up and down


FIRST_OF_TEN = torch.eye(10)[0].repeat(16)  # two bf16 values share a word, and one alone still takes a word


@pytest.mark.parametrize(("algorithm", "size", "gradient", "segments"), [
    (TopkDSA(density=15 / 160, wire="bf16"), 16, lambda rank: FIRST_OF_TEN * (torch.arange(160) != 10 * rank), 0),
    (OkTopkPaper(density=0.01, ranking="scaled"), 4, lambda rank: torch.arange(5000.0) + rank, 5000),
], ids=["every block of DSA holds one value", "paper sends the scales of many segments"])  # fmt: skip
def test_a_step_stays_in_its_band_where(algorithm: Any, size: int, gradient: Any, segments: int) -> None:
    def job(comm: Any) -> tuple[float, int]:
        grad = gradient(comm.rank)
        reducer = Reducer(algorithm, comm, segments=[1] * segments or None)
        reducer.all_reduce(grad)
        return reducer.last.sent_bytes / WORD_BYTES, predict(algorithm, len(grad), size, comm.rank, segments or 1).most

    assert all(words <= most for words, most in on_threads(size, job))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["heavy tails", "drifting"])
@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 8))])
def test_paper_sends_6k_words_in_the_median_of_a_stationary_run(size: int, kind: str) -> None:
    """6k(P-1)/P, and on top of it what does not depend on k: a verdict, two sizes, and two headers for each peer."""
    case = Case(OkTopkPaper(density=0.01, **PLAIN), size, numel=20_000, kind=kind, steps=100)
    fixed = (VERDICT_WORDS + 2 * SIZE_WORDS + 2 * HEADER_WORDS) * (size - 1)
    by_rank = on_threads(size, trace, case)
    words = median(step.record.sent_bytes / WORD_BYTES for steps in by_rank for step in steps[SETTLED:])
    assert words <= 6 * wanted(case) * (size - 1) / size + fixed


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("cls", [Dense, TopkA, TopkDSA, GaussianK, OkTopk])
def test_a_step_calls_what_is_predicted(cls: Any, size: int) -> None:
    algorithm = cls()

    def job(comm: Any) -> Counter[str]:
        reducer, counts = Reducer(algorithm, comm), Counter[str]()
        reducer.all_reduce(torch.ones(2000))
        reducer.all_reduce(torch.arange(2000.0))
        for name, count in reducer.last.collectives.items():
            collective = name.split("/")[1]
            twice = collective == "all_to_all_v"  # sizes, then what they are of
            counts["all_to_all_single" if twice else collective] += (1 + twice) * count["calls"]
        return counts

    cost = predict(algorithm, 2000, size)
    fixed = cls not in (TopkDSA, GaussianK, OkTopk)  # the same on every step
    assert (cost.least == cost.typical == cost.most) == fixed
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
