import json
import os
import re
import shutil
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.cli.root import load
from oktopk.train import cli
from oktopk.train.config import Config
from oktopk.train.plan import make_plan
from oktopk.train.rundir import RunDir
from tests import commands
from tests.integrations.examples import ROOT
from tests.train.test_dist import SRUN


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OKTOPK_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


refused = partial(commands.refused, "train")


def succeed(words, *more):
    result = commands.call("train", words, *more)
    assert result.exit_code == 0, result.output
    return result.output


def test_dry_run_says_what_would_be_and_writes_nothing(tmp_path):
    output = succeed("--dry-run --max-epochs 10 --nproc 2 --runs", tmp_path / "runs")
    assert "320 in 10 epochs of 32: 128 dense, 192 sparse" in output
    assert "a dense step sends 4.25 MB a worker, a sparse one about" in output
    assert f"would write {tmp_path / 'runs'}" in output
    assert "WARNING" not in output
    dense = succeed("--dry-run --compressor dense --nproc 2 --runs", tmp_path / "runs")
    assert "sparse" not in dense
    cut = succeed("--dry-run --max-steps 12 --dense-steps 3 --nproc 2 --runs", tmp_path / "runs")
    assert "12 of the 448 in 14 epochs of 32: 3 dense, 9 sparse" in cut
    assert "one worker has nobody to exchange" in succeed("--dry-run --nproc 1 --runs", tmp_path / "runs")
    assert "WARNING no step will be sparse" in succeed("--dry-run --max-epochs 1 --nproc 2 --runs", tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_make_train_trains_dense_and_the_default_alike_and_compares_them(tmp_path):
    made = subprocess.run(
        ["make", "-n", "-o", ".venv/ready", "train"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [line.partition(" > ")[0].split() for line in made.stdout.splitlines()]
    dense, ours, report = (words[1:] for words in lines if words[0] == ".venv/bin/oktopk")
    folder = dense[dense.index("--runs") + 1]
    assert report == ["report", f"{folder}/dense", f"{folder}/oktopk", "--text"]
    changed = " ".join(dense).replace(" --compressor dense", "").replace("--name dense", "--name oktopk")
    assert changed.split() == ours
    for command, steps in ((dense, "320 in 10 epochs of 32"), (ours, "320 in 10 epochs of 32: 128 dense, 192 sparse")):
        output = succeed(" ".join(command[1:]).replace(folder, f"{tmp_path}"), "--dry-run")
        assert steps in output
        assert ("sparse" in output) == (command is ours)


def documented():
    """Return the arguments of every `oktopk train` that the pages and the help text tell to type."""
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "docs/gallery/README.md",
        *ROOT.glob("examples/*/*.md"),
    ]
    texts = [re.sub(r"\\\n +", "", page.read_text()) for page in pages] + [cli.train.__doc__]
    commands = [words for text in texts for words in re.findall(r"(?m)^    oktopk train\b(.*?)(?:  +\S.*)?$", text)]
    return sorted({" ".join(re.sub("#.*", "", words).split()) for words in commands if "..." not in words})


@pytest.mark.parametrize("words", [words for words in documented() if "--resume" not in words])
def test_what_the_pages_tell_to_type_exchanges_something_sparsely(words, monkeypatch):
    """On the corpus as it is: at least two workers, and sparse steps, unless it says otherwise."""
    jobs = []
    monkeypatch.setattr(cli, "_start", lambda job, workers, _: jobs.append((job.config, workers)))
    monkeypatch.setattr(cli, "_start_elastic", lambda job, _bounds, _house, n, *_: jobs.append((job.config, n)))
    monkeypatch.setattr(cli, "_dry_run", lambda job, workers: jobs.append((job.config, workers)))
    succeed(words)
    ((config, workers),) = jobs
    counts = (948, 130) if config.dataset == "an4" else (config.utterances, config.val_utterances)
    plan = make_plan(config, workers, *counts, data_dir=ROOT, device="cpu")
    assert plan.warning is None
    assert plan.sparse_steps or config.is_dense


def test_the_plan_of_a_gpt(tmp_path):
    """A net without a recipe has its own, and a folder that is named has text for it."""
    for words in ("--recipe gpt-tiny", "--dnn gpt-tiny"):
        output = " ".join(succeed(f"{words} --dry-run --runs", tmp_path / "runs").replace("│", " ").split())
        assert "gpt-tiny, 426,624 parameters" in output
        assert "1,280 windows to train on, 512 to validate with" in output
        assert "400 in 10 epochs of 40: 80 dense, 320 sparse" in output
        assert "adamw, lr 0.004, falling to 0; momentum 0.9, in sparse steps 0.5 at 1.41 x lr" in output
    assert "text_train.bin: oktopk data text" in refused("--recipe gpt-tiny --dry-run --data-dir", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_their_command_and_the_list_of_settings(speech):
    """The command that users of the research code know, word for word."""
    theirs = "--dnn lstman4 --dataset an4 --max-epochs 1 --batch-size 8 --lr 0.001 --compressor oktopk --density 0.02"
    output = succeed(f"{theirs} --dry-run --data-dir", speech)
    assert all(word in output for word in ("lr 0.001,", "lstman4, 27,", "density 0.02"))
    settings = succeed("--settings")
    assert all(name in settings for name in [*vars(Config()), "lstman4-extended"])


def test_a_run_from_the_command_line(tmp_path, speech):
    """In this process, where every warning is an error."""
    run = tmp_path / "a"
    small = "--name a --nproc 1 --batch-size 4 --max-epochs 1 --dense-steps 2 --set threads=1 --set device=cpu"
    output = succeed(f"{small} --max-steps 4 --runs {tmp_path} --data-dir", speech)
    assert "compression was active on 2 of 4 steps" in output
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert RunDir.open(run).load_config().lr == 0.01  # of the recipe
    for name in ("config.json", "versions.json", "metrics.jsonl", "logs/rank0.log", "tensorboard", "checkpoints/last"):
        assert (run / name).exists()
    (longer,) = re.findall(r"oktopk train (--resume .* --max-steps 8) ", output)
    assert "going on from" in succeed(longer.replace("steps 8", "steps 6"))
    assert json.loads((run / "summary.json").read_text())["steps"] == 6
    assert RunDir.open(run).load_config().max_steps == 6
    assert "the state of sgd" in refused(f"--resume {run} --set optimizer=adamw")


def test_a_wrong_setting_is_named_with_what_was_meant():
    for words, said in {
        "--set lrr=1": "Did you mean 'lr'?",
        "--compressor oktop": "Did you mean 'oktopk'?",
        "--dnn lstman": "Did you mean 'lstman4'?",
        "--recipe an4small": "Did you mean 'an4-small'?",
        "--set recipe=an4small": "Did you mean 'an4-small'?",
        "--set lr": "--set wants key=value, not 'lr'",
        "--set lr=fast": "lr wants a number, not 'fast'",
    }.items():
        assert said in refused(f"{words} --dry-run")


def test_resume_wants_a_run(tmp_path):
    assert "is not the folder of a run: it has no config.json" in refused("--resume", tmp_path)
    run = RunDir.create(tmp_path, "a", Config())
    assert "leave --recipe out" in refused("--recipe lstman4 --resume", run.path)
    assert "no checkpoint to go on from" in refused("--resume", run.path)
    (run.checkpoints / "step-00000001").mkdir()
    (run.checkpoints / "last").write_text("step-00000001")
    assert "the checkpoint has no" in refused("--resume", run.path)


# The tests of manifests have the other faults.
@pytest.mark.parametrize(("nproc", "name"), [(1, "an4_val_manifest.csv"), (2, "*/**/*.wav")])
def test_bad_data_and_a_folder_that_cannot_be_made_are_named_before_anything_starts(tmp_path, speech, nproc, name):
    corpus, runs = shutil.copytree(speech, tmp_path / "corpus"), tmp_path / "runs"
    small = f"--nproc {nproc} --batch-size 2 --set device=cpu --set threads=1 --name a --data-dir {corpus} --runs"
    runs.write_text("")
    said = refused(small, runs)
    assert f"cannot write the run's folder {runs / 'a'}: Not a directory; --runs" in said
    assert refused(f"--dry-run {small}", runs) == said
    runs.unlink()
    path = next(corpus.glob(name))
    path.write_bytes(b"")
    assert str(path) in refused(small, runs)
    assert not runs.exists()


def test_too_little_data(tmp_path, speech):
    for size, said in {
        "--nproc 1 --batch-size 33": "33 in all, and there are 32",
        "--nproc 2 --batch-size 8 --nsteps-update 3": "48 in all, and there are 32",
        "--nproc 33 --batch-size 1": "33 in all, and there are 32",
        "--nproc 17 --batch-size 1": "17 in all, and there are 16",
    }.items():
        words = f"{size} --set device=cpu --set threads=1 --runs {tmp_path / 'runs'} --data-dir"
        assert said in refused(words, speech)
        assert said in refused(f"--dry-run {words}", speech)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("asked", "starts"), [("--nproc 2", [2]), ("--nproc 1", []), ("", [])])
def test_the_only_task_of_a_job_may_start_workers_and_one_of_several_no_others(monkeypatch, asked, starts):
    """As in the shell that `srun --pty bash` opens: its single place is no reason to refuse --nproc."""
    env = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_GTIDS": "0"}
    monkeypatch.setattr(cli, "os", SimpleNamespace(environ=env))
    started, worked = [], []
    monkeypatch.setattr(cli, "_start", lambda _, workers, __: started.append(workers))
    monkeypatch.setattr(cli, "work", lambda _, place: worked.append(place.size))
    succeed(asked)
    assert (started, worked) == (starts, [] if starts else [1])
    monkeypatch.setattr(cli, "os", SimpleNamespace(environ=SRUN))
    assert "srun started 3 workers: leave --nproc 2 out" in refused("--nproc 2")


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("slurm.sh", "srun --kill-on-bad-exit=1 oktopk train", ""),
        ("pbs.sh", "mpiexec -n 8 --ppn 4 ", "from x1:20123\n"),
    ],
)
def test_a_job_script_starts_our_command_with_flags_that_exist(name, begins, ends, tmp_path):
    """With stand-ins for srun and mpiexec, which print their arguments and the master."""
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")
    for launcher in ("srun", "mpiexec"):
        path = tmp_path / launcher
        path.write_text(f'#!/bin/sh\necho {launcher} "$@" from "${{MASTER_ADDR-}}:${{MASTER_PORT-}}"\n')
        path.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "PBS_JOBID": "123[4].pbs"}
    env |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
    run = partial(subprocess.run, ["bash", ROOT / "examples" / "launch" / name], cwd=tmp_path, timeout=30)
    run = partial(run, capture_output=True, text=True)
    done = run(env=env | {"DATA_DIR": "d"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(begins)
    assert done.stdout.endswith(ends)
    flags = set(re.findall(r"--[a-z][a-z-]*", done.stdout.partition("oktopk train")[2]))
    assert len(flags) > 5
    assert flags <= {flag for each in load("train").params for flag in each.opts}
    done = run(env=env)
    assert done.returncode != 0
    assert "say where the data is" in done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--data_dir d --max_epochs 2", "--data-dir d --max-epochs 2"), ("--data_dir=a_b/c_d", "--data-dir=a_b/c_d"),
        ("--nworkers 2 --nworkers=2", "--nproc 2 --nproc=2"), ("--lstm-lr 0.1 --lstm_lr=0.2", "--lr 0.1 --lr=0.2"),
        ("--compressor none", "--compressor dense"), ("--compressor=topkA", "--compressor topka"),
        ("--compressor topkDSA --lr 1", "--compressor topkdsa --lr 1"),
        ("train --compression", "train"), ("--compression True --lr 1", "--lr 1"),
        ("--compression=False", "--compressor dense"), ("--compression no", "--compressor dense"),
        ("--compression --density 0.1", "--density 0.1"),
    ],
)  # fmt: skip
def test_an_old_spelling_becomes_todays_with_a_note(old, new):
    arguments, notes = cli.modern(old.split())
    assert arguments == new.split()
    changed = sum(word.split("=")[0] not in new for word in old.split() if word.startswith("--"))
    assert len(notes) >= max(1, changed)
    assert all(note.startswith("--") for note in notes)
    assert cli.modern(arguments) == (arguments, [])


@given(st.lists(st.sampled_from([
    "train", "--dnn=lstman4", "--data-dir", "a_b", "--set=lr_anneal=1.1", "clip_place=local", "--compressor", "oktopk",
    "--compressor=topka", "--version", "--resume", "runs/an4_small", "--name=my_run",
])))  # fmt: skip
def test_todays_spelling_is_left_alone(arguments):
    assert cli.modern(arguments) == (arguments, [])
