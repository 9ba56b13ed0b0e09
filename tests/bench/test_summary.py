"""What the turns come to, and where a method stops paying, on made-up numbers."""

import math
from typing import Any

import pytest

from oktopk.bench.methods import METHODS, Entry, Ours, PowerSgd
from oktopk.bench.probe import SHARE, computing_numel, cost_of, figures_of, predict_seconds
from oktopk.bench.summary import WARM_UP, crossings, rows_of, verdicts_of

ENTRIES = [Entry("dense"), Entry("bf16"), Entry("oktopk", 0.01)]
SECONDS = {"dense": [8.0, 6.0, 9.0], "bf16": [4.0, 6.0, 3.0], "oktopk": [2.0, 1.0, 3.0]}


def turns_of(entry: Entry, slower: float = 0.0, sent: int | None = 10) -> list[dict[str, Any]]:
    return [
        {"seconds": seconds + slower, "sent_bytes": sent, "record_bytes": 9, "parts": {"select": seconds / 2}}
        for seconds in (*[100.0] * WARM_UP, *SECONDS[entry.method])
    ]


def test_a_round_is_its_slowest_ranks_and_ratios_are_taken_round_by_round() -> None:
    quick = [turns_of(entry, sent=20) for entry in ENTRIES]
    slow = [turns_of(entry, slower=1.0, sent=30) for entry in ENTRIES]
    dense, bf16, oktopk = rows_of(ENTRIES, [quick, slow])
    assert dense["rounds_s"] == [9.0, 7.0, 10.0]
    assert dense["warm_up_s"] == [101.0] * WARM_UP
    assert oktopk["seconds"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert oktopk["x_dense"] == {
        "median": 3.0,
        "min": 2.5,
        "max": 3.5,
        "low": 2.75,
        "high": 3.25,
    }  # 9/3, 7/2, 10/4: not 9/3 of the medians
    assert oktopk["x_bf16"]["median"] == pytest.approx(5 / 3)
    assert bf16["x_bf16"] == dict.fromkeys(("median", "min", "max", "low", "high"), 1.0)
    assert (oktopk["sent_bytes"], oktopk["record_bytes"], oktopk["parts_s"]) == (30, 9, {"select": 1.0})


def test_what_was_not_measured_is_none_and_a_row_names_its_density_where_there_are_several() -> None:
    entries = [Entry("oktopk", 0.01), Entry("oktopk", 0.05)]
    rows = rows_of(entries, [[turns_of(entry, sent=None) for entry in entries]])
    assert [row["name"] for row in rows] == ["oktopk 0.01", "oktopk 0.05"]
    assert rows[0]["sent_bytes"] is rows[0]["x_dense"] is rows[0]["x_bf16"] is None
    assert verdicts_of([{"ranks": 2, "mbit": 100.0, "rows": rows}]) == []  # there is no dense to pay against


@pytest.mark.parametrize(("points", "expected"), [
    ([(100, 4.0)], []),
    ([(100, 0.5), (1000, 0.25)], []),
    ([(100, 4.0), (1000, 1.0)], [(100, 1000, 1000.0)]),
    ([(100, 2.0), (1000, 1.5), (math.inf, 0.5)], [(1000, math.inf, None)]),
    ([(2, 0.5), (4, 2.0), (8, 0.5)], [(2, 4, pytest.approx(math.sqrt(8))), (4, 8, pytest.approx(math.sqrt(32)))]),
])  # fmt: skip
def test_the_crossing_lies_on_the_straight_line_between_logarithms(points: Any, expected: Any) -> None:
    assert crossings(points) == expected


def setting(ranks: int, mbit: float | None, **ratios: float) -> dict[str, Any]:
    spreads = {name: {"median": x, "low": 0.9 * x, "high": 1.1 * x} for name, x in {"dense": 1, **ratios}.items()}
    rows = [{"name": name, "method": name, "x_dense": spread} for name, spread in spreads.items()]
    return {"ranks": ranks, "mbit": mbit, "rows": rows}


def test_sentences_say_where_each_method_pays() -> None:
    settings = [  # in any order
        setting(4, 0.0, oktopk=0.05, topka=0.5, bf16=1.8, gtopk=0.2),
        setting(4, 10_000.0, oktopk=0.1, topka=1.5, bf16=1.9, gtopk=0.4),
        setting(4, 100.0, oktopk=10.0, topka=2.0, bf16=2.0, gtopk=0.5),
    ]
    oktopk, topka, bf16, gtopk = verdicts_of(settings)
    assert oktopk["sentence"] == "oktopk, P = 4: stops paying at about 1000 Mbit/s"
    assert oktopk["changes_at"] == [1000.0]
    assert topka["sentence"] == "topka, P = 4: stops paying between 10000 Mbit/s and an unlimited link"
    assert topka["changes_at"] == [None]
    assert bf16["sentence"] == "bf16, P = 4: faster than dense at 100 Mbit/s, 10000 Mbit/s, an unlimited link"
    assert bf16["pays_at"] == [100.0, 10_000.0, None]
    assert gtopk["sentence"].startswith("gtopk, P = 4: slower than dense at 100")


def test_what_the_spread_does_not_tell_is_no_verdict() -> None:
    (alike,) = verdicts_of([setting(4, 100.0, topka=1.05)])
    assert alike["sentence"] == "topka, P = 4: no faster or slower than dense beyond the spread at 100 Mbit/s"
    assert alike["pays_at"] == alike["changes_at"] == []
    (between,) = verdicts_of(
        [setting(4, 100.0, topka=4), setting(4, 400.0, topka=1.05), setting(4, 1600.0, topka=0.25)]
    )
    alike_at = "no faster or slower than dense beyond the spread at 400 Mbit/s"
    assert between["sentence"] == f"topka, P = 4: stops paying at about 400 Mbit/s; {alike_at}"


def test_sentences_over_ranks_where_there_are_several() -> None:
    settings = [setting(2, 100.0, topka=4.0), setting(8, 100.0, topka=0.3)]
    assert [verdict["sentence"] for verdict in verdicts_of(settings)] == [
        "topka, P = 2: faster than dense at 100 Mbit/s",
        "topka, P = 8: slower than dense at 100 Mbit/s",
        "topka, 100 Mbit/s: stops paying at about P = 4.2",
    ]


def test_a_prediction_adds_the_slowest_ranks_stretches() -> None:
    numel, entry = 200_000, Entry("topka", 0.01)
    times = {
        "small": {"all_gather": [0.001, 0.003, 0.002]},
        "big": {"all_gather": [0.012, 0.012, 0.012]},
        "words": {"all_gather": 1000},
    }
    computing = ([[0.1, 0.4], [0.1, 0.4], [5.0, 0.4]], [[0.3, 0.2], [0.3, 0.2, 0.1], [0.2, 0.1]])
    probed = figures_of([{**times, "computing": [rounds]} for rounds in computing], [entry], numel)
    assert probed["alpha_s"] == {"all_gather": 0.002}
    assert probed["beta_s_per_word"] == {"all_gather": pytest.approx(1e-5)}
    (row,) = probed["computing_s_per_element"]
    assert row["seconds"] == pytest.approx((0.3 + 0.4 + 0.0) / computing_numel(numel))
    cost = cost_of(entry, numel, 2)
    assert cost is not None
    words = sum(call.words for call in cost.calls)
    assert predict_seconds(probed, entry, numel, 2) == pytest.approx(SHARE * 0.7 + 2 * 0.002 + 1e-5 * words)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_but_powersgd_has_a_cost_in_calls(name: str) -> None:
    entry = Entry(name, 0.01 if isinstance(METHODS[name], Ours) else None)
    cost = cost_of(entry, 100_000, 4)
    if isinstance(METHODS[name], PowerSgd):
        assert predict_seconds({}, entry, 100_000, 4) is cost is None
    else:
        assert cost is not None
        assert sum(call.words for call in cost.calls) >= cost.typical * 0.999
