"""Do PyTorch's own tests of DDP and its communication hooks pass with our hook? docs/torch-tests.md has the list.

Each runs in processes of its own, from torch_suite.py, with OkTopk(density=1) and nothing travelling dense.
"""

import re
from typing import Any

import pytest

from tests.integrations.examples import ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(260)]
SUITE = ROOT / "tests" / "integrations" / "torch_suite.py"
RANKS = 2

TESTS = {
    "Registered": [
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    ],
    "RegisteredOnCpu": [
        "test_ddp_hook_parity_allreduce",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_powerSGD",
        "test_ddp_hook_parity_post_localSGD",
        "test_ddp_uneven_inputs",
    ],
    "Constructed": [
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_ddp_create_graph",
        "test_ddp_logging_data_cpu",
        "test_grads_same_across_ranks_with_no_sync",
        "test_static_graph_api_cpu",
    ],
    "ConstructedOnCpu": [
        "test_DistributedDataParallel_with_amp_and_grad_is_view",
        "test_ddp_broadcast_buffer_via_hook",
        "test_ddp_bucket_cap_mb_list",
        "test_ddp_buffer_hook_allreduce",
        "test_ddp_buffer_hook_allreduce_return_future",
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_join_model_equivalence",
        "test_ddp_shared_grad_acc_unused_params",
        "test_ddp_static_graph_nested_types",
        "test_ddp_uneven_input_join_disable",
        "test_different_graph_across_ranks",
    ],
}


def listed() -> list[Any]:
    """Return all names, as torch's runner has them: the last of each group in CI, the others in the long suite."""
    names = [f"{group}.{test}" for group, tests in TESTS.items() for test in tests]
    last = {f"{group}.{tests[-1]}" for group, tests in TESTS.items()}
    return [name if name in last else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", listed())
def test_passes_with_our_hook(name):
    # CI="": with it torch's own runner wants a package for XML reports
    done = run(SUITE, name, BACKEND="gloo", WORLD_SIZE=str(RANKS), CI="")
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
    assert "Ran 1 test" in done.stdout
    steps = dict(re.findall(r"rank (\d): oktopk made (\d+) steps", done.stdout))
    assert sorted(map(int, steps)) == list(range(RANKS))
    assert all(int(count) > 0 for count in steps.values())


def test_the_list_in_the_docs_is_this_list():
    text = (ROOT / "docs" / "torch-tests.md").read_text()
    for tests in TESTS.values():
        for test in tests:
            assert f"`{test}`" in text, test
