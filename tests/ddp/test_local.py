"""Local steps: what the workers moved was delivered or is held back, and all workers agree, bit for bit."""

import copy
import io
import signal
from contextlib import redirect_stderr
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import (
    Dense,
    GTopk,
    LocalSteps,
    MemorySink,
    MismatchError,
    NonFiniteError,
    OkTopk,
    SettingError,
    TopkA,
    load_distributed,
    run_local,
    save_distributed,
)
from oktopk.ddp.local import split_evenly
from tests.cases import device_step
from tests.ddp.accounts import any_left, check_same_on_all_ranks, mean_of, same_bits, weights_of, worst_error
from tests.ddp.harness import check_words, error_of, on_ranks, on_threads, through_a_file
from tests.ddp.mortal import ERROR, EXCHANGE_S, Mortals
from tests.ddp.nets import Net, loss_of

NET, OTHER = Net(), Net(seed=1)  # made here, as threads share the generator
NARROW, SQUARE = nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(400, 400, bias=False)
SPARSE = OkTopk(density=0.05)
EVERY = 4


class Worker:
    """A worker of a job, and what its inner optimizer moved, by parameter, in float64."""

    def __init__(self, comm, algorithm=SPARSE, net=NET, optimizer=torch.optim.SGD, **settings):
        self.comm, self.net, self.steps = comm, copy.deepcopy(net), 0
        self.optimizer = optimizer(self.net.parameters(), lr=0.05)
        with redirect_stderr(io.StringIO()):
            self.local = LocalSteps(
                self.net, self.optimizer, algorithm, group=comm, **{"every": EVERY, "exclude": "*bias", **settings}
            )
        self.moved = {name: torch.zeros(each.shape).double() for name, each in self.local.agreed.items()}

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.net, self.comm.rank, self.steps).backward()
            before = weights_of(self.net)
            self.optimizer.step()
            for name, now in weights_of(self.net).items():
                self.moved[name] += before[name].double() - now.double()
            self.steps += 1
            self.local.advance()
        self.local.state_dict()  # waits: threads share one comm, and another worker may begin now

    def saved(self):
        parts = {"optimizer": self.optimizer.state_dict(), "local": self.local.state_dict()}
        return through_a_file({**parts, "moved": self.moved, "steps": self.steps})

    def load(self, state):
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.local.load_state_dict(state["local"])
        self.moved, self.steps = copy.deepcopy(state["moved"]), state["steps"]

    def accounts(self):
        """Return the movement, the residual, the agreed point and the part of the movement not yet exchanged."""
        agreed, weights = self.local.agreed, weights_of(self.net)
        open_ = {name: agreed[name].double() - weights[name].double() for name in agreed}
        residual = {name: each.view_as(agreed[name]).double() for name, each in self.local.residual.items()}
        return self.moved, residual, agreed, open_


def check_conserved(every, start=NET):
    """Mean of the movements = the way of the agreed point + mean of residuals and of steps since, by element."""
    start, agreed = weights_of(start), every[0][2]
    for name in agreed:
        moved, residual, open_ = (torch.stack([each[part][name] for each in every]) for part in (0, 1, 3))
        delivered = start[name].double() - agreed[name].double()
        missing = (moved.mean(0) - delivered - residual.mean(0) - open_.mean(0)).abs()
        assert float(missing.max()) <= 2e-5 * max(1.0, float(moved.abs().max())), name


