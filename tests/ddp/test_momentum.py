"""Momentum in sparse steps: lower within the optimizer's step, nowhere else, and updates keep their size."""

import copy
import io
from contextlib import redirect_stderr
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

import oktopk
from oktopk.ddp.momentum import ADAM, KEY, SGD, SparseMomentum
from tests.ddp.accounts import same_bits, weights_of
from tests.ddp.harness import EXCHANGE_TIMEOUT_S, attach, check_words, error_of, on_ranks, through_a_file
from tests.ddp.nets import Net, loss_of

KINDS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, eps=0.0),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=0.0, weight_decay=0.0),
}
DENSE_STEPS, STEPS = 3, 8


def updates(make, phases, stop=None, most=None):
    """Return the update of each step under a gradient that is always the same; at `stop` the optimizer is made anew."""
    weight, made = nn.Parameter(torch.zeros(3, dtype=torch.float64)), []

    def fresh():
        optimizer = make([weight])
        return optimizer, SparseMomentum([optimizer], most, lambda _: phase == "sparse", speaks=False)

    optimizer, lowered = fresh()
    for step, phase in enumerate(phases):  # noqa: B007
        if step == stop:
            saved, (optimizer, lowered) = through_a_file(optimizer.state_dict()), fresh()
            optimizer.load_state_dict(saved)
        before = weight.detach().clone()
        weight.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        optimizer.step()
        made.append(before - weight.detach())
    lowered.close()
    assert [KEY in group for group in optimizer.param_groups] == [False]
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_steady_gradient_has_updates_of_one_size_through_the_switch_and_back_and_through_a_stop(kind):
    """SGD's buffers of momentum 0.9 made the first sparse steps 2.0, 1.5 and 1.25 times too large."""
    warm = 400 if KINDS[kind].func is torch.optim.SGD else 2  # Adam corrects the bias of the first steps itself
    steady, *after = updates(KINDS[kind], ["dense"] * warm + ["sparse"] * 3 + ["dense"] * 2)[warm - 1 :]
    for update in after:
        torch.testing.assert_close(update, steady)
    phases = ["dense"] * 3 + ["sparse"] * 3
    assert all(
        all(map(torch.equal, updates(KINDS[kind], phases, stop), updates(KINDS[kind], phases))) for stop in range(6)
    )


def test_buffers_that_sgd_left_alone_are_forgotten():
    first, *_, again = updates(KINDS["nesterov"], ["dense"] * 3 + ["sparse"] * 3 + ["dense"], most=0.0)
    torch.testing.assert_close(again, first)


def test_a_step_that_raises_costs_the_user_no_setting():
    optimizer = KINDS["sgd"]([nn.Parameter(torch.zeros(3))])
    lowered = SparseMomentum([optimizer], None, lambda _: True, speaks=False)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.05, 0.9)
    lowered.close()


@given(own=st.floats(0, 0.99), most=st.floats(0, 0.99), lr=st.floats(1e-6, 1.0))
def test_the_momentum_is_never_more_than_the_users_and_sgd_moves_the_weights_as_far_in_the_end(own, most, lr):
    for kind in (SGD, ADAM):
        rates = kind.rates(lr, own, most)
        assert rates.momentum == min(own, most)
        assert kind is SGD or rates.lr == lr
    sgd = SGD.rates(lr, own, most)
    assert sgd.lr / (1 - sgd.momentum) == pytest.approx(lr / (1 - own))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", [
    partial(ExponentialLR, gamma=0.5), partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    partial(OneCycleLR, max_lr=1.0, total_steps=STEPS + 1),
])  # fmt: skip
def test_schedulers_see_the_users_values_and_rule_them(kind, schedule):
    """OneCycleLR sets the momentum in every step, too."""
    seen = []
    for sparse in (False, True):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = KINDS[kind]([weight])
        lowered = SparseMomentum([optimizer], None, lambda _, sparse=sparse: sparse, speaks=False)
        scheduler, shown = schedule(optimizer), []
        for _ in range(STEPS):
            weight.grad = torch.ones(3)
            optimizer.step()
            scheduler.step()
            shown.append({name: optimizer.param_groups[0].get(name) for name in ("lr", "momentum", "betas")})
        seen.append(shown)
        lowered.close()
    assert seen[0] == seen[1]


def two_groups(make, model):
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [make([{"params": decayed}, {"params": others, "lr": 0.02}])]


