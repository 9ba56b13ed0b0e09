"""Sparse steps that exchange updates: what the optimizers moved arrives or is held back, and all ranks go on alike."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from tests.cases import device_step
from tests.ddp.accounts import same_bits, weights_of
from tests.ddp.harness import attach, check_words, error_of, on_ranks, through_a_file
from tests.ddp.nets import Net, loss_of

DENSE_STEPS, STEPS = 2, 9
SPARSE = oktopk.OkTopk(density=0.1)


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **settings)


class Script:
    """A DDP script with AdamW, which notes what its optimizer moved before anything is exchanged."""

    def __init__(self, algorithm=SPARSE, dense_steps=DENSE_STEPS, make=adamw, **settings):
        self.model = DDP(Net())
        self.optimizer = make(self.model)
        self.optimizer.register_step_pre_hook(
            lambda *_: self.start.update(copy.deepcopy(weights_of(self.model.module)))
        )
        self.optimizer.register_step_post_hook(lambda *_: self.note())
        self.start, self.moved = {}, []
        self.attached = attach(
            self.model, algorithm, dense_steps=dense_steps, exclude=(), optimizer=self.optimizer, **settings
        )

    def note(self):
        now = weights_of(self.model.module)
        self.moved.append({name: self.start[name].double() - now[name].double() for name in now})

    def train(self, first, end, spoil=None):
        for step in range(first, end):
            loss = loss_of(self.model, self.attached.rank, step)
            (loss * float("nan") if spoil == (step, self.attached.rank) else loss).backward()
            self.optimizer.step()
            self.model.zero_grad()
        return self


def on_all_ranks(tensor):
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return every


def check_same_weights(model):
    for name, weight in weights_of(model).items():
        first, *rest = on_all_ranks(weight)
        assert all(torch.equal(first, each) for each in rest), name


@pytest.mark.parametrize("algorithm", ["oktopk", "oktopk_paper", "topka", "dense"])
@on_ranks(1, 3)
def test_all_that_optimizers_moved_arrives_or_is_held_back_and_all_ranks_have_the_same_weights(algorithm):
    made = oktopk.Dense() if algorithm == "dense" else oktopk.make_algorithm(algorithm, density=0.1)
    script = Script(made).train(0, DENSE_STEPS)
    before, ranks = copy.deepcopy(weights_of(script.model.module)), dist.get_world_size()
    script.moved.clear()
    for step in range(DENSE_STEPS, STEPS):
        script.train(step, step + 1)
        check_same_weights(script.model.module)
    after, residual = weights_of(script.model.module), script.attached.residual
    for name in before:
        moved = sum(each[name] for each in script.moved).flatten()
        if algorithm != "dense":  # whose steps exchange gradients
            owed = sum(on_all_ranks(moved - residual[name].double()))
            arrived = ranks * (before[name].double() - after[name].double()).flatten()
            torch.testing.assert_close(arrived, owed, rtol=0, atol=1e-6)
    if algorithm != "dense":
        assert any(bool(each.any()) for each in residual.values())
        assert script.attached.last.phase == "sparse"
        assert script.attached.step == STEPS


@on_ranks(2)
def test_density_one_takes_the_mean_of_the_ranks_own_steps():
    script = Script(oktopk.OkTopk(density=1.0), dense_steps=0)
    for step in range(4):
        script.train(step, step + 1)
        start, moved = dict(script.start), script.moved[-1]
        for name, weight in weights_of(script.model.module).items():
            mean = sum(on_all_ranks(moved[name])) / 2
            torch.testing.assert_close(weight.double(), start[name].double() - mean, rtol=0, atol=1e-7)
    assert not any(bool(each.any()) for each in script.attached.residual.values())


@pytest.mark.parametrize("how", ["raise", "skip"])
@on_ranks(2)
def test_a_nan_on_one_rank_moves_no_weight_on_any(how):
    script = Script(on_nonfinite=how).train(0, 5)
    before, held = copy.deepcopy(weights_of(script.model.module)), script.attached.residual
    moments = copy.deepcopy(script.optimizer.state_dict()["state"])
    spoilt = partial(script.train, 5, 6, spoil=(5, 1))
    if how == "raise":
        check_words(error_of(spoilt), "NonFiniteError", "step 5", "rank 1", "weight")
        for number, each in script.optimizer.state_dict()["state"].items():
            assert same_bits(each, moments[number])
        script.model.zero_grad()
    else:
        spoilt()
        assert script.attached.last.skipped
        assert "rank 1" in script.attached.last.reason
    assert same_bits(weights_of(script.model.module), before)
    assert same_bits(script.attached.residual, held)
    script.train(6, STEPS)
    assert not script.attached.last.skipped
    assert not same_bits(weights_of(script.model.module), before)
    check_same_weights(script.model.module)


@on_ranks(2)
def test_a_run_goes_on_bit_for_bit_with_the_optimizer_that_rank_0_saved():
    whole = Script().train(0, STEPS)
    end = weights_of(whole.model.module)
    for stop in (1, DENSE_STEPS, 5):
        first, second = Script().train(0, stop), Script()
        shared = [through_a_file({"net": first.model.module.state_dict(), "optimizer": first.optimizer.state_dict()})]
        own = through_a_file(first.attached.state_dict())
        dist.broadcast_object_list(shared, src=0)
        first.attached.detach()
        second.attached.load_state_dict(own)  # before the optimizer's: the order does not matter
        second.model.module.load_state_dict(shared[0]["net"])
        second.optimizer.load_state_dict(shared[0]["optimizer"])
        assert same_bits(weights_of(second.train(stop, STEPS).model.module), end), stop
        second.attached.detach()
    by_gradients = Script(make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    refused = error_of(partial(by_gradients.attached.load_state_dict, whole.attached.state_dict()))
    check_words(refused, "StateError", "updates", "optimizer=")


@on_ranks(2)
def test_after_detach_all_ranks_train_alike_with_one_optimizer_state():
    script = Script().train(0, 6)
    moment = script.optimizer.state[script.model.module.entry.weight]
    assert not torch.equal(*on_all_ranks(moment["exp_avg"]))
    script.attached.detach()
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(*on_all_ranks(moment[kind]))
    script.train(6, STEPS)
    check_same_weights(script.model.module)


@pytest.mark.slow  # waits for the groups' timeout
@on_ranks(2)
def test_a_rank_that_fails_detaches_without_the_others():
    script = Script().train(0, 5)
    if script.attached.rank == 1:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            script.attached.detach()
    else:
        check_words(error_of(partial(script.train, 5, 6)), "PeerError")


@on_ranks(2)
def test_accumulation_closures_and_a_gradient_that_nobody_has():
    """no_sync keeps gradients, a closure computes them within step(), and find_unused_parameters leaves some out."""
    script = Script()
    model, rank, optimizer = script.model, script.attached.rank, script.optimizer
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, rank, 100 + step).backward()
        optimizer.step(lambda step=step: loss_of(model, rank, step).backward())
        model.zero_grad()
        check_same_weights(model.module)
    assert script.attached.step == STEPS
    unused = DDP(Net(), find_unused_parameters=True)
    optimizer = adamw(unused)
    attach(unused, SPARSE, dense_steps=0, optimizer=optimizer)
    before = unused.module.branch.weight.detach().clone()
    for step in range(3):
        loss_of(unused, rank, step, branch=False).backward()
        optimizer.step()
        unused.zero_grad()
    assert torch.equal(unused.module.branch.weight, before)
    check_same_weights(unused.module)


@on_ranks(2)
def test_optimizers_that_do_not_divide_by_the_gradients_size_go_on_with_gradients():
    kinds = {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "some": lambda model: torch.optim.AdamW([model.module.exit.weight], lr=0.1),
    }
    for make in kinds.values():
        script = Script(make=make)
        script.train(0, DENSE_STEPS)
        loss_of(script.model, script.attached.rank, DENSE_STEPS).backward()
        assert script.attached.step == DENSE_STEPS + 1  # exchanged in backward
        script.attached.detach()
    narrow = DDP(Net().bfloat16())
    attached = attach(narrow, SPARSE, dense_steps=0, optimizer=adamw(narrow))
    assert "updates" not in str(attached)


@on_ranks(2)
def test_two_optimizers_step_together_or_the_next_backward_says_which_did_not():
    model = DDP(Net())
    first = torch.optim.AdamW(model.module.entry.parameters(), lr=0.01)
    rest = [each for name, each in model.module.named_parameters() if not name.startswith("entry")]
    second = torch.optim.Adam(rest, lr=0.01)
    attached = attach(model, SPARSE, dense_steps=0, optimizer=[first, second])
    for step in range(2):
        loss_of(model, attached.rank, step).backward()
        first.step()
        second.step()
        model.zero_grad()
    assert attached.step == 2
    check_same_weights(model.module)
    loss_of(model, attached.rank, 2).backward()
    first.step()
    check_words(error_of(loss_of(model, attached.rank, 3).backward), "Adam", "an exchange wants a step of each")


@on_ranks(2)
def test_a_grad_scaler_skips_the_step_on_all_ranks():
    script, scaler = Script(on_nonfinite="skip"), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step in range(STEPS):
        before = copy.deepcopy(weights_of(script.model.module))
        loss = loss_of(script.model, script.attached.rank, step)
        scaler.scale(loss * float("inf") if (step, script.attached.rank) == (6, 1) else loss).backward()
        scaler.step(script.optimizer)
        scaler.update()
        script.model.zero_grad()
        assert same_bits(weights_of(script.model.module), before) == (step == 6)
        check_same_weights(script.model.module)
    assert scaler.get_scale() == 2.0**3
    assert script.attached.step == STEPS - 1  # the skipped one was not exchanged


class Steady(torch.nn.Module):
    """A matrix whose gradient has one mean in all steps and on all ranks, and noise of each rank's own."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(20, 100))
        self.mean = (torch.rand(20, 100, generator=torch.Generator().manual_seed(1)) - 0.5).sign()

    def forward(self, noise):
        return (self.weight * (self.mean + noise)).sum()


OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": getattr(torch.optim, "Muon", None)}
needs_muon = pytest.mark.skipif(OPTIMIZERS["muon"] is None, reason="torch.optim.Muon came with torch 2.9")
LONG = (pytest.mark.long, pytest.mark.timeout(600))
WAITING = [
    pytest.param("adamw", "oktopk", "host", 200),
    pytest.param("adamw", "oktopk", "device", 200, marks=pytest.mark.slow),
    pytest.param("muon", "oktopk", "host", 200, marks=[pytest.mark.slow, needs_muon]),
    *(pytest.param("adamw", *each, 1500, marks=LONG) for each in (("oktopk", "device"), ("oktopk_paper", "host"))),
    *(pytest.param("muon", *each, 1500, marks=[*LONG, needs_muon])
      for each in (("oktopk", "host"), ("oktopk", "device"), ("oktopk_paper", "host"))),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "algorithm", "path", "steps"), WAITING)
@on_ranks(2)
def test_no_movement_waits_without_bound(optimizer, algorithm, path, steps):
    """What 75 steps moved, 5 % of 1,500 steps' movement, may be pending at any time."""
    torch.manual_seed(dist.get_rank())
    model, starts, masses = DDP(Steady()), [], []
    weight = model.module.weight
    used = OPTIMIZERS[optimizer]([weight], lr=1e-3)
    used.register_step_pre_hook(lambda *_: starts.append(weight.detach().clone()))
    used.register_step_post_hook(lambda *_: masses.append(float((starts.pop() - weight.detach()).abs().sum())))
    with device_step() if path == "device" else nullcontext() as device:
        attached = attach(model, oktopk.make_algorithm(algorithm), optimizer=used)
        for _ in range(steps):
            model(0.3 * torch.randn(20, 100)).backward()
            used.step()
            model.zero_grad()
        assert device is None or device.runs > 0
    pending = float(sum(on_all_ranks(attached.residual["weight"].abs().sum().view(1))))
    put_in = float(sum(on_all_ranks(torch.tensor([sum(masses)]))))
    assert 0 < pending * steps / put_in <= 75