def interrupted(comm, algorithm, settings, rounds):
    """Train with a NaN, a kill without a word after a checkpoint, and a resume, and compare all workers' weights."""
    worker = Worker(comm, algorithm, **settings)
    worker.train(rounds // 4 * EVERY + 1)
    if not settings:
        worker.train(EVERY - 2)
        weight, rank = worker.net.entry.weight.data, comm.rank
        before = weight.clone()
        if rank == 1:
            weight[2, 3] = float("nan")
        held, agreed = worker.local.residual, worker.local.agreed
        check_words(error_of(worker.local.advance), "NonFiniteError", "rank 1", "entry.weight")
        assert same_bits(worker.local.residual, held)
        assert same_bits(worker.local.agreed, agreed)
        weight.copy_(before)
    state = worker.saved()
    worker.train(9)  # steps that are lost
    worker = Worker(comm, algorithm, net=OTHER, **settings)
    worker.load(state)
    worker.train(rounds * EVERY - worker.steps)
    if settings:
        worker.local.detach()
    return worker.accounts(), worker.local.summary()


MODES = {"plain": {}, "streamed": {"fragments": 3, "delay": 1}}
ALGORITHMS = (SPARSE, TopkA(density=0.05), GTopk(density=0.05), Dense())
QUICK = [(12, "plain", SPARSE), (12, "streamed", TopkA(density=0.05))]
PAIRS = [(mode, each) for mode in MODES for each in ALGORITHMS]
OFTEN = [
    pytest.param(200, *pair, marks=pytest.mark.slow if i % 3 == 0 else pytest.mark.long) for i, pair in enumerate(PAIRS)
]


@pytest.mark.parametrize(("rounds", "mode", "algorithm"), [*QUICK, *OFTEN])
def test_what_workers_moved_was_delivered_or_is_held_back(rounds, mode, algorithm):
    every = run_local(3, partial(interrupted, algorithm=algorithm, settings=MODES[mode], rounds=rounds))
    accounts = [each for each, _ in every]
    check_conserved(accounts)
    assert any_left(accounts[0][1]) == (algorithm != Dense())
    assert all(same_bits(accounts[0][2], each[2]) for each in accounts)


def test_all_workers_have_the_same_bits_after_each_exchange():
    def run(comm):
        worker, seen = Worker(comm, outer="nesterov", optimizer=torch.optim.AdamW), []
        for _ in range(6):
            worker.train(EVERY)
            seen.append(weights_of(worker.net))
        return seen

    first, *others = run_local(3, run)
    assert all(same_bits(mine, theirs) for other in others for mine, theirs in zip(first, other, strict=True))
    assert not same_bits(first[0], first[-1])


@pytest.mark.parametrize("algorithm", [OkTopk(density=1.0, wire="fp32"), Dense()], ids=lambda a: a.name)
def test_density_one_averages_the_weights(algorithm):
    def run(comm):
        alone, worker = Worker(comm, every=100), Worker(comm, algorithm)
        alone.train(EVERY)
        worker.train(EVERY)
        return weights_of(alone.net), weights_of(worker.net)

    every = run_local(3, run)
    means = {name: torch.stack([alone[name].double() for alone, _ in every]).mean(0) for name in every[0][0]}
    assert worst_error(every[0][1], means) <= 1e-6


@on_ranks(2)
def test_an_exchange_in_every_step_is_dense_training():
    model, rank = DDP(Net()), dist.get_rank()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with redirect_stderr(io.StringIO()):
        local = LocalSteps(net, optimizer, Dense(), every=1)
    for step in range(5):
        for each, advance in ((model, plain.step), (net, local.step)):
            each.zero_grad()
            loss_of(each, rank, step).backward()
            advance()
    assert worst_error(weights_of(net), weights_of(model.module)) <= 1e-5
    local.detach()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_parts_have_every_name_once_and_none_is_empty_nor_much_too_large(sizes, data):
    names = {str(i): size for i, size in enumerate(sizes)}
    parts = split_evenly(names, data.draw(st.integers(1, len(sizes))))
    assert [name for part in parts for name in part] == list(names)
    assert all(parts)
    totals = [sum(names[name] for name in part) for part in parts]
    for i, (part, total) in enumerate(zip(parts, totals, strict=True)):
        share = sum(totals[i:]) / (len(parts) - i)  # of what the parts before have left
        assert len(part) == 1 or total - names[part[-1]] / 2 <= share


@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 0), (5, 3, 1), (4, 4, 1), (7, 2, 3)])
def test_a_round_has_every_parameter_once(every, fragments, delay):
    def run(comm):
        records = MemorySink()
        worker = Worker(comm, every=every, fragments=fragments, delay=delay, sinks=[records])
        worker.train(3 * every)
        worker.local.detach()
        return records.records

    numels = [record.numel for record in run_local(2, run)[0]]
    assert len(numels) == 3 * fragments
    total = sum(parameter.numel() for parameter in NET.parameters())
    assert all(sum(numels[i : i + fragments]) == total for i in range(0, len(numels), fragments))


@pytest.mark.parametrize("mode", [*MODES, "device"])
def test_a_resumed_run_ends_with_the_same_bits(mode):
    """Stopped after each step of a round, in flight or not."""
    settings = {"outer": "nesterov", "optimizer": torch.optim.AdamW, "feedback_decay": 0.9, **MODES.get(mode, {})}
    if mode == "device":
        settings |= {"algorithm": OkTopk(density=0.05, wire="fp32"), "fragments": 2}

    def run(comm):
        whole, states = Worker(comm, **settings), []
        whole.train(9)
        for _ in range(EVERY):
            states.append(whole.saved())
            whole.train(1)
        whole.train(7)
        for state in states:
            resumed = Worker(comm, net=OTHER, **settings)
            resumed.load(state)
            resumed.train(whole.steps - resumed.steps)
            assert same_bits(weights_of(resumed.net), weights_of(whole.net))
            assert same_bits(resumed.local.residual, whole.local.residual)

    if mode == "device":
        with device_step() as seen:
            run_local(2, run)
        assert seen.runs
    else:
        run_local(2, run)


