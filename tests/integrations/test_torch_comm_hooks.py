"""Do PyTorch's own tests of DDP and its communication hooks pass with our hook? docs/torch-tests.md has the list.

Each runs in processes of its own, from torch_suite.py, with OkTopk(density=1) and nothing travelling dense.
"""

import re
from typing import Any

import pytest

from tests.integrations.examples import ROOT, run
from tests.integrations.torch_tests import TESTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(260)]
RANKS = 2


def listed() -> list[Any]:
    """Return all names, as torch's runner has them: the last of each group in CI, the others in the long suite."""
    names = [f"{group}.{test}" for group, tests in TESTS.items() for test in tests]
    last = {f"{group}.{tests[-1]}" for group, tests in TESTS.items()}
    return [name if name in last else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", listed())
def test_passes_with_our_hook(name):
    # CI="": with it torch's own runner wants a package for XML reports
    done = run("-m", "tests.integrations.torch_suite", name, BACKEND="gloo", WORLD_SIZE=str(RANKS), CI="")
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
