"""Do the integrations cost nothing to those who do not use them?"""

import sys

import pytest

from tests.integrations.examples import run

PACKAGES = ["lightning", "accelerate", "transformers"]


def test_importing_oktopk_imports_no_trainer():
    done = run("-c", f"import sys, oktopk; print([name for name in {PACKAGES} if name in sys.modules])")
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_named_with_the_way_to_get_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # to Python, a package that is not there
    monkeypatch.delitem(sys.modules, f"oktopk.integrations.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"oktopk\.integrations\.{package} needs .*: pip install .*{package}"):
        __import__(f"oktopk.integrations.{package}")
