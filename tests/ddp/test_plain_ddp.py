"""Everything that DDP users do: at density 1 it gives what plain DDP gives, whatever is done."""

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import OkTopk, OkTopkPaper
from tests.cases import algorithms
from tests.ddp.accounts import Audit, any_left, distance, grads_of, mean_of, same_bits, weights_of, worst_error
from tests.ddp.harness import EXCHANGE_TIMEOUT_S, attach, check_words, error_of, exchange_threads, num_buckets, on_ranks
from tests.ddp.nets import BRAIN, DOUBLE, HALF, SINGLE, Chain, Net, batch, descend_, frozen, loss_of, step_

RELATIVE = 1e-6  # of the largest gradient of the same tensor

BRANCH = {  # whether a rank uses the branch of the net at a step
    "always": lambda *_: True,
    "never": lambda *_: False,
    "on one rank": lambda rank, step: rank == step % 2,
    "now and then": lambda rank, step: step % 4 != 3 and (step + rank) % 3 != 0,  # every fourth step on no rank
}


def checkpointed(model, rank, step):
    x, y = batch(rank, step)
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    nn.functional.mse_loss(out, y).backward()


def tied():
    net = Net()
    net.body[2].weight = net.body[0].weight
    return net


class Scalar(Net):
    """A parameter without dimensions, and one without elements."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x, branch=True):
        return super().forward(x, branch) * self.gain + self.nothing.sum()


def ignored():
    net = Net()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["body.0.weight", "branch.bias"])
    return net


def channels_last():
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(512, 4)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def classify(model, rank, step):
    images = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    images = images.to(memory_format=torch.channels_last)
    nn.functional.cross_entropy(model(images), torch.arange(4)).backward()


class Towers(nn.Module):
    """Two nets without a common parameter, each with an output of its own."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(Net(seed=seed) for seed in range(2))

    def forward(self, x):
        return [net(x) for net in self.nets]


def backward_by_towers(model, rank, step):
    for out in reversed(model(batch(rank, step)[0])):
        out.square().mean().backward()


@dataclass(frozen=True)
class Habit:
    make: Callable[[], nn.Module] = Net
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    algorithm: Any = None  # Ok-Topk at density 1
    steps: int = 5
    zero_grad: bool = True
    validates: bool = False  # a forward pass without backward
    unsynced: int = 0  # backward passes under no_sync() before the exchanged one
    branch_unsynced: str = "always"
    forwards: int = 1
    branch: str = "always"
    backward: Callable[[DDP, int, int], None] | None = None

    def take_step(self, model, step):
        rank = dist.get_rank()
        if self.zero_grad:
            model.zero_grad(set_to_none=step % 2 == 0)
        if self.validates:
            with torch.no_grad():
                loss_of(model, rank, 200 + step)
        unsynced = 0 if step == 0 and model.static_graph else self.unsynced  # DDP learns the graph in an exchange
        with model.no_sync():
            for micro in range(unsynced):
                loss_of(model, rank, 100 * step + micro, branch=BRANCH[self.branch_unsynced](rank, step)).backward()
        if self.backward is None:
            branch = BRANCH[self.branch](rank, step)
            sum(loss_of(model, rank, step + 100 * i, branch=branch) for i in range(self.forwards)).backward()
        else:
            self.backward(model, rank, step)