@on_threads(3)
def test_after_a_nan_all_workers_skip_to_the_agreed_point(comm):
    worker = Worker(comm, on_nonfinite="skip")
    worker.train(2 * EVERY - 1)
    agreed, residual = worker.local.agreed, worker.local.residual
    if comm.rank == 2:
        worker.net.norm.weight.data[0] = float("inf")
    worker.train(1)
    assert worker.local.last.skipped
    assert same_bits(weights_of(worker.net), agreed)
    assert same_bits(worker.local.residual, residual)
    worker.train(EVERY)
    assert not worker.local.last.skipped


@on_threads(2)
def test_old_movements_fade(comm):
    worker, fading = Worker(comm), Worker(comm, feedback_decay=0.5)
    for each in (worker, fading):
        each.train(EVERY)
    pairs = zip(worker.local.residual.values(), fading.local.residual.values(), strict=True)
    assert all(torch.equal(0.5 * whole, faded) for whole, faded in pairs)


@on_threads(2)
def test_narrow_weights_move_by_less_than_they_can_hold(comm):
    """The agreed point is float32: means below bfloat16's resolution add up."""
    worker = Worker(comm, Dense(), net=NARROW, every=1, exclude=(), outer=tiny)
    start = worker.local.agreed
    for _ in range(8):
        with torch.no_grad():
            worker.net.weight -= 0.125
        worker.local.advance()
    (way,) = (start[name] - now for name, now in worker.local.agreed.items())
    assert worst_error({"": way}, {"": torch.full((4, 4), 8 * 0.125 * 2.0**-12)}) <= 0.1


def tiny(tensors):
    return torch.optim.SGD(tensors, lr=2.0**-12)


