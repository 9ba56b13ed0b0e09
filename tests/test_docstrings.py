"""The examples in the docstrings run, and say what comes back."""

import doctest
import importlib
import pkgutil

import pytest

import oktopk

# These are imported only beside the framework that they are for.
NOT_ALONE = ("oktopk.integrations.", "oktopk.cuda.triton")
FOUND = [found.name for found in pkgutil.walk_packages(oktopk.__path__, "oktopk.")]
MODULES = ["oktopk", *(name for name in FOUND if not name.startswith(NOT_ALONE))]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
