"""Does Ok-Topk work under Lightning, Accelerate and Transformers, as the examples show it?"""

import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from oktopk.telemetry.run import load_run
from tests.integrations.examples import ROOT, TORCHRUN, run, run_example

PACKAGES = ["lightning", "accelerate", "transformers"]
EXAMPLES = {
    "lightning": (ROOT / "examples" / "lightning_ddp.py", "--epochs", 4),
    "accelerate": (*TORCHRUN, ROOT / "examples" / "accelerate_ddp.py", "--epochs", 4),
    "transformers": (*TORCHRUN, ROOT / "examples" / "transformers_trainer.py", "--steps", 80),
}
slow = [pytest.mark.slow, pytest.mark.timeout(500)]
long = [*slow, pytest.mark.long]

LIGHTNING_ON_ONE_DEVICE = """
import lightning
from lightning.pytorch.demos.boring_classes import BoringModel
from oktopk.integrations.lightning import OktopkCallback

lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, logger=False, callbacks=[OktopkCallback("oktopk")]).fit(
    BoringModel()
)
"""
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", 2)  # which starts one process all the same


@pytest.fixture(scope="module", params=[pytest.param(name, marks=slow) for name in PACKAGES])
def trainer(request):
    return request.param


@pytest.fixture(scope="module")
def logs(trainer, tmp_path_factory):
    return tmp_path_factory.mktemp(trainer)


@pytest.fixture(scope="module")
def ran(trainer, logs):
    return run_example(*EXAMPLES[trainer], "--records", logs)


def test_it_trains_and_compresses(ran):
    first, last = ran.losses
    assert last < 0.5 * first
    assert ran.active_of_steps == (70, 80)
    assert "oktopk: OkTopk(density=0.05" in ran.output
    assert ran.output.count("oktopk: AdamW in sparse steps: momentum 0.5, before 0.9; lr x 1.41\n") == 1
    assert ran.weights["0"] == ran.weights["1"]


def test_figures_go_both_ways(ran, logs):
    scalars = dict[str, list[int]]()
    for file in logs.rglob("events.out.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend(event.step for event in events.Scalars(tag))
    (steps,) = (steps for tag, steps in scalars.items() if tag.endswith("oktopk/bytes/sent"))  # some say train/ first
    assert {10, 20, 80} <= set(steps) <= {*range(81)}
    record = load_run(logs / "metrics-0.jsonl")
    known = record.loss[~np.isnan(record.loss)]
    assert len(known) >= 8
    assert known[-1] < known[0]


RESUMED = [pytest.param(name, marks=slow if name == "lightning" else long) for name in PACKAGES]


@pytest.mark.parametrize("trainer", RESUMED, indirect=True, scope="module")
def test_resumed_from_a_checkpoint_it_ends_with_the_same_bits(trainer, ran, tmp_path):
    *command, length = EXAMPLES[trainer]
    checkpoint = ("--checkpoint", tmp_path if trainer == "transformers" else tmp_path / "half.ckpt")
    half = run_example(*command, length // 2, *checkpoint)
    assert half.weights != ran.weights
    resumed = run_example(*command, length, *checkpoint)
    assert trainer == "lightning" or "oktopk: residuals of step 40 from" in resumed.output
    assert resumed.active_of_steps == (40, 40)
    assert resumed.weights == ran.weights


@pytest.mark.parametrize(
    ("command", "model", "advice"),
    [
        (("-c", LIGHTNING_ON_ONE_DEVICE), "BoringModel", 'use Trainer(strategy="ddp"'),
        ((*LAUNCH, EXAMPLES["accelerate"][-3], "--epochs", 1), "Sequential", "call accelerator.prepare"),
        pytest.param((EXAMPLES["accelerate"][-3],), "Sequential", "call accelerator.prepare", marks=pytest.mark.long),
        ((EXAMPLES["transformers"][-3],), "LlamaForCausalLM", "start two"),
    ],
    ids=["lightning", "accelerate launch", "accelerate", "transformers"],
)
@pytest.mark.slow
def test_without_ddp_the_error_says_what_to_do(command, model, advice):
    done = run(*command)
    assert done.returncode != 0
    assert f"SettingError: the model is a {model}, not in DDP, so there is no exchange: {advice}" in done.stdout


def test_importing_oktopk_imports_no_trainer():
    done = run("-c", f"import sys, oktopk; print([name for name in {PACKAGES} if name in sys.modules])")
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_the_way_to_get_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # to Python, a package that is not there
    monkeypatch.delitem(sys.modules, f"oktopk.integrations.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"oktopk\.integrations\.{package} needs .*: pip install .*{package}"):
        __import__(f"oktopk.integrations.{package}")
