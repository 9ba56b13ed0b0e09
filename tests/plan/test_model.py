"""The laws of the model, and the verdict."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk import OkTopk
from oktopk.ddp.exclude import rules_for
from oktopk.plan.learning import FACTORS, factor_of
from oktopk.plan.methods import DENSE, default, methods
from oktopk.plan.model import predict_step
from oktopk.plan.profile import Host, Parameter, Profile, Rate, from_numbers
from oktopk.plan.topology import Level, Topology, flat
from oktopk.plan.verdict import judge, rows_of
from oktopk.steps import make_groups
from oktopk.train.models import make_model
from tests.test_prose import ROOT

PROFILE = from_numbers(20_000_000, 0.1, layers=8)
SITES = Topology((Level(name="GPU", size=4, mbit=1e6), Level(name="node", size=3, mbit=1000, latency_s=1e-4)))
METHODS = methods(levels=2)


def step_s(method: Any, profile: Profile = PROFILE, topology: Topology = SITES) -> float:
    return predict_step(method, profile, topology).step_s


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@given(mbit=st.floats(1, 1e5), factor=st.floats(1, 100))
def test_a_faster_link_is_never_slower(method: Any, mbit: float, factor: float) -> None:
    slow, fast = (step_s(method, topology=SITES.with_outer(mbit=each)) for each in (mbit, mbit * factor))
    assert PROFILE.compute_s <= fast <= slow


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_one_rank_sends_nothing_and_only_computes(method: Any) -> None:
    made = predict_step(method, PROFILE, flat(1, 1000))
    assert (made.sent_bytes, made.exchange_s, made.step_s) == (0, 0, pytest.approx(PROFILE.compute_s))


def test_shared_cores_hide_no_computing() -> None:
    host = Host(computing={"OkTopk()": Rate(0.0, 2e-9)})
    apart, shared = (replace(PROFILE, host=replace(host, shares=shares)) for shares in (False, True))
    least = PROFILE.compute_s + 2e-9 * PROFILE.numel
    assert step_s(default(), shared, flat(8, 0)) >= least > step_s(default(), apart, flat(8, 0))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@given(mbit=st.floats(1, 1e5))
def test_shared_cores_are_never_faster_and_lose_no_more_than_the_overlap(method: Any, mbit: float) -> None:
    shared = replace(PROFILE, host=Host(shares=True))
    apart, together = (predict_step(method, each, SITES.with_outer(mbit=mbit)) for each in (PROFILE, shared))
    most = PROFILE.compute_s + together.exchange_s / method.every
    assert apart.step_s * (1 - 1e-9) <= together.step_s <= most * (1 + 1e-9)


def test_updates_are_exchanged_after_the_optimizer() -> None:
    made = predict_step(default(), replace(PROFILE, optimizer="adam"), SITES)
    assert made.step_s == pytest.approx(PROFILE.compute_s + made.exchange_s)
    assert (made.hidden_s, step_s(default()) < made.step_s) == (0, True)


def test_groups_and_tails_are_those_of_attach() -> None:
    with torch.device("meta"):
        net = make_model("lstman4-small")
    parameters = dict(net.named_parameters())
    groups = make_groups(list(parameters.items()), 25 << 20)
    (rule,) = rules_for(None, parameters, OkTopk())
    for group in groups:
        group.lay_out_(lambda name: rule(name, parameters[name]))
    profile = Profile(
        name="x",
        parameters=tuple(Parameter(tuple(each.shape)) for each in parameters.values()),
        forward_s=1,
        backward_s=1,
    )
    made = [(part.numel, part.tail) for part in profile.groups(OkTopk().density)]
    assert sorted(made) == sorted((group.num_sparse, group.numel - group.num_sparse) for group in groups)


def test_the_verdict_names_a_method_a_margin_and_a_break_even() -> None:
    topology = flat(8, 1000, 1e-4)
    verdict = judge(rows_of(methods(), PROFILE, topology), PROFILE, topology)
    factor = factor_of(default(), "sgd")
    if factor is None:
        pytest.skip("the default has another density than the one whose learning was measured")
    assert f"{verdict.use}: it is {verdict.gain:.2g} times as fast as dense to the same loss" in verdict.sentence
    assert verdict.low < verdict.gain < verdict.high
    assert "oktopk.attach(model" in verdict.code
    dense, other = rows_of(
        [m for m in methods() if m.name in (DENSE, verdict.use)], PROFILE, flat(8, verdict.break_even_mbit, 1e-4)
    )
    assert other.seconds == pytest.approx(dense.seconds, rel=0.05)


@pytest.mark.parametrize(("topology", "says"), [
    (flat(1, 1000), "Nothing to exchange: this is one rank"),
    (flat(8, 0), "Do not compress: dense is"),
], ids=["one rank", "no limit"])  # fmt: skip
def test_the_verdict_says_do_not(topology: Topology, says: str) -> None:
    verdict = judge(rows_of(methods(), PROFILE, topology), PROFILE, topology)
    assert verdict.sentence.startswith(says)
    assert (verdict.use, verdict.code) == (DENSE, "model = DistributedDataParallel(net)")


def test_nothing_wins_whose_learning_nobody_measured() -> None:
    profile, topology = replace(PROFILE, optimizer="adam"), flat(8, 10)
    rows = rows_of(methods(), profile, topology)
    verdict = judge(rows, profile, topology)
    assert next(row for row in rows if row.prediction.method.name == verdict.use).factor is not None
    assert "would pay if it needs fewer than" in verdict.sentence


def test_the_page_on_learning_shows_the_table_of_factors() -> None:
    page = (ROOT / "docs/learning.md").read_text()
    for each in FACTORS:
        density = "any" if each.density is None else f"{100 * each.density:g} %"
        cells = [
            each.family,
            each.optimizer,
            density,
            f"{each.mean:g} ({each.low:g} to {each.high:g})",
            str(each.seeds),
        ]
        assert f"| {' | '.join(cells)} | {each.source} |" in page
