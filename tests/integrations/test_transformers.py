"""Does Ok-Topk work under Hugging Face's Trainer, as the example shows it?"""

import pytest

from tests.integrations.examples import ROOT, TORCHRUN, run, run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
EXAMPLE = ROOT / "examples" / "transformers_trainer.py"

SETTINGS = """
import dataclasses
from transformers import TrainingArguments

print([field.name for field in dataclasses.fields(TrainingArguments) if "hook" in field.name])
"""


@pytest.fixture(scope="module")
def ran():
    return run_example(*TORCHRUN, EXAMPLE, "--steps", 80)


def test_it_trains_and_compresses(ran):
    first, last = ran.losses
    assert last < 0.5 * first
    assert (ran.active, ran.steps) == (70, 80)
    assert "oktopk: OkTopk(density=0.05" in ran.output


def test_both_ranks_hold_the_same_weights(ran):
    assert sorted(ran.weights) == [0, 1]
    assert ran.weights[0] == ran.weights[1]


@pytest.mark.long
def test_resumed_from_a_checkpoint_it_ends_with_the_same_bits(ran, tmp_path):
    half = run_example(*TORCHRUN, EXAMPLE, "--steps", 40, "--checkpoint", tmp_path)
    assert half.weights != ran.weights
    resumed = run_example(*TORCHRUN, EXAMPLE, "--steps", 80, "--checkpoint", tmp_path)
    assert "oktopk: residuals of step 40 from" in resumed.output
    assert (resumed.active, resumed.steps) == (40, 40)
    assert resumed.weights == ran.weights


@pytest.mark.long
def test_the_trainer_itself_still_has_no_setting_for_a_hook():
    done = run("-c", SETTINGS)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_ddp_it_says_what_to_do():
    done = run(EXAMPLE)
    assert done.returncode != 0
    assert (
        "SettingError: the model is a LlamaForCausalLM, not in DDP, so there is no exchange: start two" in done.stdout
    )
