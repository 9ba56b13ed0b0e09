import pytest

from oktopk.train.data.synth import make_speech
from tests.train import runs


@pytest.fixture(scope="session")
def speech(tmp_path_factory):
    """A corpus of 32 short utterances, 16 to validate with."""
    folder = tmp_path_factory.mktemp("speech")
    make_speech(folder / "corpus", 32, val_utterances=16, grammar="commands", jobs=1)
    return folder / "corpus"


@pytest.fixture(scope="session")
def tiny(speech):
    """Settings of a run of seconds: 8 steps an epoch on two workers, 16 on one."""
    return {
        "dataset": "an4", "data_dir": str(speech), "batch_size": 2, "max_epochs": 1, "lr": 0.003, "clip": 20.0,
        "dense_steps": 3, "threads": 1, "device": "cpu", "timeout_s": 20.0,
    }  # fmt: skip


@pytest.fixture(scope="session")
def mixed(tmp_path_factory, tiny):
    """Two epochs of eight steps on two workers: three dense steps, then sparse ones. Copy its folder to change it."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    return runs.succeed(folder, 2, **{**tiny, "max_epochs": 2, "checkpoint_every": 3})
