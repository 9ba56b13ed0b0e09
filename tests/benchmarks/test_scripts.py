"""Do the benchmarks run, and do their figures hang together?"""

import json

import pytest

from benchmarks import reduce, volume


@pytest.fixture(scope="module")
def volumes():
    return volume.main(["--numel", "20000", "--ranks", "4", "--ranks", "16", "--steps", "6"])


def rows_of(result, algorithm):
    return [row for row in result["rows"] if row["algorithm"] == algorithm]


def test_volume_prints_its_result_as_the_last_line(tmp_path, capsys):
    file = tmp_path / "volume.json"
    result = volume.main(["--numel", "500", "--ranks", "2", "--steps", "3", "--json", str(file)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result == json.loads(file.read_text())
    assert {row["ranks"] for row in result["rows"]} == {2}


def test_volume_covers_every_algorithm_at_every_size(volumes):
    names = {"dense", "topka", "topkdsa", "gtopk", "gaussiank", "oktopk bounded", "oktopk paper"}
    assert {row["algorithm"] for row in volumes["rows"]} == names
    assert all([row["ranks"] for row in rows_of(volumes, name)] == [4, 16] for name in names)


def test_no_rank_leaves_the_predicted_band(volumes):
    for row in volumes["rows"]:
        least, most = row["predicted"]["least"], row["predicted"]["most"]
        assert least <= row["least_words"] <= row["words"] <= row["most_words"] <= most, row


@pytest.mark.parametrize("algorithm", ["dense", "topka", "gtopk", "oktopk bounded"])
def test_words_are_as_predicted_where_no_step_differs(volumes, algorithm):
    assert all(row["words"] == row["predicted"]["typical"] for row in rows_of(volumes, algorithm))


def test_words_grow_with_the_ranks_for_topka_and_not_for_oktopk(volumes):
    def growth(algorithm):
        few, many = rows_of(volumes, algorithm)
        return many["words"] / few["words"]

    assert growth("topka") == pytest.approx(15 / 3)
    assert growth("oktopk bounded") < 1.5
    assert growth("oktopk paper") < 2  # at this size the words that each peer gets whatever k is still show


def test_volume_wants_steps_that_count(capsys):
    with pytest.raises(SystemExit):
        volume.main(["--steps", "2"])
    assert "--steps must be above 2" in capsys.readouterr().err


@pytest.mark.processes
def test_reduce_times_every_contender(tmp_path, capsys):
    file = tmp_path / "reduce.json"
    result = reduce.main(["--numel", "1000", "--ranks", "2", "--rounds", "2", "--json", str(file)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result == json.loads(file.read_text())
    (steps,) = result["steps"]
    contenders = steps["contenders"]
    assert list(contenders) == ["oktopk bounded", "oktopk paper", "dense all_reduce", "torch.topk alone"]
    assert all(
        0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"] for row in contenders.values()
    )
    assert contenders["dense all_reduce"]["sent_bytes"] == 4 * 1000  # 2n(P-1)/P words
    assert 0 < contenders["oktopk bounded"]["sent_bytes"] < 4 * 1000


def test_phases_and_the_rest_add_up_to_the_slowest_rank():
    quick = {"seconds": 1.0, "sent_bytes": 8, "phases": {"select": 0.5}}
    slow = {"seconds": 2.0, "sent_bytes": 4, "phases": {"select": 0.5, "gather": 1.0}}
    laps = reduce.WARM_UP + 1
    summary = reduce._step_summary([[dict(quick) for _ in range(laps)], [dict(slow) for _ in range(laps)]])
    assert summary["seconds"]["median"] == 2.0
    assert summary["sent_bytes"] == 8
    assert {name: spread["median"] for name, spread in summary["phases"].items()} == {
        "select": 0.5,
        "gather": 1.0,
        "other": 0.5,
    }


def test_selection_is_compared_with_topk_and_with_memory():
    selection = reduce.time_selection(1000, 0.01, rounds=1)
    assert selection["k"] == 10
    assert 10 <= selection["selected"] <= 12
    assert sum(selection["parts_s"].values()) == pytest.approx(selection["ours_s"]["median"])
    for other in ("triad", "topk"):
        ratio = selection["ours_s"]["median"] / selection[f"{other}_s"]["median"]
        assert selection[f"over_{other}"]["median"] == pytest.approx(ratio)
