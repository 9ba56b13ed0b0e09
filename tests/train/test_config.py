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
        ("lr", "0.01", 0.01),
        ("lr", "1e-3", 0.001),
        ("clip", "20", 20.0),
        ("max_epochs", "7", 7),
        ("augment", "yes", True),
        ("augment", "Off", False),
        ("nesterov", "0", False),
        ("nesterov", "TRUE", True),
        ("dnn", "lstman4", "lstman4"),
    ],
)
def test_text_is_read_as_the_settings_type(name: str, text: str, value: Any) -> None:
    read = getattr(make_config({name: text}), name)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("lr", "fast", "lr wants a number, not 'fast'"),
        ("lr", "", "lr wants a number, not ''"),
        ("lr", None, "lr wants a number, not None"),
        ("max_epochs", "1.5", "max_epochs wants a whole number, not '1.5'"),
        ("max_epochs", 1.5, "max_epochs wants a whole number"),
        ("max_epochs", True, "max_epochs wants a whole number"),
        ("augment", "maybe", "augment wants yes or no, not 'maybe'"),
        ("augment", 1, "augment wants yes or no"),
        ("data_dir", 3, "data_dir wants text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_help(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(SettingError, match=wanted.replace("'", ".")) as raised:
        make_config({name: value})
    text = next(each.metadata["help"] for each in fields(Config) if each.name == name)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lrr", "lr"), ("densitty", "density"), ("max_epoch", "max_epochs"), ("dense_step", "dense_steps")],
)
def test_did_you_mean(typed: str, meant: str) -> None:
    with pytest.raises(SettingError, match=f"unknown setting '{typed}'.*Did you mean '{meant}'"):
        make_config({typed: "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "0"),
        ("lr", "-0.1"),
        ("momentum", "1"),
        ("sparse_momentum", "1"),
        ("sparse_momentum", "-0.1"),
        ("lr", "nan"),
        ("lr", "inf"),
        ("clip", "-1"),
        ("clip", "inf"),
        ("timeout_s", "inf"),
        ("weight_decay", "nan"),
        ("density", "0"),
        ("density", "1.5"),
        ("batch_size", "0"),
        ("max_epochs", "0"),
        ("nsteps_update", "0"),
        ("validate_every", "0"),
        ("dense_steps", "-1"),
        ("checkpoint_every", "-1"),
        ("seed", "-1"),
        ("seed", str(2**64)),
        ("dnn", "lstman5"),
        ("dataset", "an5"),
        ("compressor", "okTopk2"),
        ("mode", "papers"),
        ("ranking", "size"),
        ("wire", "fp64"),
        ("clip_place", "here"),
        ("device", "tpu"),
        ("on_nonfinite", "ignore"),
        ("grammar", "french"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(SettingError) as raised:
        make_config({name: value})
    words = {"dnn": "net", "clip_place": "place to clip"}
    assert words.get(name, name) in str(raised.value)
    assert value in str(raised.value)


def test_pairs() -> None:
    assert parse_pairs(["lr=1", "dense-steps = 4", "data_dir=a=b"]) == {
        "lr": "1",
        "dense_steps": "4",
        "data_dir": "a=b",
    }
    with pytest.raises(SettingError, match="key=value, not 'lr'"):
        parse_pairs(["lr"])


@given(
    lr=st.floats(1e-9, 1e3),
    epochs=st.integers(1, 10**6),
    augment=st.booleans(),
    folder=st.text(max_size=20),
    compressor=st.sampled_from(["dense", "oktopk", "gtopk", "topka"]),
)
def test_what_is_written_is_read_again(lr: float, epochs: int, augment: bool, folder: str, compressor: str) -> None:
    config = Config(lr=lr, max_epochs=epochs, augment=augment, data_dir=folder, compressor=compressor)
    assert Config.from_json(config.to_json(), Path("config.json")) == config


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"lr": 0.1'])
def test_a_config_file_that_is_none_is_named(text: str) -> None:
    with pytest.raises(SettingError, match=r"runs/a/config\.json"):
        Config.from_json(text, Path("runs/a/config.json"))


def test_every_setting_is_described() -> None:
    described = describe_settings()
    assert [name for name, _, _ in described] == [each.name for each in fields(Config)]
    assert all(help_ and help_ == help_.strip() for _, _, help_ in described)


def test_the_learning_rate_falls_by_the_epoch() -> None:
    config = Config(lr=0.1, lr_anneal=2.0)
    assert [config.lr_at(epoch) for epoch in range(3)] == [0.1, 0.05, 0.025]


def test_the_algorithm_gets_the_settings_that_it_knows() -> None:
    assert "density=0.1" in str(Config(density=0.1, mode="paper").algorithm())
    assert "mode='paper'" in str(Config(density=0.1, mode="paper").algorithm())
    assert Config(compressor="dense", density=0.1).is_dense


@given(momentum=st.floats(0, 0.99), sparse=st.floats(0, 0.99), lr=st.floats(1e-6, 1.0), epoch=st.integers(0, 30))
def test_a_gradient_moves_the_weights_as_far_in_the_end_in_sparse_steps(
    momentum: float, sparse: float, lr: float, epoch: int
) -> None:
    """lr / (1 - momentum) is that of dense steps, and the momentum is never more than theirs."""
    config = Config(momentum=momentum, sparse_momentum=sparse, lr=lr)
    before, after = (config.rates_at(epoch, phase) for phase in ("dense", "sparse"))
    assert (before.lr, before.momentum) == (config.lr_at(epoch), momentum)
    assert after.momentum == min(momentum, sparse)
    assert after.lr / (1 - after.momentum) == pytest.approx(before.lr / (1 - before.momentum))


def test_with_the_momentum_of_dense_steps_nothing_changes_at_the_switch() -> None:
    config = Config(sparse_momentum=0.9)
    assert config.rates_at(3, "sparse") == config.rates_at(3, "dense")


@pytest.mark.parametrize("phase", ["dense", "sparse"])
def test_with_momentum_correction_the_optimizer_has_none(phase: str) -> None:
    config = Config(momentum_correction=True)
    assert config.rates_at(2, phase) == Rates(config.lr_at(2), 0.0)


def test_the_wire_is_the_algorithms_own_unless_it_is_named() -> None:
    assert Config().algorithm() == OkTopk()
    assert Config(compressor="topka").algorithm() == TopkA(density=0.03)
    assert Config(compressor="topka", wire="int8").algorithm() == TopkA(density=0.03, wire="int8")