def muon(model):
    """What a script does that trains matrices with Muon and the rest with AdamW."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


MAKERS = {name: partial(two_groups, make) for name, make in KINDS.items() if name in ("sgd", "adamw")} | {
    name: make for name, make in {"muon": muon}.items() if hasattr(torch.optim, "Muon")
}


class Session:
    """A script that attaches with its optimizers, and notes the momentum of each step as the optimizer has it."""

    def __init__(self, make, algorithm=oktopk.TopkA(density=0.1)):  # noqa: B008
        self.model = DDP(Net())
        self.optimizers, self.momenta, self.said = make(self.model.module), [], io.StringIO()
        with redirect_stderr(self.said):
            self.attached = oktopk.attach(
                self.model, algorithm, dense_steps=DENSE_STEPS, optimizer=self.optimizers, timeout=EXCHANGE_TIMEOUT_S
            )
        self.optimizers[-1].register_step_pre_hook(lambda optimizer, *_: self.note(optimizer.param_groups))

    def note(self, groups):
        self.momenta.append({float(group["betas"][0] if "betas" in group else group["momentum"]) for group in groups})

    def train(self, first, end, by_closure=False):
        for step in range(first, end):
            backward = loss_of(self.model, self.attached.rank, step).backward
            with redirect_stderr(self.said):
                if by_closure:
                    self.optimizers[0].step(backward)
                else:
                    backward()
                for optimizer in self.optimizers[by_closure:]:
                    optimizer.step()
            self.model.zero_grad()
        return self

    def parts(self):
        return {"net": self.model.module, "oktopk": self.attached} | dict(enumerate(self.optimizers))


@pytest.mark.parametrize("kind", MAKERS)
@on_ranks(2)
def test_the_switch_is_told_once_and_a_stop_anywhere_around_it_changes_no_bit(kind):
    whole = Session(MAKERS[kind]).train(0, STEPS)
    assert whole.momenta == [{0.9}] * DENSE_STEPS + [{0.5}] * (STEPS - DENSE_STEPS)
    by_closure = Session(MAKERS[kind]).train(0, STEPS, by_closure=True)  # as Lightning does
    assert by_closure.momenta == whole.momenta
    assert same_bits(weights_of(by_closure.model.module), weights_of(whole.model.module))
    told = whole.said.getvalue()
    assert told.count("in sparse steps: momentum") == (len(whole.optimizers) if whole.attached.rank == 0 else 0)
    assert ("lr x 1.41" in told) == (kind != "sgd" and whole.attached.rank == 0)  # the root of the ranks
    end = weights_of(whole.model.module)
    for stop, has_key in ((2, True), (DENSE_STEPS, True), (DENSE_STEPS + 1, True), (6, True), (6, False)):
        first, second = Session(MAKERS[kind]).train(0, stop), Session(MAKERS[kind])
        saved = through_a_file({name: part.state_dict() for name, part in first.parts().items()})
        first.attached.detach()
        for name in () if has_key else range(len(first.optimizers)):  # torch.distributed.checkpoint does not load it
            for group in saved[name]["param_groups"]:
                del group[KEY]
        for name, part in second.parts().items():
            part.load_state_dict(copy.deepcopy(saved[name]))
        second.train(stop, STEPS)
        assert same_bits(weights_of(second.model.module), end), stop
        assert stop <= DENSE_STEPS or "in sparse steps: momentum" not in second.said.getvalue()
        second.attached.detach()
    by_closure.attached.detach()
    whole.attached.detach()


@on_ranks(2)
def test_dense_steps_and_dense_algorithms_change_nothing_and_a_change_to_dense_or_detach_leads_back():
    dense = Session(MAKERS["sgd"], oktopk.Dense()).train(0, STEPS)
    assert dense.momenta == [{0.9}] * STEPS
    assert not any(KEY in group for group in dense.optimizers[0].param_groups)
    dense.attached.detach()
    session = Session(MAKERS["sgd"]).train(0, 5)
    groups, state = session.optimizers[0].param_groups, session.optimizers[0].state
    assert [(group[KEY], group["momentum"], group["lr"]) for group in groups] == [(0.5, 0.9, 0.05), (0.5, 0.9, 0.02)]
    session.attached.algorithm = oktopk.Dense()
    session.train(5, 6)
    session.attached.algorithm = oktopk.TopkA(density=0.1)
    session.train(6, 7)
    assert session.momenta[-3:] == [{0.5}, {0.9}, {0.5}]
    before = {parameter: each["momentum_buffer"].clone() for parameter, each in state.items()}
    session.attached.detach()
    assert not any(KEY in group for group in groups)
    for parameter, each in state.items():
        torch.testing.assert_close(each["momentum_buffer"], 5 * before[parameter])
    session.train(7, 8)
    assert session.momenta[-1] == {0.9}


@on_ranks(2)
def test_optimizers_that_do_not_fit_are_refused():
    model, other = DDP(Net()), Net()
    mixed = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    given = partial(attach, model)
    check_words(error_of(partial(given, optimizer=mixed)), "SettingError", "are not the model's")
    check_words(error_of(partial(given, optimizer=[other])), "SettingError", "torch.optim.Optimizer", "Net")
    check_words(error_of(partial(given, sparse_momentum=0.5)), "SettingError", "optimizer=")
    fitting = torch.optim.SGD(model.parameters(), lr=0.1)
    check_words(error_of(partial(given, optimizer=fitting, sparse_momentum=1.5)), "SettingError", "sparse_momentum")


def warnings_of(make, **settings):
    """Return what a script of five steps reads on stderr about its optimizer, whom `attach` was not given."""
    model, said = DDP(Net()), io.StringIO()
    optimizers = make(model.module)
    attached = attach(model, oktopk.TopkA(density=0.1), dense_steps=2, **settings)
    with redirect_stderr(said):
        for step in range(5):
            loss_of(model, attached.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    attached.detach()
    return said.getvalue().count("WARNING")


@on_ranks(2)
def test_without_the_optimizer_a_harmful_momentum_is_warned_of_once():
    first = torch.distributed.get_rank() == 0
    low = partial(torch.optim.SGD, lr=0.01, momentum=0.5)
    assert warnings_of(MAKERS["sgd"]) == first
    assert warnings_of(MAKERS["adamw"]) == first
    assert warnings_of(partial(two_groups, low)) == 0
    assert warnings_of(lambda _: two_groups(KINDS["sgd"], Net())) == 0  # of another model