UNUSED, STATIC, VIEW = ({name: True} for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"))
EXACT = {name: each for name, each in algorithms(1.0).items() if name == "dense" or name.endswith("fp32")}
HABITS = {
    "no_sync": Habit(unsynced=3),
    "no_sync, bucket view": Habit(unsynced=3, options=VIEW),
    "no_sync, a branch that only it uses": Habit(unsynced=1, branch="never", options=UNUSED),
    "no_sync, a branch of one rank": Habit(unsynced=1, branch_unsynced="on one rank", branch="never", options=UNUSED),
    "several forwards": Habit(forwards=2),
    "forward without backward": Habit(validates=True),
    "static_graph, a branch that nobody uses": Habit(branch="never", options=STATIC),
    "static_graph, bucket view": Habit(options=STATIC | VIEW),
    "static_graph, no_sync": Habit(unsynced=3, options=STATIC),
    "activation checkpoints": Habit(backward=checkpointed, options=STATIC),
    "gradients never zeroed": Habit(zero_grad=False),
    "frozen": Habit(frozen),
    "tied": Habit(tied),
    "scalar and empty": Habit(Scalar),
    "ignored by DDP": Habit(ignored),
    "channels_last": Habit(channels_last, backward=classify),
    "channels_last, bucket view": Habit(channels_last, VIEW, backward=classify),
    "two losses, a backward pass each": Habit(Towers, backward=backward_by_towers),
    "default exclusion": Habit(settings={"exclude": oktopk.small_or_vector}),
    "dense phase, bucket view": Habit(settings={"dense_steps": 3}, options=VIEW),
    "large buckets": Habit(partial(Net, 200), options={"bucket_cap_mb": 0.1}),
    "one bucket": Habit(options={"bucket_cap_mb": 25}),
    **{name: Habit(options=UNUSED, algorithm=each, branch="now and then") for name, each in EXACT.items()},
}
ON_OTHER_SIZES = {
    "many steps": Habit(steps=15),
    "wide": Habit(partial(Net, 600), options={"bucket_cap_mb": 1}, steps=2),
    "unused": Habit(options=UNUSED, branch="now and then", steps=12),
    "patterns": Habit(settings={"dense_steps": 4, "exclude": ("body.*", lambda _, p: p.dim() == 1)}, steps=8),
}


@on_ranks(2, 1, 3)
def test_gradients_are_plain_ddps():
    for name, habit in (HABITS if dist.get_world_size() == 2 else ON_OTHER_SIZES).items():
        plain, ours = (DDP(habit.make(), **{"bucket_cap_mb": 0.005, **habit.options}) for _ in range(2))
        attached, buckets = attach(ours, habit.algorithm, **habit.settings), num_buckets(ours)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.01, momentum=0.9)
        for step in range(habit.steps):
            assert distance(ours, plain, partial(habit.take_step, step=step)) <= RELATIVE, (name, step)
            optimizer.step()
        attached.detach()
        assert not any_left(attached.residual), name
        if name == "many steps":
            assert num_buckets(ours) > buckets, "DDP was to rebuild its buckets in this run"
        if name in ("large buckets", "one bucket"):
            assert (num_buckets(ours) > 1) == (name == "large buckets")


ROUNDING = {SINGLE: RELATIVE, DOUBLE: 1e-6, BRAIN: 2.0**-7, HALF: 2.0**-10}
DTYPES = [(DOUBLE, DOUBLE), (BRAIN, BRAIN), (HALF, HALF), (SINGLE, BRAIN), (DOUBLE, HALF)]


@pytest.mark.parametrize(("first", "second"), DTYPES, ids=str)
@on_ranks(2)
def test_any_floating_dtype_and_several_in_one_model(first, second):
    """Sparse, dense, and some parameters dense: the float64 mean of the ranks' own gradients."""
    for settings in ({}, {"dense_steps": 9}, {"exclude": "*bias"}):
        net = Chain((8, 64, 40, 4), (first, second, first))
        local, model = copy.deepcopy(net), DDP(net, bucket_cap_mb=0.002)
        attach(model, **settings)
        for step in range(4):
            x, y = batch(dist.get_rank(), step, dtype=DOUBLE)
            for each in (local, model):
                each.zero_grad()
                nn.functional.mse_loss(each(x), y).backward()
            came, mean = grads_of(net), mean_of(grads_of(local))
            for name, parameter in net.named_parameters():
                assert came[name].dtype == parameter.dtype
                error = worst_error({name: came[name]}, {name: mean[name]})
                assert error <= ROUNDING[parameter.dtype], (settings, name)


