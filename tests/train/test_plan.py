from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.config import Config
from oktopk.train.models import make_model
from oktopk.train.plan import Plan, make_plan
from tests.integrations.examples import ROOT


def plan_of(utterances=112, workers=1, **settings):
    return make_plan(Config(max_epochs=2, **settings), workers, utterances, 16, ROOT, "cpu")


def test_sparse_steps_and_the_warning_that_there_are_none():
    """Of two epochs of 14 steps; the default has 128 dense ones, and nobody was told."""
    plans = [plan_of(), *(plan_of(dense_steps=dense) for dense in (28, 27, 0))]
    more = ({"max_steps": 15}, {"nsteps_update": 2}, {"compressor": "dense"})
    plans += [plan_of(dense_steps=10, **each) for each in more]
    assert [plan.sparse_steps for plan in plans] == [0, 0, 1, 28, 5, 4, 0]
    assert all("one worker has nobody" in str(plan.warning) for plan in plans)
    plans = [replace(plan, workers=2, utterances=2 * plan.utterances) for plan in plans]
    assert [plan.warning for plan in plans[2:]] == [None] * 5
    for plan, dense in zip(plans[:2], (128, 28), strict=True):
        words = ("no step will be sparse", "28 steps", f"first {dense}", "--dense-steps 7", "oktopk")
        assert [word for word in words if word not in plan.warning] == []


@given(utterances=st.integers(1, 3000), workers=st.integers(1, 8), batch=st.integers(1, 16), passes=st.integers(1, 4))
def test_an_epoch_uses_every_utterance_of_its_whole_steps(utterances, workers, batch, passes):
    plan = Plan(Config(batch_size=batch, nsteps_update=passes), workers, utterances, 1, ROOT, "cpu", 1000, 900)
    step = workers * batch * passes
    assert utterances - step < plan.steps_per_epoch * step <= utterances


def test_the_momentum_is_told():
    for settings, sparse in (({}, True), ({"compressor": "dense"}, False), ({"sparse_momentum": 0.9}, False)):
        learning = str(list(plan_of(**settings).table().columns[1].cells)[-1])
        assert ("momentum 0.9, in sparse steps 0.5 at 5 x lr," if sparse else "momentum 0.9,") in learning
        assert ("sparse steps" in learning) == sparse


def test_bytes():
    numel = sum(parameter.numel() for parameter in make_model("lstman4-small").parameters())
    for workers in (1, 3):
        plan = plan_of(workers=workers)
        assert (plan.numel, plan.dense_bytes) == (numel, 8 * numel * (workers - 1) // workers)
        assert (plan.sparse_bytes == 0) == (workers == 1)
        assert plan.sparse_bytes <= 0.2 * plan.dense_bytes
