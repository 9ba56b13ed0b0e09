from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oktopk.train.data.synth import make_speech
from tests.train import runs


@pytest.hookimpl(tryfirst=True)  # before the fixtures of a module, whose runs take the time of its first test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the runs of a test end before pytest ends the test, whatever its mark says."""
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark else item.config.getoption("timeout") or item.config.getini("timeout")
    runs.set_deadline(float(seconds) - runs.MARGIN_S)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Undo what a run in this process has set: on a busy machine threads wait for each other."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 32 short utterances, 16 to validate with."""
    folder = tmp_path_factory.mktemp("speech")
    make_speech(folder / "corpus", 32, val_utterances=16, grammar="commands", jobs=1)
    return folder / "corpus"


@pytest.fixture(scope="session")
def tiny(speech: Path) -> runs.Settings:
    """Settings of a run of seconds: 8 steps an epoch on two workers, 16 on one."""
    return {
        "dataset": "an4", "data_dir": str(speech), "batch_size": 2, "max_epochs": 1, "lr": 0.003, "clip": 20.0,
        "dense_steps": 3, "threads": 1, "device": "cpu", "timeout_s": 20.0,
    }  # fmt: skip


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny: runs.Settings) -> runs.Ended:
    """Two epochs of eight steps on two workers: three dense steps, then sparse ones. Copy its folder to change it."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    return runs.succeed(folder, 2, **{**tiny, "max_epochs": 2, "checkpoint_every": 3})
