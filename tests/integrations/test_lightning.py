"""Does Ok-Topk work under PyTorch Lightning, as the example shows it?"""

import pytest

from tests.integrations.examples import ROOT, run, run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
EXAMPLE = ROOT / "examples" / "lightning_ddp.py"

LIGHTNING_ALONE = """
import lightning, torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

def hook(state, bucket):
    raise AssertionError("so Lightning does register it on a CPU now")

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, strategy=DDPStrategy(ddp_comm_hook=hook), max_steps=2, limit_val_batches=0, **quiet
)
trainer.fit(BoringModel())
assert trainer.global_step == 2
"""

ONE_DEVICE = """
import lightning
from lightning.pytorch.demos.boring_classes import BoringModel
from oktopk.integrations.lightning import OktopkCallback

lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, logger=False, callbacks=[OktopkCallback("oktopk")]).fit(
    BoringModel()
)
"""


@pytest.fixture(scope="module")
def ran():
    return run_example(EXAMPLE, "--epochs", 4)


def test_it_trains_and_compresses(ran):
    first, last = ran.losses
    assert last < 0.5 * first
    assert (ran.active, ran.steps) == (70, 80)
    assert "oktopk: OkTopk(density=0.05" in ran.output


def test_both_ranks_hold_the_same_weights(ran):
    assert sorted(ran.weights) == [0, 1]
    assert ran.weights[0] == ran.weights[1]


def test_resumed_from_a_checkpoint_it_ends_with_the_same_bits(ran, tmp_path):
    checkpoint = tmp_path / "half.ckpt"
    half = run_example(EXAMPLE, "--epochs", 2, "--checkpoint", checkpoint)
    assert half.weights != ran.weights
    resumed = run_example(EXAMPLE, "--epochs", 4, "--checkpoint", checkpoint)
    assert (resumed.active, resumed.steps) == (40, 40)
    assert resumed.weights == ran.weights


@pytest.mark.long
def test_lightning_itself_still_drops_a_hook_on_the_cpu_without_a_word():
    done = run("-c", LIGHTNING_ALONE)
    assert done.returncode == 0, done.stdout
    assert "hook" not in done.stdout


def test_without_ddp_it_says_what_to_do():
    done = run("-c", ONE_DEVICE)
    assert done.returncode != 0
    assert (
        'SettingError: the model is a BoringModel, not in DDP, so there is no exchange: use Trainer(strategy="ddp"'
        in (done.stdout)
    )
