from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk import OkTopk, TopkA
from oktopk.errors import SettingError
from oktopk.train.config import Config, Rates, describe_settings, make_config, parse_pairs


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "1e-3", 0.001),
        ("clip", "20", 20.0),
        ("max_epochs", "7", 7),
        ("augment", "TRUE", True),
        ("augment", "Off", False),
        ("augment", "0", False),
        ("dnn", "lstman4", "lstman4"),
    ],
)
def test_text_is_read_as_the_settings_type(name: str, text: str, value: Any) -> None:
    read = getattr(make_config({name: text}), name)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("lr", ("fast", "", None), "a number"),
        ("max_epochs", ("1.5", 1.5, True), "a whole number"),
        ("augment", ("maybe", 1), "yes or no"),
        ("data_dir", (3,), "text"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_help(name: str, values: tuple[Any, ...], wanted: str) -> None:
    text = next(each.metadata["help"] for each in fields(Config) if each.name == name)
    for value in values:
        with pytest.raises(SettingError) as raised:
            make_config({name: value})
        assert str(raised.value) == f"{name} wants {wanted}, not {value!r} ({text})"


def test_did_you_mean() -> None:
    for typed, meant in (("lrr", "lr"), ("densitty", "density"), ("max_epoch", "max_epochs")):
        with pytest.raises(SettingError, match=f"unknown setting '{typed}'.*Did you mean '{meant}'"):
            make_config({typed: "1"})


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
def test_values_that_mean_nothing_are_refused_by_name(pair: str) -> None:
    name, _, value = pair.partition("=")
    with pytest.raises(SettingError) as raised:
        make_config({name: value})
    assert name in str(raised.value)
    assert value in str(raised.value)


def test_pairs() -> None:
    parsed = {"lr": "1", "dense_steps": "4", "data_dir": "a=b"}
    assert parse_pairs(["lr=1", "dense-steps = 4", "data_dir=a=b"]) == parsed
    with pytest.raises(SettingError, match="key=value, not 'lr'"):
        parse_pairs(["lr"])


@given(
    lr=st.floats(1e-9, 1e3),
    epochs=st.integers(1, 10**6),
    augment=st.booleans(),
    folder=st.text(max_size=20),
    compressor=st.sampled_from(["dense", "oktopk", "gtopk", "topka"]),
)
def test_a_written_config_is_read_again(lr: float, epochs: int, augment: bool, folder: str, compressor: str) -> None:
    config = Config(lr=lr, max_epochs=epochs, augment=augment, data_dir=folder, compressor=compressor)
    assert Config.from_json(config.to_json(), Path("config.json")) == config


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"lr": 0.1'])
def test_a_file_that_is_no_config_is_named(text: str) -> None:
    with pytest.raises(SettingError, match=r"runs/a/config\.json"):
        Config.from_json(text, Path("runs/a/config.json"))


def test_every_setting_is_described() -> None:
    described = describe_settings()
    assert [name for name, _, _ in described] == [each.name for each in fields(Config)]
    assert all(help_ and help_ == help_.strip() for _, _, help_ in described)


@given(momentum=st.floats(0, 0.99), sparse=st.floats(0, 0.99), lr=st.floats(1e-6, 1.0), epoch=st.integers(0, 30))
def test_a_gradient_moves_the_weights_as_far_in_the_end_in_sparse_steps(
    momentum: float, sparse: float, lr: float, epoch: int
) -> None:
    """lr / (1 - momentum) is that of dense steps, and the momentum is never more than theirs."""
    config = Config(momentum=momentum, sparse_momentum=sparse, lr=lr)
    before, after = (config.rates_at(epoch, phase) for phase in ("dense", "sparse"))
    assert before == Rates(lr / config.lr_anneal**epoch, momentum)
    assert after.momentum == min(momentum, sparse)
    assert after.lr / (1 - after.momentum) == pytest.approx(before.lr / (1 - before.momentum))
    same = Config(momentum=momentum, sparse_momentum=momentum, lr=lr)
    assert same.rates_at(epoch, "sparse") == same.rates_at(epoch, "dense")


def test_the_algorithm_gets_the_settings_that_it_knows() -> None:
    """The wire is the algorithm's own unless it is named."""
    assert Config().algorithm() == OkTopk()
    assert Config(density=0.1, ranking="scaled").algorithm() == OkTopk(density=0.1, ranking="scaled")
    assert Config(compressor="topka").algorithm() == TopkA(density=0.03)
    assert Config(compressor="topka", wire="int8").algorithm() == TopkA(density=0.03, wire="int8")
    assert Config(compressor="dense", density=0.1).is_dense