def test_workers_that_start_apart_or_with_other_settings_are_told():
    with pytest.raises(MismatchError, match="the weights that they start from"):
        run_local(2, lambda comm: Worker(comm, net=(NET, OTHER)[comm.rank]))
    with pytest.raises(MismatchError, match="every"):
        run_local(2, lambda comm: Worker(comm, every=4 + comm.rank))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"fragments": 5}, "fragments must be at least 1 and at most 4"),
        ({"fragments": 2, "delay": 3}, "delay must be at least 0 and at most 2"),
        ({"every": 50, "fragments": 40}, "12 parameters cannot be shared out to 40"),
        ({"outer": "nestrov"}, "Did you mean 'nesterov'"),
        ({"feedback_decay": 1.5}, "feedback_decay must be"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        run_local(1, lambda comm: Worker(comm, **settings))


@pytest.mark.slow
def test_a_rank_receives_as_much_from_many_workers_as_from_few():
    """Bytes go with (P - 1) / P, as 1 / P of each block is a rank's own. A gather's go with P - 1.

    Indices in few bits cost more in smaller blocks, which int8 has.
    """

    def received(algorithm, size):
        def run(comm):
            worker = Worker(comm, algorithm, net=SQUARE, exclude=())
            with torch.no_grad():
                worker.net.weight += torch.randn(400, 400, generator=torch.Generator().manual_seed(comm.rank))
            for _ in range(EVERY):
                worker.local.advance()
            return worker.local.last.received_bytes

        return max(run_local(size, run)) * size / (size - 1)

    for wire, growth in (("fp32", 1.02), ("int8", 1.1)):
        every = [received(OkTopk(density=0.03, wire=wire), size) for size in (4, 8, 32)]
        assert max(every) <= growth * min(every), wire
    few, many = (received(TopkA(density=0.03), size) for size in (4, 32))
    assert many >= 7 * few


def half_a_run(folder, state=None):
    """Train a part and save it, in flight, or load that; return the mean that all workers are still to get."""
    net = Net(seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with redirect_stderr(io.StringIO()):
        local = LocalSteps(net, optimizer, SPARSE, every=EVERY, fragments=2, delay=1, outer="nesterov")

    def owed():
        agreed = local.agreed
        moved = {name: (agreed[name] - now).view(-1) for name, now in weights_of(net).items()}
        return mean_of({name: residual + moved[name] for name, residual in local.residual.items()})

    if state is None:
        for step in range(4 * EVERY):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            local.step()
        save_distributed(folder, local)
        local.detach()  # which applies the exchange that was under way
        return local.agreed, owed()
    load_distributed(folder, local)
    check_same_on_all_ranks(weights_of(net))
    found = local.agreed, owed()
    local.detach()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("new", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_on_another_number_of_workers_the_mean_of_all_movements_is_conserved(worlds, tmp_path, new):
    agreed, before = worlds.run(2, half_a_run, tmp_path)[0]
    loaded, after = worlds.run(new, half_a_run, tmp_path, True)[0]
    assert same_bits(agreed, loaded)
    assert any_left(after)
    assert worst_error(after, before) <= 1e-5


def wide_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks(4)
def test_a_worker_may_be_several_ranks(kind):
    """Two workers of two ranks each. At density 1 they end where two plain workers do with the same samples."""
    from torch.distributed.device_mesh import init_device_mesh  # a second of imports
    from torch.distributed.fsdp import fully_shard

    # Names of its own: torch takes equal meshes for one, and groups of an earlier test are gone.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "ranks"))
    inner = mesh["ranks"]
    net = wide_net()
    model = DDP(net, process_group=inner.get_group()) if kind == "ddp" else fully_shard(net, mesh=inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"every": 2, "exclude": (), "group": mesh["workers"].get_group(), "on_nonfinite": "skip"}
    with redirect_stderr(io.StringIO()):
        local = LocalSteps(model, optimizer, OkTopk(density=1.0, wire="fp32"), **settings)
    plain = wide_net()
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, mesh.get_local_rank("workers"), step).backward()
        local.step()
    whole = {name: getattr(each, "full_tensor", each.clone)().detach() for name, each in net.named_parameters()}
    check_same_on_all_ranks(whole)
    assert worst_error(whole, averaged(plain, steps=4, every=2)) <= 1e-5
    assert 0 < sum(each.numel() for each in local.agreed.values()) < sum(each.numel() for each in plain.parameters())
    before = weights_in(net)
    if dist.get_rank() >= (2 if kind == "ddp" else 3):
        poisoned = next(net.parameters())
        getattr(poisoned, "_local_tensor", poisoned).data.view(-1)[-1] = float("nan")
    for _ in range(2):
        local.advance()
    assert local.last.skipped
    assert same_bits(weights_in(net), before)
    local.detach()


def weights_in(net):
    return {name: getattr(each, "_local_tensor", each).detach().clone() for name, each in net.named_parameters()}


def averaged(net, steps, every):
    """Return the weights of two workers of one rank each, averaged every so many steps."""
    nets = [net, copy.deepcopy(net)]
    for step in range(steps):
        for worker, each in enumerate(nets):
            each.zero_grad()
            loss_of(each, worker, step).backward()
            for parameter in each.parameters():
                parameter.data -= 0.1 * parameter.grad
        if step % every == every - 1:
            for pair in zip(*(each.parameters() for each in nets), strict=True):
                mean = (pair[0].data + pair[1].data) / 2
                for parameter in pair:
                    parameter.data.copy_(mean)
    return weights_of(net)


@on_ranks(2)
def test_a_model_that_averages_in_each_step_is_refused():
    model = DDP(Net())
    said = error_of(partial(LocalSteps, model, torch.optim.SGD(model.parameters()), every=2))
    check_words(said, "SettingError", "module without DDP", "group=")


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_killed_worker_ends_the_others():
    with Mortals(2, every=3) as mortals:
        mortals.wait_for_step(1, 10)
        mortals.send_signal(1, signal.SIGKILL)
        check_words(mortals.wait_for_word(0, EXCHANGE_S + 40), "PeerError")
        assert mortals.wait_for_exit(0, EXCHANGE_S + 20) == ERROR


def test_a_scaler_that_skips_a_step_on_one_worker_leaves_all_in_step():
    def run(comm):
        worker, scaler = Worker(comm), torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2 * EVERY):
            worker.optimizer.zero_grad()
            loss = loss_of(worker.net, comm.rank, step)
            scaler.scale(loss * (float("inf") if (comm.rank, step) == (1, 2) else 1)).backward()
            scaler.step(worker.optimizer)
            scaler.update()
            worker.local.advance()
        return weights_of(worker.net)

    first, second = run_local(2, run)
    assert same_bits(first, second)
    assert not any(each.isnan().any() for each in first.values())


def test_an_error_is_the_class_that_scripts_catch():
    with pytest.raises(NonFiniteError, match=r"exchange 0 of the movements: rank 0.*skip"):
        run_local(1, poisoned_exchange)


def poisoned_exchange(comm):
    worker = Worker(comm, every=1)
    worker.net.exit.weight.data[0, 0] = float("nan")
    worker.local.advance()
