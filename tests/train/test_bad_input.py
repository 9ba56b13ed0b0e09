"""What is wrong is said in one line that names the file or the setting, before training where it can be known."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from oktopk.cli.root import app
from oktopk.errors import OktopkError, PeerError, StateError
from oktopk.train.rundir import RunError
from tests.integrations.examples import run as run_python
from tests.train.data.corpus import tone
from tests.train.runs import last, succeed, train

pytestmark = pytest.mark.timeout(280)  # real runs, also on a machine that is busy

Settings = dict[str, Any]
MANIFEST = "an4_train_manifest.csv"


@pytest.fixture
def corpus(tmp_path: Path, speech: Path) -> Path:
    """A corpus to spoil."""
    shutil.copytree(speech, tmp_path / "corpus")
    return tmp_path / "corpus"


def some_wav(corpus: Path) -> Path:
    return corpus / (corpus / MANIFEST).read_text().splitlines()[7].split(",")[0]


def some_txt(corpus: Path) -> Path:
    return corpus / (corpus / MANIFEST).read_text().splitlines()[7].split(",")[1]


def no_folder(corpus: Path) -> Path:
    shutil.rmtree(corpus)
    return corpus


def no_manifest(corpus: Path) -> Path:
    (corpus / MANIFEST).unlink()
    return corpus / MANIFEST


def empty_manifest(corpus: Path) -> Path:
    (corpus / MANIFEST).write_text("")
    return corpus / MANIFEST


def no_validation(corpus: Path) -> Path:
    (corpus / "an4_val_manifest.csv").write_text("\n")
    return corpus / "an4_val_manifest.csv"


def missing_wav(corpus: Path) -> Path:
    wav = some_wav(corpus)
    wav.unlink()
    return wav


def odd_characters(corpus: Path) -> Path:
    some_txt(corpus).write_text("ÉTÉ 42\n")
    return some_txt(corpus)


def no_text(corpus: Path) -> Path:
    some_txt(corpus).write_text("\n")
    return some_txt(corpus)


def no_sound(corpus: Path) -> Path:
    soundfile.write(some_wav(corpus), np.zeros(0, dtype=np.int16), 16_000, subtype="PCM_16")
    return some_wav(corpus)


def no_bytes(corpus: Path) -> Path:
    some_wav(corpus).write_bytes(b"")
    return some_wav(corpus)


def eight_khz(corpus: Path) -> Path:
    soundfile.write(some_wav(corpus), tone(1.0, rate_hz=8_000), 8_000, subtype="PCM_16")
    return some_wav(corpus)


def stereo(corpus: Path) -> Path:
    soundfile.write(some_wav(corpus), np.stack([tone(), tone()], axis=1), 16_000, subtype="PCM_16")
    return some_wav(corpus)


def shorter_than_its_text(corpus: Path) -> Path:
    soundfile.write(some_wav(corpus), tone(0.1), 16_000, subtype="PCM_16")
    some_txt(corpus).write_text("ENTER SIX TWO ONE\n")
    return some_wav(corpus)


SPOILERS = [
    no_folder, no_manifest, empty_manifest, no_validation, missing_wav, odd_characters, no_text, no_sound, no_bytes,
    eight_khz, stereo, shorter_than_its_text,
]  # fmt: skip


def one_line(folder: Path, data: Path, *more: object) -> str:
    """Return the error of a run that does not start, and leaves nothing behind."""
    words = ["train", "--data-dir", data, "--runs", folder / "runs", "--set", "device=cpu", *more]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert not (folder / "runs").exists()
    return str(lines[0])


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("spoil", SPOILERS)
def test_bad_data_is_named_before_anything_starts(
    tmp_path: Path, corpus: Path, spoil: Callable[[Path], Path], nproc: int
) -> None:
    path = spoil(corpus)
    assert str(path) in one_line(tmp_path, corpus, "--nproc", nproc, "--batch-size", 2)


@pytest.mark.parametrize(
    ("nproc", "more", "wanted"),
    [
        (1, ("--batch-size", 33), "33 in all, and there are 32"),
        (2, ("--batch-size", 17), "34 in all, and there are 32"),
        (1, ("--batch-size", 8, "--nsteps-update", 5), "40 in all, and there are 32"),
        (2, ("--batch-size", 8, "--nsteps-update", 3), "48 in all, and there are 32"),
        (33, ("--batch-size", 1), "33 in all, and there are 32"),
        (17, ("--batch-size", 1), "16 utterances to evaluate for 17 workers"),
    ],
)
def test_too_little_data(tmp_path: Path, speech: Path, nproc: int, more: tuple[object, ...], wanted: str) -> None:
    assert wanted in one_line(tmp_path, speech, "--nproc", nproc, *more)


@pytest.mark.processes
def test_bad_data_ends_workers_that_others_started(tmp_path: Path, tiny: Settings, corpus: Path) -> None:
    """As under mpirun: there is nobody who looked before."""
    wav = eight_khz(corpus)
    ended = train(tmp_path / "run", 2, **{**tiny, "data_dir": str(corpus)})
    assert all(isinstance(result, OktopkError) and str(wav) in str(result) for result in ended.results)
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_too_little_data_ends_workers_that_others_started(tmp_path: Path, tiny: Settings) -> None:
    ended = train(tmp_path / "run", 2, **{**tiny, "nsteps_update": 9})
    assert all(isinstance(result, OktopkError) and "36 in all" in str(result) for result in ended.results)
    assert not (tmp_path / "run").exists()


# The folder of the run


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_folder_that_cannot_be_made(tmp_path: Path, speech: Path, nproc: int) -> None:
    (tmp_path / "file").write_text("")
    more = ("--nproc", nproc, "--batch-size", 2, "--runs", tmp_path / "file" / "runs", "--name", "a")
    message = one_line(tmp_path, speech, *more)
    assert f"cannot write the run's folder {tmp_path / 'file' / 'runs' / 'a'}: Not a directory" in message
    assert "--runs" in message


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_one_may_not_write_to(tmp_path: Path, speech: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "Permission denied" in one_line(tmp_path, speech, "--nproc", 1, "--runs", tmp_path / "locked")


def small_files_on_rank_1(rank: int) -> None:
    """Let rank 1 write no file as large as a checkpoint: to the writer it is what a full disk is."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.processes