@on_ranks(2)
def test_a_channels_last_net_loses_nothing():
    model = DDP(channels_last(), bucket_cap_mb=0.01, broadcast_buffers=False)
    audit = Audit(model, attach(model, OkTopk(density=0.05)))
    for step in range(10):
        audit.step(partial(classify, rank=dist.get_rank(), step=step))
        assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
    audit.check()


def train_on(group, exchange, steps, attachments=1):
    """Train attached and plain models on a group, attaching anew several times."""
    plain, ours = DDP(Net(), process_group=group), DDP(Net(), process_group=group)
    for _ in range(attachments):
        attached = attach(ours, group=exchange)
        for step in range(steps):
            assert distance(ours, plain, partial(step_, step=step)) <= RELATIVE
        assert attached.step == steps
        attached.detach()
    dist.barrier(exchange)  # it is the user's, and still there


@on_ranks(4)
def test_a_subgroup_trains_while_others_do_something_else():
    """Ranks 1 and 3 train; 0 and 2 do something else, at their own pace. Rank 1 is in a group that 3 is not in."""
    dist.new_group([0, 1])
    others, group, exchange = dist.new_group([0, 2]), dist.new_group([1, 3]), dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        for _ in range(7):
            dist.all_reduce(torch.ones(1000), group=others)
    else:  # attach() cannot make a group without the others
        raised = error_of(attach, DDP(Net(), process_group=group))
        check_words(raised, "SettingError: ", "dist.new_group([1, 3])", "group=")
        train_on(group, exchange, 4, attachments=3)


@on_ranks(4, 2)
def test_both_halves_train_on_groups_of_their_own_and_not_for_as_long():
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [list(range(half, size, 2)) for half in (0, 1)]
    groups = [(dist.new_group(ranks), dist.new_group(ranks)) for ranks in halves]
    train_on(*groups[rank % 2], 3 + rank % 2)
    train_on(dist.group.WORLD, dist.new_group(), 2)


@on_ranks(2)
def test_two_attached_models_do_not_disturb_each_other():
    """Trained in turns, with every third pair of steps in one backward(), they end as when each is trained alone."""
    ends, steps = [], range(6)
    for turns in ([[(m, step)] for m in (0, 1) for step in steps], [[(0, step), (1, step)] for step in steps]):
        models = [DDP(Net(seed=seed), bucket_cap_mb=0.01) for seed in (1, 2)]
        algorithms = OkTopk(density=0.02), OkTopkPaper(density=0.1)
        for model, algorithm in zip(models, algorithms, strict=True):
            attach(model, algorithm)
        for turn in turns:
            together = turn[0][1] % 3 == 2
            for backward in [turn] if together else [[each] for each in turn]:
                for m, _ in backward:
                    models[m].zero_grad()
                sum(loss_of(models[m], dist.get_rank(), 10 * m + step) for m, step in backward).backward()
                for m, _ in backward:
                    descend_(models[m])
        ends.append([weights_of(model.module) for model in models])
    assert all(same_bits(*pair) for pair in zip(*ends, strict=True))


def trained_unevenly(attaching, unused, steps_of_rank):
    model = DDP(Net(), bucket_cap_mb=0.01, find_unused_parameters=unused)
    attached = attach(model) if attaching else None
    with Join([model]):
        for step in range(steps_of_rank[dist.get_rank()]):
            step_(model, step, branch=not unused or (step + dist.get_rank()) % 3 == 0)
            descend_(model)
    if attached is not None:
        assert not any_left(attached.residual)
        assert attached.step == max(steps_of_rank)
    return weights_of(model.module)


@pytest.mark.parametrize(("steps_of_rank", "unused"), [((3, 6), False), ((6, 3), True)])
@on_ranks(2)
def test_uneven_inputs_with_join_train_as_under_plain_ddp(steps_of_rank, unused):
    plain, ours = (trained_unevenly(attaching, unused, steps_of_rank) for attaching in (False, True))
    assert worst_error(ours, plain) <= 1e-5


