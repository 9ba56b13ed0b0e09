from __future__ import annotations

import math

import pytest

from oktopk.train.config import Config, make_config
from oktopk.train.models import MODELS
from oktopk.train.plan import make_plan
from oktopk.train.recipes import DEFAULT, OF_NET, load_recipe, recipe_names
from oktopk.train.worker import reference_of
from tests.integrations.examples import ROOT


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_config(name: str) -> None:
    recipe = load_recipe(name)
    config = make_config({"recipe": name, **recipe.settings})
    assert recipe.about.strip()
    assert recipe.nproc >= 1
    assert "data_dir" not in recipe.settings  # a recipe knows nothing of anybody's disk
    assert config.lr <= 0.01  # 1.0, copied from another model, is how it exploded
    assert all(math.isfinite(value) for value in recipe.reference.values())
    assert reference_of(config) == recipe.reference
    usual = vars(Config())
    same = {key for key, value in recipe.settings.items() if usual[key] == value}
    assert same <= {"dnn", "dataset", "max_epochs"}  # by which one knows what it is


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_reaches_its_sparse_steps(name: str) -> None:
    recipe = load_recipe(name)
    config = make_config(recipe.settings)
    plan = make_plan(config, recipe.nproc, config.utterances, config.val_utterances, ROOT, "cpu")
    assert plan.steps_per_epoch > 0
    assert plan.sparse_steps > 0
    assert plan.warning is None
    if name == "lstman4-extended":
        assert config.dense_steps == 128
        assert plan.steps >= 140


def test_every_net_has_a_recipe_of_its_own() -> None:
    assert set(OF_NET) == set(MODELS)
    for net, name in OF_NET.items():
        assert load_recipe(name).settings["dnn"] == net
    assert DEFAULT in recipe_names()


def test_a_reference_is_for_the_same_learning_only() -> None:
    recipe = load_recipe(DEFAULT)
    same = {"recipe": DEFAULT, **recipe.settings, "compressor": "topka", "density": 0.1, "threads": 1}
    assert reference_of(make_config(same)) == recipe.reference
    assert reference_of(make_config({**same, "lr": 0.005})) == {}
    assert reference_of(Config()) == {}
