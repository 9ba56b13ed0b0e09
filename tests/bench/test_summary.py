"""What the laps come to, and where a method stops paying, on made-up numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oktopk.bench.breakeven import crossings, verdicts_of
from oktopk.bench.forecast import Forecast, cost_of, make_forecast
from oktopk.bench.methods import METHODS, Entry, Ours, PowerSgd
from oktopk.bench.probe import SHARE, computing_numel
from oktopk.bench.rounds import WARM_UP
from oktopk.bench.summary import rows_of
from oktopk.cost import Machine

ENTRIES = [Entry("dense"), Entry("bf16"), Entry("oktopk", 0.01)]
SECONDS = {"dense": [8.0, 6.0, 9.0], "bf16": [4.0, 6.0, 3.0], "oktopk": [2.0, 1.0, 3.0]}


def laps_of(name: str, slower: float = 0.0, sent: int | None = 10) -> list[dict[str, Any]]:
    warm_up = [100.0] * WARM_UP
    return [
        {"seconds": seconds + slower, "sent_bytes": sent, "record_bytes": 9, "parts": {"select": seconds / 2}}
        for seconds in (*warm_up, *SECONDS[name])
    ]


def test_a_lap_is_its_slowest_ranks_and_ratios_are_taken_lap_by_lap() -> None:
    quick = [laps_of(entry.method, sent=20) for entry in ENTRIES]
    slow = [laps_of(entry.method, slower=1.0, sent=30) for entry in ENTRIES]
    dense, bf16, oktopk = rows_of(ENTRIES, [quick, slow])
    assert dense["rounds_s"] == [9.0, 7.0, 10.0]
    assert dense["warm_up_s"] == [101.0] * WARM_UP
    assert oktopk["seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert oktopk["x_dense"] == {"median": 3.0, "min": 2.5, "max": 3.5}  # 9/3, 7/2, 10/4: not 9/3 of the medians
    assert oktopk["x_bf16"]["median"] == pytest.approx(5 / 3)
    assert bf16["x_bf16"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert oktopk["sent_bytes"] == 30
    assert oktopk["record_bytes"] == 9
    assert oktopk["parts_s"] == {"select": 1.0}


def test_what_was_not_measured_is_none() -> None:
    (row,) = rows_of([Entry("oktopk", 0.01)], [[laps_of("oktopk", sent=None)]])
    assert row["sent_bytes"] is row["x_dense"] is row["x_bf16"] is None


def test_a_row_names_its_density_where_there_are_several() -> None:
    entries = [Entry("dense"), Entry("oktopk", 0.01), Entry("oktopk", 0.05)]
    rows = rows_of(entries, [[laps_of(entry.method) for entry in entries]])
    assert [row["name"] for row in rows] == ["dense", "oktopk 0.01", "oktopk 0.05"]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(100, 4.0), (1000, 2.0)], []),
        ([(100, 0.5), (1000, 0.25)], []),
        ([(100, 10.0), (10_000, 0.1)], [(100, 10_000, 1000.0)]),
        ([(10_000, 0.1), (100, 10.0)], [(100, 10_000, 1000.0)]),
        ([(100, 4.0), (1000, 1.0)], [(100, 1000, 1000.0)]),
        ([(100, 2.0), (1000, 1.5), (math.inf, 0.5)], [(1000, math.inf, None)]),
        ([(2, 0.5), (4, 2.0), (8, 0.5)], [(2, 4, pytest.approx(math.sqrt(8))), (4, 8, pytest.approx(math.sqrt(32)))]),
        ([(100, 4.0)], []),
    ],
)
def test_the_crossing_lies_on_the_straight_line_between_logarithms(points: Any, expected: Any) -> None:
    assert crossings(points) == expected


def setting(ranks: int, mbit: float | None, **ratios: float) -> dict[str, Any]:
    rows = [{"name": name, "method": name, "x_dense": {"median": ratio}} for name, ratio in ratios.items()]
    return {
        "ranks": ranks,
        "mbit": mbit,
        "rows": [{"name": "dense", "method": "dense", "x_dense": {"median": 1}}, *rows],
    }


def test_sentences_say_where_each_method_pays() -> None:
    settings = [
        setting(4, 100.0, oktopk=10.0, topka=2.0, bf16=2.0, gtopk=0.5),
        setting(4, 10_000.0, oktopk=0.1, topka=1.5, bf16=1.9, gtopk=0.4),
        setting(4, 0.0, oktopk=0.05, topka=0.5, bf16=1.8, gtopk=0.2),
    ]
    verdicts = {verdict["name"]: verdict for verdict in verdicts_of(settings)}
    assert list(verdicts) == ["oktopk", "topka", "bf16", "gtopk"]
    assert verdicts["oktopk"]["sentence"] == "oktopk, P = 4: stops paying at about 1000 Mbit/s"
    assert verdicts["oktopk"]["changes_at"] == [1000.0]
    assert verdicts["topka"]["sentence"] == ("topka, P = 4: stops paying between 10000 Mbit/s and an unlimited link")
    assert verdicts["topka"]["changes_at"] == [None]
    assert verdicts["bf16"]["sentence"].startswith("bf16, P = 4: faster than dense wherever it was measured")
    assert verdicts["bf16"]["pays_at"] == [100.0, 10_000.0, None]
    assert verdicts["gtopk"]["sentence"].startswith("gtopk, P = 4: no faster than dense wherever")


def test_sentences_over_ranks_where_there_are_several() -> None:
    settings = [setting(2, 100.0, topka=4.0), setting(8, 100.0, topka=0.25)]
    assert [verdict["sentence"] for verdict in verdicts_of(settings)] == [
        "topka, P = 2: faster than dense wherever it was measured (100 Mbit/s)",
        "topka, P = 8: no faster than dense wherever it was measured (100 Mbit/s)",
        "topka, 100 Mbit/s: stops paying at about P = 4",
    ]


def test_without_dense_there_is_nothing_to_pay_against() -> None:
    row = {"name": "oktopk", "method": "oktopk", "x_dense": None}
    assert verdicts_of([{"ranks": 2, "mbit": 100.0, "rows": [row]}]) == []


def test_a_forecast_adds_the_slowest_ranks_stretches() -> None:
    numel, entry = 200_000, Entry("topka", 0.01)
    times = {
        "small": {"all_gather": [0.001, 0.003, 0.002]},
        "big": {"all_gather": [0.012, 0.012, 0.012]},
        "words": {"all_gather": 1000},
    }
    computing = ([[0.1, 0.4], [0.1, 0.4], [5.0, 0.4]], [[0.3, 0.2], [0.3, 0.2, 0.1], [0.2, 0.1]])
    forecast = make_forecast([{**times, "computing": [laps]} for laps in computing], [entry], numel)
    assert forecast.machine.alpha_s == {"all_gather": 0.002}
    assert forecast.machine.beta_s == {"all_gather": pytest.approx(1e-5)}
    assert forecast.computing_s[entry] == pytest.approx((0.3 + 0.4 + 0.0) / computing_numel(numel))
    cost = cost_of(entry, numel, 2)
    assert cost is not None
    words = sum(call.words for call in cost.calls)
    assert forecast.seconds(entry, numel, 2) == pytest.approx(SHARE * 0.7 + 2 * 0.002 + 1e-5 * words)


def test_what_has_no_model_is_not_predicted() -> None:
    machine = Machine(alpha_s={}, beta_s={})
    assert Forecast(machine, {Entry("powersgd-1"): None}).seconds(Entry("powersgd-1"), 1000, 2) is None


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not isinstance(method, PowerSgd)])
def test_every_other_method_has_a_cost_in_calls(name: str) -> None:
    density = 0.01 if isinstance(METHODS[name], Ours) else None
    cost = cost_of(Entry(name, density), 100_000, 4)
    assert cost is not None
    assert sum(call.words for call in cost.calls) >= cost.typical * 0.999
