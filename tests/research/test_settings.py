"""The names of the learning experiment mean what the library does."""

from __future__ import annotations

from dataclasses import fields

import pytest

from oktopk import OkTopk
from oktopk.train.config import Config
from research.learning.settings import Setting, parse

pytestmark = pytest.mark.slow


def test_default_is_what_the_library_and_its_trainer_do() -> None:
    setting, config = parse("default"), Config()
    assert setting.algorithm_at(0) == OkTopk() == config.algorithm()
    dense, sparse = (config.rates_at(0, phase) for phase in ("dense", "sparse"))
    assert setting.momentum == sparse.momentum
    assert abs(setting.lr_scale - sparse.lr / dense.lr) < 1e-9
    assert not setting.is_weighted


def test_what_a_setting_leaves_alone_is_the_librarys() -> None:
    usual = {field.name: field.default for field in fields(OkTopk)}
    ours = {field.name: field.default for field in fields(Setting)}
    assert {name: ours[name] for name in ("ranking", "slack", "rescale_every")} == {
        name: usual[name] for name in ("ranking", "slack", "rescale_every")
    }
