"""Do PyTorch's own tests of DDP and its communication hooks pass with our hook? docs/torch-tests.md has the list.

Each runs in processes of its own, from torch_suite.py, with OkTopk(density=1) and nothing travelling dense.
"""

import re

import pytest

from tests.integrations.examples import ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(260)]
RANKS = 2

GROUPS = ("Registered", "RegisteredOnCpu", "Constructed", "ConstructedOnCpu")  # classes, one for each list of the page
PARAGRAPHS = (ROOT / "docs" / "torch-tests.md").read_text().split("\n\n")
LISTS = [re.findall(r"^- `(test_\w+)`", paragraph, re.MULTILINE) for paragraph in PARAGRAPHS]
TESTS = dict(zip(GROUPS, filter(None, LISTS), strict=True))


IN_CI = [f"{group}.{tests[-1]}" for group, tests in TESTS.items()]
OTHERS = [f"{group}.{test}" for group, tests in TESTS.items() for test in tests[:-1]]


@pytest.mark.parametrize("name", [*IN_CI, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_passes_with_our_hook(name):
    # CI="": with it torch's own runner wants a package for XML reports
    done = run("-m", "tests.integrations.torch_suite", name, BACKEND="gloo", WORLD_SIZE=str(RANKS), CI="")
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
    assert "Ran 1 test" in done.stdout
    steps = dict(re.findall(r"rank (\d): oktopk made (\d+) steps", done.stdout))
    assert sorted(map(int, steps)) == list(range(RANKS))
    assert all(int(count) > 0 for count in steps.values())
