"""A run that was stopped and resumed has the weights, to the last bit, of one that never stopped."""

import copy
import io
import itertools
from collections import OrderedDict
from contextlib import nullcontext, redirect_stderr
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import Attached, OkTopk, OkTopkPaper, TopkA, load_distributed, save_distributed
from tests.cases import COVER, algorithms, device_step
from tests.ddp.accounts import Audit, any_left, mean_of, same_bits, weights_of, worst_error
from tests.ddp.harness import attach, check_words, error_of, on_ranks, through_a_file
from tests.ddp.nets import Net, batch, loss_of, step_

pytestmark = pytest.mark.processes
slow = pytest.mark.slow

DENSE_STEPS = 4
STEPS = 16
STOPS = ((2, DENSE_STEPS + 1), (DENSE_STEPS, 11))  # in the dense phase and right after it, at its end and well inside
PERIODS = {"repartition_every": 5, "rethreshold_every": 3}
BOUNDED, PAPER = OkTopk(density=0.05, rescale_every=5), OkTopkPaper(density=0.05, **PERIODS)


class Session:
    """What a training script has in hand; it makes distributed checkpoints if it has a folder for them."""

    def __init__(self, algorithm=BOUNDED, seed=0, unused=False, bucket_cap_mb=0.01, folder=None, **settings):
        self.folder, self.unused = folder, unused
        self.model = DDP(Net(seed=seed), bucket_cap_mb=bucket_cap_mb, find_unused_parameters=unused)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.attached = attach(self.model, algorithm, **{"dense_steps": DENSE_STEPS, **settings})

    def train(self, first, end):
        rank = dist.get_rank()
        for step in range(first, end):
            self.optimizer.zero_grad()
            branch = not self.unused or (step % 5 != 0 and (step + rank) % 3 != 0)
            loss_of(self.model, rank, step, branch=branch).backward()
            self.optimizer.step()

    def saved(self):
        parts = {"net": self.model.module, "optimizer": self.optimizer, "oktopk": self.attached}
        if self.folder is not None:
            save_distributed(self.folder / str(self.attached.step), self.attached)
        return through_a_file({name: part.state_dict() for name, part in parts.items()})

    def load(self, state):
        self.model.module.load_state_dict(state["net"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would go on in the tensors it is given
        if self.folder is None:
            self.attached.load_state_dict(state["oktopk"])
        else:
            load_distributed(self.folder / str(state["oktopk"]["step"]), self.attached)

    def end(self):
        residual = {f"residual of {name}": tensor for name, tensor in self.attached.residual.items()}
        return weights_of(self.model.module) | residual


DEVICE = {"algorithm": OkTopk(density=0.05, wire="fp32")}
RUNS = {
    "bounded": {},
    "paper": {"algorithm": PAPER, "exclude": "*bias"},
    "unused": {"algorithm": OkTopk(density=0.05), "unused": True},
    "distributed": {},
    "device": DEVICE | {"exclude": "*bias"},
    "device, schedule": DEVICE | {"density_schedule": [(4, 0.5), (4, 0.1)]},
}
MORE_RUNS = {
    "clip": {"algorithm": OkTopk(density=0.05), "clip": 0.1},
    "schedule": {"algorithm": OkTopk(density=0.01), "density_schedule": [(3, 0.25), (3, 0.1)]},
    "distributed paper": {"algorithm": PAPER},
    "distributed topka, dense phase": {"algorithm": TopkA(density=0.05), "dense_steps": 8},
    **{name: {"algorithm": algorithms(0.05, **PERIODS)[name]} for name in (*COVER, "oktopk-bounded-scaled-bf16")},
}


def stop_and_resume(runs, stops_in_turn, folder):
    for (name, run), stops in zip(runs.items(), itertools.cycle(stops_in_turn), strict=False):
        if name.startswith("distributed"):
            run = {**run, "folder": folder / name}
        with device_step() if name.startswith("device") else nullcontext() as device:
            states, whole = {}, Session(**run)
            for first, end in zip((0, *stops), (*stops, STEPS), strict=True):
                states[first] = whole.saved()
                whole.train(first, end)
            end = whole.end()
            for stop, session in (*((stop, None) for stop in stops), (stops[0], whole)):
                resumed = session or Session(seed=stop, **run)
                resumed.load(states[stop])  # the whole run goes back in place, as after a divergence
                resumed.train(stop, STEPS)
                assert same_bits(resumed.end(), end), (name, stop, session)
        assert device is None or device.runs


SLOW = pytest.param(3, MORE_RUNS, ((1, 7, 13),), marks=slow, id="slow")
LONG = pytest.param(3, RUNS, (range(1, STEPS, 2),), marks=pytest.mark.long, id="long")


@pytest.mark.parametrize(("size", "runs", "stops"), [pytest.param(2, RUNS, STOPS, id="quick"), SLOW, LONG])
def test_a_resumed_run_ends_with_the_same_bits(worlds, tmp_path, size, runs, stops):
    worlds.run(size, stop_and_resume, runs, stops, tmp_path)


@on_ranks(2)
def test_a_run_whose_settings_changed_resumes_with_the_same_bits():
    """Two changes, one after another: a new session is given the last of them."""
    last, exclude, use = ("body.0.*", "norm.*"), Attached.exclude, Attached.algorithm.fset
    for changes, settings in (
        ([(exclude, "exit.*"), (exclude, ())], {}),
        ([(use, TopkA(density=0.05)), (use, BOUNDED)], {}),
        ([(exclude, "exit.*"), (exclude, last)], {"exclude": last}),
    ):
        whole = Session()
        whole.train(0, 4)
        for (change, value), steps in zip(changes, ((4, 6), (6, 10)), strict=True):
            change(whole.attached, value)
            whole.train(*steps)
        resumed = Session(seed=1, **settings)
        resumed.load(whole.saved())
        for session in (whole, resumed):
            session.train(10, STEPS)
        assert same_bits(resumed.end(), whole.end()), changes


@on_ranks(2)
def test_the_mode_ranking_and_density_asked_for_are_those_used_after_loading(tmp_path):
    """A run that loads a state goes on as one that holds these residuals and changes its algorithm."""
    asked = {OkTopk(density=0.05, ranking="scaled"): 1, OkTopk(density=0.2, ranking="magnitude"): 0}
    for algorithm, anew in asked.items():
        for folder in (None, tmp_path / str(anew)):
            changed = Session(OkTopk(density=0.05, ranking="magnitude"), folder=folder)
            changed.train(0, 8)
            loaded = Session(algorithm, folder=folder, seed=1)
            with redirect_stderr(io.StringIO()) as said:
                loaded.load(changed.saved())
            assert said.getvalue().count("starts anew") == (anew if dist.get_rank() == 0 else 0)
            changed.attached.algorithm = algorithm
            for session in (changed, loaded):
                session.train(8, STEPS)
            assert same_bits(loaded.end(), changed.end())


@on_ranks(2)
def test_a_saved_state_does_not_change_with_the_run_and_one_of_after_detach_will_do():
    session = Session()
    session.train(0, 8)
    state = session.attached.state_dict()
    before = through_a_file(state)
    session.train(8, 10)
    assert same_bits(state["residual"], before["residual"])
    session.attached.detach()
    second = attach(session.model, BOUNDED)
    second.load_state_dict(session.attached.state_dict())
    assert same_bits(second.residual, session.attached.residual)
    assert second.step == 10


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    session, rank = Session(), dist.get_rank()
    session.train(0, 7)
    state = session.saved()["oktopk"]
    residual = state["residual"]
    renamed = {name if name != "exit.bias" else "another": tensor for name, tensor in residual.items()}
    for bad, words in (
        (state | {"version": 7}, ("version 7",)),
        (state | {"rank": 1 - rank}, (f"rank {1 - rank}",)),
        (state | {"size": 5}, ("size 5", "load_distributed")),
        (state | {"algorithm": "TopkA"}, ("TopkA",)),
        (state | {"residual": renamed}, ("missing ['exit.bias']", "unknown ['another']")),
        (state | {"residual": residual | {"exit.bias": torch.zeros(1)}}, ("of another size ['exit.bias']",)),
        ({}, ("version",)),
    ):
        check_words(error_of(session.attached.load_state_dict, bad), "StateError: ", *words)
    assert same_bits(session.attached.residual, residual)
    assert session.attached.step == 7


@on_ranks(2)
def test_ranks_that_resume_at_different_steps_are_told():
    session = Session()
    session.train(0, 2)
    early = session.saved()
    session.train(2, 3)
    session.load(early if dist.get_rank() == 0 else session.saved())
    check_words(error_of(session.train, 3, 4), "MismatchError", "disagree on the step")


def half_a_run(folder, state=None):
    """Train the first half and save it, or load that and train the second; return the mean of what was pending."""
    session = Session(folder=folder)
    if state is None:
        session.train(0, 8)
        assert any_left(session.attached.residual)
        return session.saved(), mean_of(session.attached.residual)
    session.load(state)
    mean = mean_of(session.attached.residual)
    session.train(8, STEPS)
    assert (session.attached.step, session.attached.summary().steps) == (STEPS, STEPS - 8)
    return None, mean


@pytest.mark.parametrize(("old", "new"), [(2, 3), pytest.param(4, 2, marks=slow), (3, 1)])
def test_on_other_ranks_the_mean_of_what_is_pending_is_conserved(worlds, tmp_path, old, new):
    state, before = worlds.run(old, half_a_run, tmp_path)[0]
    _, after = worlds.run(new, half_a_run, tmp_path, state)[0]
    assert worst_error(after, before) <= 1e-6


@on_ranks(2)
def test_with_another_algorithm_buckets_and_exclusions_every_residual_keeps_its_place(tmp_path):
    before = Session(bucket_cap_mb=0.004, folder=tmp_path)
    before.train(0, 8)
    after = Session(PAPER, exclude="norm.*", bucket_cap_mb=25, folder=tmp_path)
    after.load(before.saved())
    assert same_bits(after.attached.residual, before.attached.residual)
    audit = Audit(after.model, after.attached)
    for step in range(8, STEPS):
        audit.step(partial(step_, step=step))
    audit.check()


@on_ranks(2)
def test_a_threshold_comes_back_to_the_last_bit(tmp_path):
    model = DDP(Net().double(), bucket_cap_mb=0.01)
    attached = attach(model, PAPER)
    for step in range(3):
        model(batch(0, step, dtype=torch.float64)[0]).square().mean().backward()
    save_distributed(tmp_path, attached)
    before = [group["state"]["threshold"] for group in attached.state_dict()["groups"]]
    load_distributed(tmp_path, attached)
    assert [group["state"]["threshold"] for group in attached.state_dict()["groups"]] == before
    assert any(threshold != float(torch.tensor(threshold)) for threshold in before), "these need float64"


@on_ranks(2)
def test_a_checkpoint_that_cannot_be_read_to_its_end_changes_nothing(tmp_path):
    session = Session()
    save_distributed(tmp_path, session.attached)
    session.train(0, 7)
    before, load = session.attached.residual, state_dict_loader.load

    def broken(wanted, **where):
        if any("groups/" in key for key in wanted):
            raise OSError("no such sector")
        load(wanted, **where)

    with patch.object(state_dict_loader, "load", broken):
        check_words(error_of(load_distributed, tmp_path, session.attached), "OSError", "no such sector")
    assert same_bits(session.attached.residual, before)
    assert session.attached.step == 7


@on_ranks(2)
def test_a_name_may_look_like_a_path_and_what_is_no_checkpoint_of_this_model_is_refused(tmp_path):
    model = DDP(nn.Sequential(OrderedDict({"a/b": nn.Linear(8, 32)})))
    attached = attach(model, BOUNDED)
    model(torch.randn(4, 8)).square().mean().backward()
    save_distributed(tmp_path / "mine", attached)
    before = attached.residual
    model(torch.randn(4, 8)).square().mean().backward()
    load_distributed(tmp_path / "mine", attached)
    assert same_bits(attached.residual, before)
    save_distributed(tmp_path / "other", Session().attached)
    refused = error_of(load_distributed, tmp_path / "other", attached)
    check_words(refused, "StateError", "missing ['a/b.bias', 'a/b.weight']", "'body.0.weight'")
    dist.checkpoint.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "none")
    check_words(error_of(load_distributed, tmp_path / "none", attached), "StateError", "save_distributed")
    assert same_bits(attached.residual, before)
