"""The residual law under members that come and go, on threads: no lighthouse, and every membership in milliseconds."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk import Dense, GTopk, NonFiniteError, OkTopk, PeerError, SettingError, StateError, TopkDSA, run_local
from oktopk.comm import Comm
from oktopk.errors import MismatchError

pytest.importorskip("torchft", reason="oktopk[torchft] is not installed")

from oktopk.integrations.torchft.attach import Member, attach
from oktopk.integrations.torchft.local import LocalSteps
from oktopk.integrations.torchft.members import Members

SHAPE = (24, 17)
TOLERANCE = 1e-6


class FakeManager:
    """What `Members` knows of torchft's Manager, with the quorum that the test sets."""

    _use_async_quorum, _group_world_size, _pg = False, 1, None

    def __init__(self) -> None:
        self.step, self._quorum_id, self.error, self.comm, self.state = 0, 0, None, None, {}

    def start_quorum(self) -> None:
        self.error = None

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def should_commit(self) -> bool:
        self.step += self.error is None
        return self.error is None

    def current_step(self) -> int:
        return self.step

    def participating_rank(self) -> int:
        return self.comm.rank

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "batches_committed": 0}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.step = saved["step"]

    def register_state_dict_fn(self, key: str, load: object, save: object) -> None:
        self.state[key] = (load, save)


class Breaking(Comm):
    """A comm whose collective number `at` fails on this member; number -1 is the vote, which the others get."""

    def __init__(self, comm: Comm, at: int) -> None:
        self.comm, self.at, self.rank, self.size = comm, at, comm.rank, comm.size

    def _made(self, name: str, *args: object) -> object:
        if self.at == 0:
            raise PeerError("cut off")
        self.at -= self.at > 0
        return getattr(self.comm, name)(*args)

    def all_reduce(self, tensor):
        return self._made("all_reduce", tensor)

    def all_gather(self, block):
        every = self._made("all_gather", block)
        if self.at == -1 and block.dtype == torch.float64:
            raise PeerError("cut off, after the others got this vote")
        return every

    def all_to_all_single(self, blocks, send, receive):
        return self._made("all_to_all_single", blocks, send, receive)

    def sendrecv(self, *args):
        return self._made("sendrecv", *args)

    def fail(self, error: BaseException) -> None:
        if self.at >= 0:  # the others are through
            self.comm.fail(error)


def make_member(algorithm: object = None, **settings: object) -> Member:
    torch.manual_seed(7)
    net = torch.nn.Linear(*reversed(SHAPE), bias=False)
    manager = FakeManager()
    return attach(
        net, torch.optim.SGD(net.parameters(), lr=1.0), algorithm or OkTopk(density=0.05, wire="fp32"),
        manager=manager, dense_steps=0, exclude=(), make_comm=lambda manager: manager.comm, timeout=0.01, **settings,
    )  # fmt: skip


def manager_of(member: Member) -> FakeManager:
    return member.exchange.members.manager


def owed(members: list[Member]) -> torch.Tensor:
    """Return (1/P) sum of the residuals, for the P members."""
    return sum(each.residual["weight"].double() for each in members) / len(members)


class Run:
    """Some members, what each step should have delivered in the mean, and what the weights got."""

    def __init__(self, members: list[Member]) -> None:
        self.members, self.quorum, self.draws = members, 0, torch.Generator().manual_seed(3)
        self.owed_before = torch.zeros(SHAPE[0] * SHAPE[1], dtype=torch.float64)
        self.start = members[0].model.weight.detach().clone().double().flatten()

    def step(self, breaking: tuple[int, int] | None = None, *, flush: bool = False) -> list[bool]:
        """Make a step of all members; `breaking` is a member, and the number of its collective that fails."""
        grads = [torch.randn(SHAPE, generator=self.draws) for _ in self.members]

        committed = [False] * len(self.members)

        def work(comm: Comm) -> None:
            member = self.members[comm.rank]
            at = breaking is not None and breaking[0] == comm.rank
            manager_of(member).comm = Breaking(comm, breaking[1]) if at else comm
            manager_of(member)._quorum_id = self.quorum
            member.zero_grad()
            member.model.weight.grad = grads[comm.rank].clone()
            committed[comm.rank] = member.step(flush=flush)

        self.quorum += 1
        try:
            run_local(len(self.members), work)
        except PeerError:
            if breaking is None:
                raise
        if any(committed):
            self.owed_before += sum(grad.double().flatten() for grad in grads) / len(grads)
        return committed

    def delivered(self) -> torch.Tensor:
        return self.start - self.members[0].model.weight.detach().double().flatten()

    def check(self, lost: torch.Tensor | float = 0.0) -> None:
        """Check that all gradients were delivered once, are owed, or are `lost`; and that the weights are the same."""
        missing = self.owed_before - lost - self.delivered() - owed(self.members)
        scale = self.owed_before.abs().max() + 1
        assert missing.abs().max() <= TOLERANCE * scale * 4
        weights = [each.model.weight for each in self.members]
        assert all(torch.equal(weight, weights[0]) for weight in weights)


