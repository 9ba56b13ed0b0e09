"""The experiments still run: one short training of two settings, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.learning.__main__ import main
from tests.research.test_learning import made_up


@pytest.mark.slow
def test_two_settings_train_and_are_tabled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up(8).save(tmp_path / "packed.pt")
    arguments = ["--corpus", f"{tmp_path}/packed.pt", "--batch", "2", "--workers", "2", "--set", "augment=no"]
    arguments += ["--steps", "4", "--dense-steps", "2", "--settings", "dense,default", "--no-plots"]
    result = main([*arguments, "--out", str(tmp_path / "out")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert [row["name"] for row in result["rows"]] == ["dense", "default"]
    assert result["rows"][1]["times_fewer_bytes"] > 10
