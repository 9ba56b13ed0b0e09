"""Does Ok-Topk work under Hugging Face Accelerate, as the example shows it?"""

import pytest

from tests.integrations.examples import ROOT, TORCHRUN, run, run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
EXAMPLE = ROOT / "examples" / "accelerate_ddp.py"
NOT_IN_DDP = "SettingError: the model is a Sequential, not in DDP, so there is no exchange: call accelerator.prepare"

ACCELERATE_ALONE = """
from accelerate import DistributedDataParallelKwargs

class Model:
    def register_comm_hook(self, state, hook):
        raise AssertionError("so Accelerate does register a hook of one's own now")

DistributedDataParallelKwargs(comm_hook=lambda state, bucket: None).register_comm_hook(Model())
"""


@pytest.fixture(scope="module")
def ran():
    return run_example(*TORCHRUN, EXAMPLE, "--epochs", 4)


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
    checkpoint = tmp_path / "half"
    half = run_example(*TORCHRUN, EXAMPLE, "--epochs", 2, "--checkpoint", checkpoint)
    assert half.weights != ran.weights
    resumed = run_example(*TORCHRUN, EXAMPLE, "--epochs", 4, "--checkpoint", checkpoint)
    assert "oktopk: residuals of step 40 from" in resumed.output
    assert (resumed.active, resumed.steps) == (40, 40)
    assert resumed.weights == ran.weights


def test_accelerate_launch_starts_only_one_process_on_the_cpu_and_we_say_so():
    done = run("-m", "accelerate.commands.launch", "--cpu", "--num_processes", 2, EXAMPLE, "--epochs", 1)
    assert done.returncode != 0
    assert NOT_IN_DDP in done.stdout


@pytest.mark.long
def test_accelerate_itself_still_drops_a_hook_that_it_does_not_know_without_a_word():
    done = run("-c", ACCELERATE_ALONE)
    assert done.returncode == 0, done.stdout
    assert "hook" not in done.stdout


def test_without_ddp_it_says_what_to_do():
    done = run(EXAMPLE)
    assert done.returncode != 0
    assert NOT_IN_DDP in done.stdout