def make_local(algorithm: object = None, dtype: torch.dtype = torch.float32, **settings: object) -> LocalSteps:
    torch.manual_seed(7)
    net = torch.nn.Linear(*reversed(SHAPE), bias=False).to(dtype)
    return LocalSteps(
        net, torch.optim.SGD(net.parameters(), lr=1.0), algorithm or OkTopk(density=0.05, wire="fp32"), every=10**9,
        manager=FakeManager(), exclude=(), make_comm=lambda manager: manager.comm, timeout=0.01, **settings,
    )  # fmt: skip


class LocalRun(Run):
    """A run of `LocalSteps`, whose movements are given; each step is an exchange."""

    def move(self) -> None:
        """Let all members move, and take that for owed."""
        for member in self.members:
            weight = member.model.weight.detach()
            before = weight.clone()
            weight -= 0.1 * torch.randn(SHAPE, generator=self.draws)
            self.owed_before += (before.double() - weight.double()).flatten() / len(self.members)

    def exchange(self, breaking: tuple[int, int] | None = None, *, flush: bool = False) -> None:
        def work(comm: Comm) -> None:
            member = self.members[comm.rank]
            at = breaking is not None and breaking[0] == comm.rank
            manager_of(member).comm = Breaking(comm, breaking[1]) if at else comm
            manager_of(member)._quorum_id = self.quorum
            member.synchronize(flush=flush)

        self.quorum += 1
        run_local(len(self.members), work)


def heal(member: Member | LocalSteps, source: Member | LocalSteps) -> None:
    load, _ = manager_of(member).state["oktopk"]
    load(manager_of(source).state["oktopk"][1]())


ALGORITHMS = st.sampled_from(
    [OkTopk(density=0.05, wire="fp32"), OkTopk(density=0.05), TopkDSA(density=0.05), GTopk(density=0.05), Dense()]
)


@settings(max_examples=10)
@given(
    size=st.integers(1, 5), leave=st.sets(st.integers(0, 4)), join=st.integers(0, 3), steps=st.integers(1, 4),
    algorithm=ALGORITHMS,
)  # fmt: skip
def test_what_is_owed_stays_the_same_from_p_to_q_members(size, leave, join, steps, algorithm):
    run = Run([make_member(algorithm) for _ in range(size)])
    for _ in range(steps):
        assert all(run.step())
    run.check()
    survivors = [each for i, each in enumerate(run.members) if i not in leave] or run.members[:1]
    lost = owed(run.members) - sum(each.residual["weight"].double() for each in survivors) / size
    joiners = [make_member(algorithm) for _ in range(join)]
    for joiner in joiners:
        heal(joiner, survivors[0])
    run.members = [*joiners, *survivors]  # a joiner may become rank 0
    before = sum(each.residual["weight"].double() for each in survivors) / size

    def meet(comm: Comm) -> None:
        member = run.members[comm.rank]
        manager_of(member).comm, manager_of(member)._quorum_id = comm, 1000
        member.zero_grad()

    run_local(len(run.members), meet)
    assert (owed(run.members) - before).abs().max() <= TOLERANCE * (before.abs().max() + 1)
    run.quorum = 1001
    for _ in range(steps):
        assert all(run.step())
    run.check(lost)


@settings(max_examples=10)
@given(size=st.integers(2, 4), who=st.integers(0, 3), at=st.integers(0, 9), algorithm=ALGORITHMS)
def test_an_error_in_any_collective_leaves_the_step_uncommitted_on_all(size, who, at, algorithm):
    run = Run([make_member(algorithm) for _ in range(size)])
    assert all(run.step())
    before = [each.residual["weight"] for each in run.members]
    weights = run.members[0].model.weight.detach().clone()
    committed = run.step((who % size, at))
    assert all(committed) or not any(committed)
    if not any(committed):
        assert all(torch.equal(each.residual["weight"], was) for each, was in zip(run.members, before, strict=True))
        assert torch.equal(run.members[-1].model.weight, weights)
    for member in run.members:
        member.exchange.members._quorum_id = None
    assert all(run.step())
    run.check()


