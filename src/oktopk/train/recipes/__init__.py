"""Recipes: tuned settings, in one TOML file for each workload."""

import sys
from dataclasses import dataclass
from importlib import resources
from typing import Any

from oktopk.errors import one_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = "an4-small"
OF_NET = {
    "lstman4": "lstman4", "lstman4-small": DEFAULT,
    "gpt-tiny": "gpt-tiny", "gpt-30m": "gpt-30m", "gpt-124m": "gpt-124m",
}  # fmt: skip
"""Recipe of a net that is named without one, so that no net trains with the learning rate of another."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named set of settings."""

    name: str
    about: str  # in a line
    settings: dict[str, Any]  # values of `Config`
    nproc: int = 1  # default number of workers


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package."""
    folder = resources.files(__package__)
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """Return the recipe of that name."""
    one_of("recipe", name, recipe_names())
    values = tomllib.loads((resources.files(__package__) / f"{name}.toml").read_text(encoding="utf-8"))
    return Recipe(name=name, **values)
