"""The real corpus, where it is there: it imports, it checks, and three epochs of the small recipe learn from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.examples import ROOT, run
from tests.train.runs import Ended

ARCHIVE = ROOT.parent / "shared" / "an4" / "an4_raw.bigendian.tar.xz"
pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


@pytest.mark.skipif(not ARCHIVE.exists(), reason=f"the AN4 corpus is not beside the project ({ARCHIVE.name})")
def test_three_epochs_of_the_small_recipe_on_the_real_corpus(tmp_path: Path) -> None:
    imported = run("-m", "oktopk", "data", "an4", ARCHIVE, "--out", tmp_path / "an4")
    assert imported.returncode == 0, imported.stdout
    done = run(
        "-m", "oktopk", "train", "--data-dir", tmp_path / "an4", "--max-epochs", 3, "--dense-steps", 100,
        "--runs", tmp_path, "--name", "real", seconds=450,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    losses = [epoch["train_loss"] for epoch in Ended(tmp_path / "real").epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < 0.6 * losses[0]
    summary = json.loads((tmp_path / "real" / "summary.json").read_text())
    assert summary["steps"] == 3 * (948 // 16)
    assert summary["sparse_steps"] == summary["steps"] - 100
    assert 0.96 < summary["sparsity"] < 0.975  # 3 % is sent, and the small tensors
    assert summary["wer"] is not None
