from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.config import Config
from oktopk.train.models import make_model
from oktopk.train.plan import Plan, make_plan, travel_dense
from tests.integrations.examples import ROOT


def plan_of(utterances: int = 112, workers: int = 1, **settings: Any) -> Plan:
    return make_plan(Config(**settings), workers, utterances, 16, ROOT, "cpu")


def test_the_run_of_28_steps() -> None:
    """Two epochs of 14 steps, and 128 dense ones: what nobody was told."""
    plan = plan_of(max_epochs=2, dense_steps=128)
    assert (plan.steps, plan.sparse_steps) == (28, 0)
    assert plan.warning is not None
    for word in ("no step will be sparse", "28 steps", "first 128", "--dense-steps 7", "oktopk"):
        assert word in plan.warning


@pytest.mark.parametrize(
    ("settings", "sparse"),
    [
        ({"max_epochs": 2, "dense_steps": 27}, 1),
        ({"max_epochs": 2, "dense_steps": 28}, 0),
        ({"max_epochs": 2, "dense_steps": 0}, 28),
        ({"max_epochs": 2, "dense_steps": 10, "max_steps": 15}, 5),
        ({"max_epochs": 2, "dense_steps": 10, "nsteps_update": 2}, 4),
        ({"max_epochs": 2, "dense_steps": 10, "compressor": "dense"}, 0),
    ],
)
def test_sparse_steps(settings: dict[str, Any], sparse: int) -> None:
    plan = plan_of(**settings)
    assert plan.sparse_steps == sparse
    assert (plan.warning is None) == (sparse > 0 or plan.config.is_dense)


@given(
    utterances=st.integers(1, 3000),
    workers=st.integers(1, 8),
    batch=st.integers(1, 16),
    passes=st.integers(1, 4),
    epochs=st.integers(1, 5),
    dense=st.integers(0, 300),
)
def test_steps_add_up(utterances: int, workers: int, batch: int, passes: int, epochs: int, dense: int) -> None:
    config = Config(batch_size=batch, nsteps_update=passes, max_epochs=epochs, dense_steps=dense)
    plan = Plan(
        config=config, workers=workers, utterances=utterances, val_utterances=1, numel=1000, sparse_numel=900,
        device="cpu", data_dir=ROOT,
    )  # fmt: skip
    used = plan.steps_per_epoch * workers * batch * passes
    assert utterances - workers * batch * passes < used <= utterances
    assert plan.sparse_steps == max(0, plan.steps - dense)
    assert (plan.warning is None) == (plan.sparse_steps > 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "momentum 0.9, in sparse steps 0.5 at 5 x lr,"),
        ({"compressor": "dense"}, "momentum 0.9,"),
        ({"sparse_momentum": 0.9}, "momentum 0.9,"),
    ],
)
def test_the_momentum_is_told(settings: dict[str, Any], said: str) -> None:
    learning = list(plan_of(**settings).table().columns[1].cells)[-1]
    assert said in str(learning)
    assert ("sparse steps" in str(learning)) == ("sparse steps" in said)


@pytest.mark.parametrize("workers", [1, 3])
def test_bytes(workers: int) -> None:
    plan = plan_of(workers=workers)
    numel = sum(parameter.numel() for parameter in make_model("lstman4-small").parameters())
    assert plan.numel == numel
    assert plan.dense_bytes == 8 * numel * (workers - 1) // workers
    assert (plan.sparse_bytes == 0) == (workers == 1)
    assert plan.sparse_bytes <= 0.2 * plan.dense_bytes


@pytest.mark.parametrize("density", [0.001, 0.02, 1.0])
def test_little_travels_dense(density: float) -> None:
    net = make_model("lstman4-small")
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters()}
    dense = sum(sizes[name] for name in travel_dense(net, density))
    assert dense <= density * sum(sizes.values()) / 10