EVENTS = st.lists(st.sampled_from(["exchange", "break", "nan", "leave", "join", "resume"]), min_size=1, max_size=8)


@settings(max_examples=12)
@given(events=EVENTS, at=st.integers(0, 6), algorithm=ALGORITHMS)
def test_what_members_moved_is_conserved_at_every_change(events, at, algorithm):
    """Local steps: movements are delivered or held back, but for what a member that leaves takes with it."""
    run = LocalRun([make_local(algorithm, on_nonfinite="skip") for _ in range(3)])
    lost = torch.zeros(SHAPE[0] * SHAPE[1], dtype=torch.float64)
    for event in ["exchange", *events, "exchange"]:
        if event == "break":
            run.move()
            before = [(each.residual["weight"], each.agreed["weight"], each.exchanges) for each in run.members]
            try:
                run.exchange((at % len(run.members), at))
            except PeerError:  # nobody has anything of it, and the movements are still to be exchanged
                for member, (residual, agreed, exchanges) in zip(run.members, before, strict=True):
                    assert member.exchanges == exchanges
                    assert torch.equal(member.residual["weight"], residual)
                    assert torch.equal(member.agreed["weight"], agreed)
                    member.exchange.members._quorum_id = None
                run.exchange()
        elif event == "nan":
            run.members[-1].model.weight.data[2, 3] = float("nan")
            run.exchange()
            assert all(member.exchange.last.skipped for member in run.members)
        elif event == "leave" and len(run.members) > 1:
            gone = run.members.pop()
            lost += gone.residual["weight"].double() / (len(run.members) + 1)
        elif event == "join":
            run.members.insert(0, make_local(algorithm, on_nonfinite="skip"))
            heal(run.members[0], run.members[1])
        elif event == "resume":
            run.move()
            run.exchange(flush=True)
            assert not owed(run.members).any()
            saved = run.members[0].state_dict()
            run.members = [make_local(algorithm, on_nonfinite="skip") for _ in range(2)]
            for member in run.members:
                member.load_state_dict(saved)
        run.move()
        run.exchange()
        run.check(lost)


def test_a_nan_in_a_movement_raises_on_all_and_changes_nothing():
    run = LocalRun([make_local() for _ in range(3)])
    run.move()
    run.exchange()
    before = [(each.residual["weight"], each.agreed["weight"]) for each in run.members]
    run.members[1].model.weight.data[2, 3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"rank 1.*weight"):
        run.exchange()
    for member, (residual, agreed) in zip(run.members, before, strict=True):
        assert torch.equal(member.residual["weight"], residual)
        assert torch.equal(member.agreed["weight"], agreed)


def test_narrow_weights_move_the_agreed_point_by_less_than_they_can_hold():
    run = LocalRun([make_local(Dense(), torch.bfloat16, outer=lambda tensors: torch.optim.SGD(tensors, lr=2.0**-12))])
    start = run.members[0].agreed["weight"]
    for _ in range(8):
        run.members[0].model.weight.data -= 0.125
        run.exchange()
    way = start - run.members[0].agreed["weight"]
    assert (way / (8 * 0.125 * 2.0**-12) - 1).abs().max() < 0.1


@pytest.mark.parametrize("make", [make_member, make_local])
def test_members_that_start_with_other_weights_are_refused(make):
    """A Manager with init_sync=False heals nobody before the first step."""
    members = [make(), make(), make()]
    members[2].model.weight.data[0, 0] += 1e-3
    if make is make_local:
        members[2] = LocalSteps(
            members[2].model, members[2].optimizer, OkTopk(density=0.05, wire="fp32"), every=10**9, exclude=(),
            manager=FakeManager(), make_comm=lambda manager: manager.comm, timeout=0.01,
        )  # fmt: skip
    found = []

    def meet(comm: Comm) -> None:
        manager_of(members[comm.rank]).comm = comm
        try:
            members[comm.rank].exchange.meet()
        except MismatchError as error:
            found.append(str(error))
            raise

    with pytest.raises((MismatchError, PeerError)):
        run_local(3, meet)
    assert len(found) == 1
    assert "disagree on the weights that they start from" in found[0]


