"""A profile agrees with the steps that it was made from."""

from typing import Any

import pytest

from oktopk.bench.models import load_model
from oktopk.plan.measure import Times, profile_of
from oktopk.plan.methods import BF16, DENSE, Method, default, methods
from oktopk.plan.model import predict_step
from oktopk.plan.topology import Level, flat

MODEL, BARE_S, HOOKED_S = "gpt-tiny", 0.03, 0.09
METHODS = [each for each in methods() if each.name in (DENSE, BF16, "powersgd-1", default().name)]


def times(*, shares: bool) -> Times:
    num_parameters = len(list(load_model(MODEL).net.parameters()))
    step = {"forward": [0.01], "backward": [0.02], "optimizer": [0.003], "ready": [[0.5] * num_parameters]}
    calls = {"small": [1e-3], "big": [2e-3], "words": 1e5}
    kinds = ("all_gather", "all_to_all", "sendrecv", "all_reduce", "all_reduce bfloat16")
    computing = {default().computing: [(50_000, [[1e-3, 1e-3]]), (400_000, [[4e-3, 4e-3]])]}
    hooked = {each.computing: [HOOKED_S] for each in METHODS}
    return {
        "step": step, "collectives": dict.fromkeys(kinds, calls), "computing": computing, "hooked": hooked,
        "shares": shares,
    }  # fmt: skip


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_it_predicts_the_steps_that_were_measured(method: Method, shares: bool) -> None:
    profile = profile_of(MODEL, [times(shares=shares)] * 2, METHODS, "sgd")
    assert profile.compute_s == pytest.approx(BARE_S + 0.003)
    made = predict_step(method, profile, flat(2, 0))
    assert made.step_s == pytest.approx(HOOKED_S + 0.003, rel=1e-3)
    assert predict_step(method, profile, flat(2, 10)).step_s > made.step_s


def test_steps_over_a_slow_link_say_nothing_of_the_host() -> None:
    link: Any = Level(name="host", size=2, mbit=1)
    quick, slow = (profile_of(MODEL, [times(shares=True)] * 2, METHODS, "sgd", each) for each in (None, link))
    name = default().computing
    assert quick.host.computing[name].call_s > slow.host.computing[name].call_s == pytest.approx(2e-3 - 6e-3 / 7)