def test_a_checkpoint_that_one_rank_cannot_write_is_there_on_none(tmp_path: Path, tiny: Settings) -> None:
    ended = train(tmp_path / "run", 2, **tiny, prepare=small_files_on_rank_1)
    assert isinstance(ended.results[0], PeerError)
    assert "writing a checkpoint failed on rank 1" in str(ended.results[0])
    assert "rank1.pt" in str(ended.results[0])
    assert isinstance(ended.results[1], RunError)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.fixture(params=["3m", "24k"])
def tiny_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk with no room for a checkpoint, or hardly any at all."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(tiny_disk: Path, tmp_path: Path, speech: Path) -> None:
    more = ("--nproc", 1, "--batch-size", 4, "--runs", tiny_disk, "--set", "max_steps=2", "--set", "threads=1")
    words = ["train", "--data-dir", speech, "--name", "a", *more]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    last_line = result.output.strip().splitlines()[-1]
    assert f"cannot write {tiny_disk / 'a'}/" in last_line
    assert "No space left on device" in last_line


# Checkpoints that will not do


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, speech: Path) -> Path:
    """A run of two workers that stopped, with two checkpoints."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    settings: Settings = {"dataset": "an4", "data_dir": str(speech), "batch_size": 2, "dense_steps": 1, "threads": 1}
    succeed(folder, 2, **settings, max_steps=2, checkpoint_every=1, lr=0.001, timeout_s=20.0, device="cpu")
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("name", [pytest.param("shared.pt", marks=pytest.mark.slow), "rank1.pt"])
def test_a_truncated_checkpoint_ends_all_workers(tmp_path: Path, stopped: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    os.truncate(last(folder) / name, 1000)
    ended = train(folder, 2, resume=last(folder), max_steps=0)
    assert isinstance(ended.results[1], StateError)
    assert str(last(folder) / name) in str(ended.results[1])
    assert f"--resume {folder / 'checkpoints' / 'step-00000001'}" in str(ended.results[1])
    assert name in str(ended.results[0])
    assert isinstance(ended.results[0], OktopkError)


@pytest.mark.processes
@pytest.mark.slow
def test_a_truncated_checkpoint_on_the_command_line(tmp_path: Path, stopped: Path) -> None:
    """Real workers: they end, all of them, with words and no traceback."""
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    os.truncate(last(folder) / "rank1.pt", 1000)
    done = run_python("-m", "oktopk", "train", "--resume", folder, "--set", "max_steps=0")
    assert done.returncode != 0
    assert "Traceback" not in done.stdout, done.stdout
    assert "rank1.pt cannot be read" in done.stdout
    assert not [line for line in _processes() if str(folder) in line]


def _processes() -> list[str]:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