def test_a_member_that_missed_the_votes_heals_and_delivers_nothing_twice():
    run = Run([make_member() for _ in range(3)])
    assert all(run.step())
    assert run.step((1, -1)) == [True, False, True]  # its part is in the others' weights
    behind, source = run.members[1], run.members[0]
    assert [each.step_number for each in run.members] == [2, 1, 2]
    undelivered = behind.exchange.groups[0].residual.acc.clone()  # what it would have kept
    heal(behind, source)
    assert not behind.residual["weight"].any()
    assert all(run.step())
    run.check(undelivered.double() / 3)
    assert source.last.lost_mass is not None


def test_a_member_that_hands_over_owes_nothing_and_takes_no_mass_with_it():
    run = Run([make_member() for _ in range(3)])
    assert all(run.step())
    run.members[2].hand_over()
    assert all(run.step())
    assert owed(run.members).any()
    assert all(run.step())  # dense
    assert not owed(run.members).any()
    run.members = run.members[:2]
    assert all(run.step())
    run.check()
    assert run.members[0].last.lost_mass is not None


def test_the_lost_mass_bounds_what_a_crash_takes():
    run = Run([make_member() for _ in range(3)])
    assert all(run.step())  # step 0 measures the norm
    lost = run.members[2].residual["weight"].double() / 3
    run.members = run.members[:2]
    assert all(run.step())
    run.check(lost)
    assert run.members[0].last.lost_mass == pytest.approx(float(lost.norm()), rel=1e-5)
    assert all(run.step())
    assert run.members[0].last.lost_mass is None


def test_the_lost_mass_is_known_from_the_first_step_of_a_member_on():
    run = Run([make_member() for _ in range(2)])
    for _ in range(3):
        assert all(run.step())
    joiner = make_member()
    heal(joiner, run.members[0])
    run.members.append(joiner)
    assert all(run.step())  # step 3
    lost = joiner.residual["weight"].double() / 3
    run.members.remove(joiner)
    assert all(run.step())
    run.check(lost)
    assert run.members[0].last.lost_mass == pytest.approx(float(lost.norm()), rel=1e-5)


def test_a_quorum_before_the_checkpoint_is_refused():
    run = Run([make_member(checkpoint_step=40)])
    with pytest.raises(StateError, match="step 0 or before, and the run has reached step 40"):
        run.step()


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"the version of oktopk": "0.0.1"}, "the version of oktopk: here it is 0.0.1, there "),
        ({"the parameters": ["weight [24, 18] torch.float32"]}, r"the parameters: here it is weight \[24, 18\]"),
        ({"algorithm": "TopkA()"}, r"algorithm: here it is TopkA\(\), there OkTopk"),
    ],
)
def test_a_member_of_another_version_model_or_algorithm_is_refused_by_name(here, there, monkeypatch):
    run = Run([make_member(), make_member(), make_member()])
    other, plain = run.members[2].exchange.members, run.members[2].exchange.settings()
    monkeypatch.setattr(other, "_settings", lambda: {**plain, **here})
    found = []

    def meet(comm: Comm) -> None:
        manager_of(run.members[comm.rank]).comm = comm
        try:
            run.members[comm.rank].zero_grad()
        except MismatchError as error:
            found.append((comm.rank, str(error)))
            raise

    with pytest.raises((MismatchError, PeerError)):
        run_local(3, meet)
    assert [rank for rank, _ in found] == [2]
    assert re.search(f"disagree on {there}", found[0][1])
    assert all(each.step_number == 0 for each in run.members)


def test_a_member_with_other_settings_is_refused_by_name_and_the_others_go_on():
    run = Run([make_member(), make_member(), make_member(OkTopk(density=0.06, wire="fp32"))])
    with pytest.raises((MismatchError, PeerError)):
        run.step()
    with pytest.raises(MismatchError, match=r"disagree on algorithm: here it is OkTopk\(density=0.06"):
        heal(run.members[2], run.members[0])
    run.members = run.members[:2]
    assert all(run.step())


def test_as_many_steps_with_another_history_are_not_the_same():
    run = Run([make_member() for _ in range(2)])
    assert all(run.step())
    one, other = run.members
    run.members = [one]
    run.step()
    run.members = [other]
    run.step()  # both made a second step, apart
    run.members = [one, other]
    with pytest.raises(PeerError, match="not ready"):
        run.step()
    assert [each.step_number for each in run.members] == [2, 1]  # so that torchft heals it


@pytest.mark.parametrize("change", [{"_use_async_quorum": True}, {"_group_world_size": 2}])
def test_a_manager_under_which_the_law_cannot_hold_is_refused(change):
    manager = FakeManager()
    vars(manager).update(change)
    with pytest.raises(SettingError, match="make the Manager with"):
        Members(manager, dict, list, 1.0)
