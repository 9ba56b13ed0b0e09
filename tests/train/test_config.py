import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk import OkTopk, TopkA
from oktopk.algorithms import ALGORITHMS
from oktopk.ddp.momentum import Rates
from oktopk.errors import SettingError
from oktopk.train.config import Config, make_config, parse_pairs
from oktopk.train.models import MODELS
from oktopk.train.plan import make_plan
from oktopk.train.recipes import DEFAULT, OF_NET, load_recipe, recipe_names
from tests.integrations.examples import ROOT


def test_text_is_read_as_the_settings_type_and_from_pairs():
    text = {"lr": "1e-3", "clip": "20", "max_epochs": "7", "dnn": "lstman4", "augment": "TRUE"}
    config = make_config(text)
    assert repr([getattr(config, name) for name in text]) == "[0.001, 20.0, 7, 'lstman4', True]"
    assert [make_config({"augment": no}).augment for no in ("Off", "0", "no")] == [False] * 3
    assert parse_pairs(["clip=1", "dense-steps = 4", "dnn=a=b"]) == {"clip": "1", "dense_steps": "4", "dnn": "a=b"}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *[("lr", value, "a number") for value in ("fast", "", None)],
        *[("max_epochs", value, "a whole number") for value in ("1.5", 1.5, True)],
        ("augment", "maybe", "yes or no"), ("augment", 1, "yes or no"), ("data_dir", 3, "text"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_the_help(name, value, wanted):
    said = f"{name} wants {wanted}, not {value!r} ({Config.__dataclass_fields__[name].metadata['help']})"
    with pytest.raises(SettingError, match=f"^{re.escape(said)}$"):
        make_config({name: value})


@pytest.mark.parametrize(
    "pair",
    [
        "lr=0", "lr=-0.1", "lr=nan", "lr=inf", "momentum=1", "sparse_momentum=1", "sparse_momentum=-0.1",
        "clip=-1", "clip=inf", "timeout_s=inf", "lr_anneal=0", "density=0", "density=1.5", "batch_size=0",
        "max_epochs=0", "nsteps_update=0", "validate_every=0", "utterances=0", "dense_steps=-1",
        "checkpoint_every=-1", "max_steps=-1", "threads=-1", "seed=-1", "seed=18446744073709551616",
        "dnn=lstman5", "dataset=an5", "compressor=okTopk2", "ranking=size", "wire=fp64", "clip_place=here",
        "device=tpu", "on_nonfinite=ignore", "grammar=french",
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused_by_name(pair):
    name, _, value = pair.partition("=")
    with pytest.raises(SettingError, match=rf"(?s)(?=.*{name}).*{re.escape(value)}"):
        make_config({name: value})


@given(momentum=st.floats(0, 0.99), sparse=st.floats(0, 0.99), lr=st.floats(1e-6, 1.0), epoch=st.integers(0, 30))
def test_a_gradient_moves_the_weights_as_far_in_the_end_in_sparse_steps(momentum, sparse, lr, epoch):
    """lr / (1 - momentum) is that of dense steps, and the momentum is never more than theirs."""
    config = Config(momentum=momentum, sparse_momentum=sparse, lr=lr)
    before, after = (config.rates_at(epoch, phase) for phase in ("dense", "sparse"))
    assert before == Rates(lr / config.lr_anneal**epoch, momentum)
    assert after.momentum == min(momentum, sparse)
    assert after.lr / (1 - after.momentum) == pytest.approx(before.lr / (1 - before.momentum))
    same = Config(momentum=momentum, sparse_momentum=momentum, lr=lr)
    assert same.rates_at(epoch, "sparse") == same.rates_at(epoch, "dense")


def test_the_algorithm_gets_the_settings_that_it_knows():
    """The wire is the algorithm's own unless it is named."""
    assert Config().algorithm() == OkTopk()
    assert Config(density=0.1, ranking="scaled").algorithm() == OkTopk(density=0.1, ranking="scaled")
    assert Config(compressor="topka").algorithm() == TopkA(density=0.03)
    assert Config(compressor="topka", wire="int8").algorithm() == TopkA(density=0.03, wire="int8")
    assert Config(compressor="dense", density=0.1).is_dense
    assert all(type(Config(compressor=name).algorithm()) is kind for name, kind in ALGORITHMS.items())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_config_that_reaches_its_sparse_steps(name):
    recipe = load_recipe(name)
    config = make_config({"recipe": name, **recipe.settings})
    assert recipe.about.strip()
    assert "data_dir" not in recipe.settings  # a recipe knows nothing of anybody's disk
    assert config.lr <= 0.01  # 1.0, copied from another model, is how it exploded
    same = {key for key, value in recipe.settings.items() if vars(Config())[key] == value}
    assert same <= {"dnn", "dataset", "max_epochs"}  # by which one knows what it is
    plan = make_plan(config, recipe.nproc, config.utterances, config.val_utterances, ROOT, "cpu")
    assert plan.sparse_steps > 0
    assert name != "lstman4-extended" or plan.steps >= 140 > config.dense_steps == 128


def test_every_net_has_a_recipe_of_its_own():
    assert set(OF_NET) == set(MODELS)
    assert all(load_recipe(name).settings["dnn"] == net for net, name in OF_NET.items())
    assert DEFAULT in recipe_names()