@pytest.mark.parametrize("attaching", [False, True])
@on_ranks(2)
def test_join_that_divides_by_the_ranks_that_are_left_is_refused_on_all_ranks(attaching):
    """DDP hands a hook nothing that says how many have joined."""
    model = DDP(Net())
    before = weights_of(model.module)
    if attaching:
        attach(model)

    def train():
        with Join([model], divide_by_initial_world_size=False):
            for step in range(2 + 2 * dist.get_rank()):
                step_(model, step)
                descend_(model)

    refused = "SettingError: Join(divide_by_initial_world_size=False) is not supported: the mean is over all ranks"
    assert error_of(train) == (refused if attaching else "")
    assert same_bits(weights_of(model.module), before) == attaching


@pytest.mark.parametrize(("clip", "patience_s"), [(None, EXCHANGE_TIMEOUT_S), (1.0, 0.3)])
@on_ranks(2)
def test_buckets_are_exchanged_while_backward_runs_but_a_clip_waits_for_the_whole_gradient(clip, patience_s):
    """Backward goes on only when the first bucket has been exchanged, but for DDP's first step, of one bucket."""
    reduced, seen = threading.Event(), []

    class Telling(OkTopk):
        def reduce_step(self, *args):
            result = super().reduce_step(*args)
            reduced.set()
            return result

    def wait(module, inputs, output):
        output.register_hook(lambda _: seen.append(reduced.wait(patience_s if seen else 0.0)))

    net = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    net[0].register_forward_hook(wait)
    model = DDP(net, bucket_cap_mb=0.0001)
    attach(model, Telling(density=0.5), clip=clip)
    for step in range(3):
        reduced.clear()
        loss_of(model, dist.get_rank(), step).backward()
    assert seen[1:] == [clip is None] * 2


@on_ranks(2)
def test_attaching_and_detaching_between_steps_of_a_training_that_runs():
    """Train plainly, attached at density 1, plainly, attached sparsely, and plainly again: three steps each."""
    plain, ours = DDP(Net(), bucket_cap_mb=0.005), DDP(Net(), bucket_cap_mb=0.005)
    handles = []
    for step in range(15):
        if step in (3, 9):
            handles.append(attach(ours, OkTopk(density=1.0 if step == 3 else 0.05)))
        if step in (6, 12):
            handles[-1].detach()
            handles[-1].detach()  # once is enough, twice does no harm
            before = handles[-1].residual
        error = distance(ours, plain, partial(step_, step=step))
        assert error > 1e-3 if step in (9, 10, 11) else error <= RELATIVE, "sparse gradients differ, and no others"
        assert [handle.active for handle in handles] == [[], [True], [False], [False, True], [False] * 2][step // 3]
        if step in (6, 12):
            assert same_bits(handles[-1].residual, before)
            assert handles[-1].step == 3
    assert exchange_threads() == []


def freeze(attaching, before, unfreezes, options):
    """Return each step's gradients, or the start of its error, if body.0 changes before or between steps."""
    model = Net()
    model.body[0].requires_grad_(not unfreezes)
    ddp = DDP(model, **options)
    if before:
        model.body[0].requires_grad_(unfreezes)
    if attaching:
        attach(ddp, dense_steps=1)
    steps = []
    for step in range(4):
        if step == 2:
            model.body[0].requires_grad_(unfreezes)
        raised = error_of(step_, ddp, step)
        steps.append(raised.split(".")[0] or grads_of(model))
        if raised:
            break
    return steps


@on_ranks(2)
def test_freezing_after_ddp_was_made_is_to_us_what_it_is_to_ddp():
    """DDP reduces what required gradients when it was made, and so do we; without one of them it ends, and so do we."""
    for case in itertools.product((True, False), (True, False), ({}, UNUSED)):
        for theirs, ours in zip(freeze(False, *case), freeze(True, *case), strict=True):
            assert ours == theirs if isinstance(theirs, str) else worst_error(ours, theirs) <= RELATIVE, case
