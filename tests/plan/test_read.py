"""The file of a plan, and what is wrong with one."""

from pathlib import Path

import pytest

from oktopk import SettingError
from oktopk.plan.read import read_plan

GOOD = """
[model]
numel = 1000000
compute_ms = 100
optimizer = "adam"
[[level]]
name = "GPU"
size = 8
mbit = 1e6
[[level]]
name = "node"
size = 4
mbit = 1000
latency_ms = 0.1
[training]
steps = 100
[money]
rank_hour = 2
"""


def test_a_file_has_levels_model_training_and_money(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(GOOD)
    inputs = read_plan(tmp_path / "plan.toml")
    assert inputs.profile is not None
    assert inputs.topology is not None
    assert inputs.money is not None
    assert (inputs.profile.numel, inputs.profile.optimizer, inputs.topology.size) == (1_000_000, "adam", 32)
    assert inputs.profile.compute_s == pytest.approx(0.1)
    assert (inputs.topology.levels[1].latency_s, inputs.steps, inputs.money.rank_hour) == (1e-4, 100, 2)


@pytest.mark.parametrize(("text", "says"), [
    ("[modle]\nnumel = 1", "unknown table [modle]; there is model, level, host, training, money. Did you"),
    ("[model]\nnumell = 1", "[model] has an unknown key 'numell'; there is name, numel, "),
    ("[model]\nnumel = 5", "[model] needs compute_ms"),
    ("[model]\nnumel = 1.5\ncompute_ms = 1", "[model] numel wants a whole number, not 1.5"),
    ("[model]\nnumel = 5\ncompute_ms = true", "[model] compute_ms wants a number, not True"),
    ("[model]\nnumel = 5\ncompute_ms = -1", "[model] compute_ms must be at least 0, not -1"),
    ("[model]\nnumel = 5\ncompute_ms = 1\noptimizer = 'adan'", "unknown optimizer 'adan'; there is adam, sgd."),
    ("[level]\nname = 'x'", "write [[level]], once for each level"),
    ("[[level]]\nname = 'x'\nsize = 2", "[level] needs mbit"),
    ("[[level]]\nname = 'x'\nsize = 5000\nmbit = 1", "size of level 'x' must be at least 1 and at most 4096"),
    ("[training]\nevery = 1", "[training] every must be at least 2"),
    ("level = ", "is no TOML file"),
])  # fmt: skip
def test_a_wrong_file_is_refused_with_the_table_and_key(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(SettingError) as error:
        read_plan(tmp_path / "plan.toml")
    assert says in str(error.value)
