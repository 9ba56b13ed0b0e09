"""The examples in the docstrings run, and say what comes back."""

from __future__ import annotations

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


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = [e for name in MODULES for t in finder.find(importlib.import_module(name)) for e in t.examples]
    assert len(examples) >= 5
