"""Errors of the user are one line that names the file or the setting, before training where it can be known."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from oktopk.cli.root import app
from oktopk.errors import OktopkError, PeerError, StateError
from oktopk.train.rundir import RunError
from tests.integrations.examples import run as run_python
from tests.train.data.corpus import tone
from tests.train.runs import Ended, Settings, last, train

pytestmark = pytest.mark.timeout(280)  # real runs, also on a machine that is busy

TRAIN, VAL = "an4_train_manifest.csv", "an4_val_manifest.csv"
SOUNDS = {
    "no sound": np.zeros(0, dtype=np.int16),
    "8 kHz": tone(1.0, rate_hz=8_000),
    "stereo": np.stack([tone(), tone()], axis=1),
    "shorter than its text": tone(0.1),
}
TEXTS = {"odd characters": "ÉTÉ 42\n", "no text": "\n"}
FILES = {"no train manifest": TRAIN, "empty train manifest": TRAIN, "empty validation manifest": VAL}


def spoil(corpus: Path, how: str) -> Path:
    """Spoil a corpus; return the path that the error has to name."""
    wav, txt = (corpus / name for name in (corpus / TRAIN).read_text().splitlines()[7].split(","))
    if how == "no folder":
        shutil.rmtree(corpus)
        return corpus
    if how in FILES:
        path = corpus / FILES[how]
        path.write_text("\n") if "empty" in how else path.unlink()
        return path
    if how in TEXTS:
        txt.write_text(TEXTS[how])
        return txt
    if how in SOUNDS:
        soundfile.write(wav, SOUNDS[how], 8_000 if how == "8 kHz" else 16_000, subtype="PCM_16")
        txt.write_text("ENTER SIX TWO ONE\n")
    else:
        wav.write_bytes(b"") if how == "no bytes" else wav.unlink()
    return wav


SPOILED = ["no folder", *FILES, *TEXTS, *SOUNDS, "no bytes", "no wav"]


@pytest.fixture
def corpus(tmp_path: Path, speech: Path) -> Path:
    """A corpus to spoil."""
    return Path(shutil.copytree(speech, tmp_path / "corpus"))


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


@pytest.mark.parametrize(("how", "nproc"), [(how, 1 + i % 2) for i, how in enumerate(SPOILED)])
def test_bad_data_is_named_before_anything_starts(tmp_path: Path, corpus: Path, how: str, nproc: int) -> None:
    path = spoil(corpus, how)
    assert str(path) in one_line(tmp_path, corpus, "--nproc", nproc, "--batch-size", 2)


@pytest.mark.parametrize(
    ("nproc", "batch", "passes", "wanted"),
    [
        (1, 33, 1, "33 in all, and there are 32"),
        (2, 8, 3, "48 in all, and there are 32"),
        (33, 1, 1, "33 in all, and there are 32"),
        (17, 1, 1, "16 utterances to evaluate for 17 workers"),
    ],
)
def test_too_little_data(tmp_path: Path, speech: Path, nproc: int, batch: int, passes: int, wanted: str) -> None:
    assert wanted in one_line(tmp_path, speech, "--nproc", nproc, "--batch-size", batch, "--nsteps-update", passes)


@pytest.mark.processes
@pytest.mark.parametrize("more", [{}, {"nsteps_update": 9}])
def test_bad_data_ends_workers_that_a_launcher_started(
    tmp_path: Path, tiny: Settings, corpus: Path, more: Settings
) -> None:
    """As under mpirun, where no process has checked the data before."""
    wanted = "36 in all" if more else str(spoil(corpus, "8 kHz"))
    ended = train(tmp_path / "run", 2, **{**tiny, "data_dir": str(corpus), **more})
    assert all(isinstance(result, OktopkError) and wanted in str(result) for result in ended.results)
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
    """Let rank 1 write no file as large as a checkpoint: its writer cannot tell this from a full disk."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@pytest.mark.processes
def test_a_checkpoint_that_one_rank_cannot_write_is_there_on_none(tmp_path: Path, tiny: Settings) -> None:
    ended = train(tmp_path / "run", 2, **tiny, max_steps=1, prepare=small_files_on_rank_1)
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


def test_a_full_disk(tiny_disk: Path, speech: Path) -> None:
    more = ("--nproc", 1, "--batch-size", 4, "--runs", tiny_disk, "--set", "max_steps=1", "--set", "threads=1")
    words = ["train", "--data-dir", speech, "--name", "a", *more]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    last_line = result.output.strip().splitlines()[-1]
    assert f"cannot write {tiny_disk / 'a'}/" in last_line
    assert "No space left on device" in last_line


# Checkpoints that cannot be read


@pytest.fixture
def truncated(tmp_path: Path, mixed: Ended) -> Path:
    """A run whose last checkpoint has a part that was cut off."""
    folder = tmp_path / "run"
    shutil.copytree(mixed.folder, folder)
    os.truncate(last(folder) / "rank1.pt", 1000)
    return folder


@pytest.mark.processes
def test_a_truncated_checkpoint_ends_all_workers(truncated: Path) -> None:
    ended = train(truncated, 2, resume=last(truncated))
    assert isinstance(ended.results[1], StateError)
    assert str(last(truncated) / "rank1.pt") in str(ended.results[1])
    assert f"--resume {truncated / 'checkpoints' / 'step-00000015'}" in str(ended.results[1])
    assert isinstance(ended.results[0], OktopkError)
    assert "rank1.pt" in str(ended.results[0])


@pytest.mark.slow
def test_a_truncated_checkpoint_on_the_command_line(truncated: Path) -> None:
    """Real workers: they end, all of them, with words and no traceback."""
    done = run_python("-m", "oktopk", "train", "--resume", truncated)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout, done.stdout
    assert "rank1.pt cannot be read" in done.stdout
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(truncated) not in processes
