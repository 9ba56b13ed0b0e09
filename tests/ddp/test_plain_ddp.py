"""Everything that DDP users do: at density 1 it gives what plain DDP gives, whatever is done."""

from __future__ import annotations

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
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import Dense, GaussianK, GTopk, OkTopk, OkTopkPaper, TopkA, TopkDSA
from tests.ddp.harness import (
    EXCHANGE_TIMEOUT_S,
    Books,
    Net,
    Raised,
    Worlds,
    attach,
    batch,
    check_balance,
    descend_,
    distance,
    error_of,
    exchange_threads,
    grads_of,
    loss_of,
    num_buckets,
    relative_error,
    same_bits,
    step_,
    weights_of,
)

pytestmark = pytest.mark.processes

RELATIVE = 1e-6  # of the largest gradient of the same tensor


def once(model: DDP, rank: int, step: int) -> None:
    """The usual step."""
    loss_of(model, rank, step).backward()


def accumulated(model: DDP, rank: int, step: int) -> None:
    with model.no_sync():
        for micro in range(3):
            loss_of(model, rank, 100 * step + micro).backward()
    loss_of(model, rank, step).backward()


def accumulated_after_the_first_step(model: DDP, rank: int, step: int) -> None:
    """DDP learns a static graph in its first step, which cannot be one without an exchange."""
    (accumulated if step else once)(model, rank, step)


def branch_while_accumulating(model: DDP, rank: int, step: int, everywhere: bool) -> None:
    """The branch has a gradient, on one rank or on all, though the exchanged backward pass does not reach it."""
    with model.no_sync():
        loss_of(model, rank, 100 * step, branch=everywhere or rank == step % 2).backward()
    loss_of(model, rank, step, branch=False).backward()


def branch_now_and_then(model: DDP, rank: int, step: int) -> None:
    """All ranks use the branch, or some, or (every fourth step) none."""
    loss_of(model, rank, step, branch=step % 4 != 3 and (step + rank) % 3 != 0).backward()


def several_forwards(model: DDP, rank: int, step: int) -> None:
    (loss_of(model, rank, step) + loss_of(model, rank, 100 + step)).backward()


def forward_without_backward(model: DDP, rank: int, step: int) -> None:
    """As validation between steps."""
    with torch.no_grad():
        loss_of(model, rank, 200 + step)
    once(model, rank, step)


def without_the_branch(model: DDP, rank: int, step: int) -> None:
    loss_of(model, rank, step, branch=False).backward()


def checkpointed(model: DDP, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    nn.functional.mse_loss(out, y).backward()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.entry.requires_grad_(False)
        self.body[2].weight.requires_grad_(False)


class Tied(Net):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body[2].weight = self.body[0].weight


class Scalar(Net):
    """A parameter without dimensions, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        return super().forward(x, branch) * self.gain + self.nothing.sum()


class Ignoring(Net):
    """A parameter that DDP was told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        DDP._set_params_and_buffers_to_ignore_for_model(self, ["body.0.weight", "branch.bias"])


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(512, 4)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def classify(model: nn.Module, rank: int, step: int) -> None:
    images = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    images = images.to(memory_format=torch.channels_last)
    nn.functional.cross_entropy(model(images), torch.arange(4)).backward()


def is_vector(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 1


@dataclass(frozen=True)
class Habit:
    """What a user does with DDP."""

    make: Callable[[], nn.Module] = Net
    step: Callable[[DDP, int, int], None] = once
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    algorithm: Any = None  # Ok-Topk at density 1
    steps: int = 5
    zero_grad: bool = True


UNUSED, STATIC, VIEW = ({name: True} for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"))
ALGORITHMS = {
    "paper": OkTopkPaper(density=1.0),
    "scaled": OkTopk(density=1.0, ranking="scaled"),
    "paper scaled": OkTopkPaper(density=1.0, ranking="scaled"),
    "topka": TopkA(density=1.0),
    "topkdsa": TopkDSA(density=1.0),
    "gtopk": GTopk(density=1.0),
    "gaussiank": GaussianK(density=1.0),
    "dense": Dense(),
}
HABITS = {
    "no_sync": Habit(step=accumulated),
    "no_sync, bucket view": Habit(step=accumulated, options=VIEW),
    "no_sync, a branch that only it uses": Habit(
        step=partial(branch_while_accumulating, everywhere=True), options=UNUSED
    ),
    "no_sync, a branch of one rank": Habit(step=partial(branch_while_accumulating, everywhere=False), options=UNUSED),
    "several forwards": Habit(step=several_forwards),
    "forward without backward": Habit(step=forward_without_backward),
    "static_graph, a branch that nobody uses": Habit(step=without_the_branch, options=STATIC),
    "static_graph, bucket view": Habit(options=STATIC | VIEW),
    "static_graph, no_sync": Habit(step=accumulated_after_the_first_step, options=STATIC),
    "activation checkpoints": Habit(step=checkpointed, options=STATIC),
    "gradients never zeroed": Habit(zero_grad=False),
    "frozen": Habit(Frozen),
    "tied": Habit(Tied),
    "scalar and empty": Habit(Scalar),
    "ignored by DDP": Habit(Ignoring),
    "channels_last": Habit(ChannelsLast, classify),
    "channels_last, bucket view": Habit(ChannelsLast, classify, VIEW),
    "default exclusion": Habit(settings={"exclude": oktopk.small_or_vector}),
    "dense phase, bucket view": Habit(settings={"dense_steps": 3}, options=VIEW),
    "large buckets": Habit(partial(Net, 200), options={"bucket_cap_mb": 0.1}),
    "one bucket": Habit(options={"bucket_cap_mb": 25}),
    **{name: Habit(step=branch_now_and_then, options=UNUSED, algorithm=each) for name, each in ALGORITHMS.items()},
}
ON_OTHER_SIZES = {
    "fifty steps": Habit(steps=50),
    "unused": Habit(step=branch_now_and_then, options=UNUSED, steps=12),
    "dense phase, patterns": Habit(settings={"dense_steps": 4, "exclude": ("body.*", is_vector)}, steps=8),
}
LONG = {
    name: Habit(
        partial(Net, 320),
        branch_now_and_then if i % 2 else once,
        {"find_unused_parameters": i % 2 == 1, "bucket_cap_mb": (0.1, 1, 25)[i % 3]},
        algorithm=algorithm,
        steps=50,
    )
    for i, (name, algorithm) in enumerate({"bounded": None, **ALGORITHMS}.items())
}


def compare(habit: Habit) -> tuple[list[float], bool, tuple[int, int]]:
    """Return each step's distance from plain DDP, whether anything is held back, and DDP's buckets at start and end."""
    rank = dist.get_rank()
    plain, ours = (DDP(habit.make(), **{"bucket_cap_mb": 0.005, **habit.options}) for _ in range(2))
    attached, buckets = attach(ours, habit.algorithm, **habit.settings), num_buckets(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01, momentum=0.9)
    errors = []

    def backward(model: DDP) -> None:
        if habit.zero_grad:
            model.zero_grad(set_to_none=len(errors) % 2 == 0)
        habit.step(model, rank, len(errors))

    for _ in range(habit.steps):
        errors.append(distance(ours, plain, backward))
        optimizer.step()
    attached.detach()
    held = any(bool(tensor.any()) for tensor in attached.residual.values())
    return errors, held, (buckets, num_buckets(ours))


@pytest.mark.parametrize(
    ("size", "habits"),
    [
        (2, HABITS),
        (1, ON_OTHER_SIZES),
        (3, ON_OTHER_SIZES),
        *(pytest.param(size, LONG, marks=pytest.mark.long) for size in (1, 2, 3)),
    ],
)
def test_gradients_are_plain_ddps(worlds: Worlds, size: int, habits: dict[str, Habit]) -> None:
    for name, by_rank in worlds.run_all(size, compare, {name: (habit,) for name, habit in habits.items()}).items():
        for errors, held, (before, after) in by_rank:
            assert max(errors) <= RELATIVE, (name, errors)
            assert not held, name
            if name == "fifty steps":
                assert after > before, "DDP was to rebuild its buckets in this run"
            if name in ("large buckets", "one bucket"):
                assert (after > 1) == (name == "large buckets")


class TwoDtypes(nn.Module):
    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 64).to(first)
        self.second = nn.Linear(64, 40).to(second)
        self.third = nn.Linear(40, 4).to(first)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


def mean_gradients(first: torch.dtype, second: torch.dtype, settings: dict[str, Any]) -> dict[str, float]:
    """Return, by parameter, how far the gradients were from the float64 mean of the ranks' own, at worst."""
    rank, net = dist.get_rank(), TwoDtypes(first, second)
    local, model = copy.deepcopy(net), DDP(net, bucket_cap_mb=0.002)
    attached, worst = attach(model, **settings), dict.fromkeys(weights_of(net), 0.0)
    for step in range(4):
        x, y = batch(rank, step, dtype=torch.float64)
        for each in (local, model):
            each.zero_grad()
            nn.functional.mse_loss(each(x), y).backward()
        for name, parameter in local.named_parameters():
            mean = parameter.grad.double()
            dist.all_reduce(mean)
            came = net.get_parameter(name).grad
            assert came.dtype == parameter.dtype
            worst[name] = max(worst[name], relative_error(came, mean / dist.get_world_size()))
    attached.detach()
    return worst


SPARSE, PHASE, MIXED = {}, {"dense_steps": 9}, {"exclude": "*bias"}
SINGLE, DOUBLE, BRAIN, HALF = torch.float32, torch.float64, torch.bfloat16, torch.float16
ROUNDING = {SINGLE: RELATIVE, DOUBLE: 1e-6, BRAIN: 2.0**-7, HALF: 2.0**-10}
DTYPES = {
    f"{first} {second} {settings}": (first, second, settings)
    for first, second in ((DOUBLE, DOUBLE), (BRAIN, BRAIN), (HALF, HALF), (SINGLE, BRAIN), (DOUBLE, HALF))
    for settings in ((SPARSE, PHASE, MIXED) if first != second else (SPARSE, PHASE))
}


def test_any_floating_dtype_and_several_in_one_model(worlds: Worlds) -> None:
    for case, by_rank in worlds.run_all(2, mean_gradients, DTYPES).items():
        first, second, _ = DTYPES[case]
        for name, error in (pair for worst in by_rank for pair in worst.items()):
            assert error <= ROUNDING[second if name.startswith("second") else first], (case, name)


def channels_last_books() -> Books:
    rank, net = dist.get_rank(), ChannelsLast()
    local, model, books = copy.deepcopy(net), DDP(net, bucket_cap_mb=0.01, broadcast_buffers=False), Books(net)
    attached = attach(model, OkTopk(density=0.05))
    for step in range(10):
        for each in (local, model):
            each.zero_grad()
            classify(each, rank, step)
        assert all(parameter.grad.stride() == parameter.stride() for parameter in net.parameters())
        books.enter_(net, local)
    attached.detach()
    books.residual = attached.residual
    return books


def test_a_channels_last_net_loses_nothing(worlds: Worlds) -> None:
    check_balance(worlds.run(2, channels_last_books))


def train_on(group: Any, exchange: Any, number: int, steps: int, attachments: int = 1) -> list[float]:
    """Train attached and plain models on a group, attaching anew several times; return the differences."""
    plain, ours = DDP(Net(), process_group=group), DDP(Net(), process_group=group)
    errors = []

    def backward(model: DDP) -> None:
        model.zero_grad()
        loss_of(model, number, len(errors)).backward()

    for _ in range(attachments):
        attached = attach(ours, group=exchange)
        errors += [distance(ours, plain, backward) for _ in range(steps)]
        attached.detach()
    if exchange is not None:
        dist.barrier(exchange)  # it is the user's, and still there
    return errors


def on_a_subgroup() -> tuple[list[float], Raised | None]:
    """Ranks 1 and 3 train; 0 and 2 do something else, at their own pace. Rank 1 is in a group that 3 is not in."""
    rank = dist.get_rank()
    dist.new_group([0, 1])
    others, group, exchange = dist.new_group([0, 2]), dist.new_group([1, 3]), dist.new_group([1, 3])
    if rank in (0, 2):
        for _ in range(7):
            dist.all_reduce(torch.ones(1000), group=others)
        return [], None
    raised = error_of(lambda: attach(DDP(Net(), process_group=group)))
    return train_on(group, exchange, rank, 4, attachments=3), raised


def test_a_subgroup_trains_while_others_do_something_else(worlds: Worlds) -> None:
    by_rank = worlds.run(4, on_a_subgroup)
    assert [len(errors) for errors, _ in by_rank] == [0, 12, 0, 12]
    for errors, raised in (by_rank[1], by_rank[3]):
        assert max(errors) <= RELATIVE
        assert raised is not None, "attach() cannot make a group without the others"
        assert raised.kind == "SettingError"
        assert "dist.new_group([1, 3])" in raised.message
        assert "group=" in raised.message


def on_two_subgroups() -> list[float]:
    """Both halves train, each its own model, and not for as long."""
    rank = dist.get_rank()
    groups = [(dist.new_group(ranks), dist.new_group(ranks)) for ranks in ([0, 2], [1, 3])]
    return train_on(*groups[rank % 2], rank, 3 + rank % 2)


def with_a_group_of_ones_own() -> list[float]:
    return train_on(dist.group.WORLD, dist.new_group(), dist.get_rank(), 2)


@pytest.mark.parametrize(("size", "train"), [(4, on_two_subgroups), (2, with_a_group_of_ones_own)])
def test_other_groups(worlds: Worlds, size: int, train: Callable[[], list[float]]) -> None:
    assert max(error for errors in worlds.run(size, train) for error in errors) <= RELATIVE


def two_models() -> tuple[bool, bool]:
    """Return whether each of two models, trained in turns, ended as when it is trained alone."""
    rank, ends = dist.get_rank(), []
    algorithms = OkTopk(density=0.02), OkTopkPaper(density=0.1)
    for alone in (True, False):
        models = [DDP(Net(seed=seed), bucket_cap_mb=0.01) for seed in (1, 2)]
        handles = [attach(model, algorithm) for model, algorithm in zip(models, algorithms, strict=True)]
        apart = [[(0, step)] for step in range(6)] + [[(1, step)] for step in range(6)]
        in_turns = [[(0, step), (1, step)] for step in range(6)]  # every third pair in one backward
        for pair in apart if alone else in_turns:
            for backward in [pair] if pair[0][1] % 3 == 2 else [[each] for each in pair]:
                for m, _ in backward:
                    models[m].zero_grad()
                torch.stack([loss_of(models[m], rank, 10 * m + step) for m, step in backward]).sum().backward()
                for m, _ in backward:
                    descend_(models[m])
        ends.append([weights_of(model.module) for model in models])
        for handle in handles:
            handle.detach()
    return tuple(same_bits(a, b) for a, b in zip(*ends, strict=True))  # type: ignore[return-value]


def test_two_attached_models_do_not_disturb_each_other(worlds: Worlds) -> None:
    assert worlds.run(2, two_models) == [(True, True)] * 2


def uneven(attaching: bool, unused: bool, steps_of_rank: tuple[int, ...]) -> tuple[dict[str, Tensor], bool, int]:
    """Return the weights at the end, whether anything is still held back, and the number of exchanges."""
    rank = dist.get_rank()
    model = DDP(Net(), bucket_cap_mb=0.01, find_unused_parameters=unused)
    attached = attach(model) if attaching else None
    with Join([model]):
        for step in range(steps_of_rank[rank]):
            step_(model, step, branch=not unused or (step + rank) % 3 == 0)
            descend_(model)
    if attached is None:
        return weights_of(model.module), False, 0
    attached.detach()
    return weights_of(model.module), any(bool(each.any()) for each in attached.residual.values()), attached.step


@pytest.mark.parametrize(("steps_of_rank", "unused"), [((3, 6), False), ((6, 3), True)])
def test_uneven_inputs_with_join_train_as_under_plain_ddp(
    worlds: Worlds, steps_of_rank: tuple[int, ...], unused: bool
) -> None:
    plain, ours = (worlds.run(2, uneven, attaching, unused, steps_of_rank) for attaching in (False, True))
    for (theirs, _, _), (weights, held, steps) in zip(plain, ours, strict=True):
        assert all(relative_error(weights[name], theirs[name]) <= 1e-5 for name in weights)
        assert not held
        assert steps == max(steps_of_rank)


def join_dividing_by_the_rest(attaching: bool) -> tuple[Raised | None, bool]:
    """Return what is raised, and whether it left the weights alone."""
    model = DDP(Net())
    attached, before = attach(model) if attaching else None, weights_of(model.module)

    def train() -> None:
        with Join([model], divide_by_initial_world_size=False):
            for step in range(2 + 2 * dist.get_rank()):
                step_(model, step)
                descend_(model)

    raised = error_of(train)
    if attached is not None:
        attached.detach()
    return raised, same_bits(weights_of(model.module), before)


def test_join_that_divides_by_the_ranks_that_are_left_is_refused_on_all_ranks(worlds: Worlds) -> None:
    """DDP hands a hook nothing that says how many have joined."""
    assert worlds.run(2, join_dividing_by_the_rest, False) == [(None, False)] * 2
    message = "Join(divide_by_initial_world_size=False) is not supported: the mean is over all ranks"
    assert worlds.run(2, join_dividing_by_the_rest, True) == [(Raised("SettingError", message), True)] * 2


ONE_REDUCED = threading.Event()


class Telling(OkTopk):
    """Ok-Topk that says when a reduction is over, that is when all ranks have sent and received."""

    def reduce_step(self, acc: Tensor, state: Any, comm: Any, inputs: Any) -> Any:
        reduced = super().reduce_step(acc, state, comm, inputs)
        ONE_REDUCED.set()
        return reduced


class Waiting(torch.autograd.Function):
    """Lets backward wait, amid of it, until a reduction is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, seen: list[bool]) -> Tensor:
        ctx.seconds, ctx.seen = seconds, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.seen.append(ONE_REDUCED.wait(ctx.seconds))
        return grad, None, None


class HalfWay(nn.Module):
    """Two layers, of which the first has its gradient only after a wait between them."""

    def __init__(self, seconds: float, seen: list[bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)
        self.seconds, self.seen = seconds, seen

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Waiting.apply(self.first(x), self.seconds, self.seen))  # type: ignore[no-any-return]


def reduced_amid_backward(clip: float | None, seconds: float, steps: int) -> list[bool]:
    """Return, for each step but the first, whether a reduction was over before backward had its last gradients.

    In the first step DDP has one bucket for all of so small a net; after it the buckets are those that were asked for.
    """
    seen: list[bool] = []
    net = HalfWay(0.0, seen)
    model = DDP(net, bucket_cap_mb=0.0001)
    attached = attach(model, Telling(density=0.5), clip=clip)
    for step in range(steps):
        ONE_REDUCED.clear()
        net.seconds = seconds if step else 0.0
        loss_of(model, dist.get_rank(), step).backward()
    attached.detach()
    return seen[1:]


def test_buckets_are_exchanged_while_backward_still_runs(worlds: Worlds) -> None:
    """Backward goes on only when the first bucket has been exchanged: an order of events, on a machine however busy."""
    assert worlds.run(2, reduced_amid_backward, None, EXCHANGE_TIMEOUT_S, 3) == [[True] * 2] * 2


def test_a_clip_waits_for_the_whole_gradient_before_it_exchanges(worlds: Worlds) -> None:
    """The same wait sees nothing here, which shows that it can."""
    assert worlds.run(2, reduced_amid_backward, 1.0, 0.3, 2) == [[False]] * 2


def attach_and_detach() -> dict[str, Any]:
    """Train plainly, attached at density 1, plainly, attached sparsely, and plainly again: three steps each."""
    plain, ours = DDP(Net(), bucket_cap_mb=0.005), DDP(Net(), bucket_cap_mb=0.005)
    handles: list[oktopk.Attached] = []
    seen: dict[str, list[Any]] = {"errors": [], "active": [], "kept": []}
    for step in range(15):
        if step in (3, 9):
            handles.append(attach(ours, OkTopk(density=1.0 if step == 3 else 0.05)))
        if step in (6, 12):
            handles[-1].detach()
            handles[-1].detach()  # once is enough, twice does no harm
            before = handles[-1].residual
        seen["errors"].append(distance(ours, plain, lambda model, step=step: step_(model, step)))
        seen["active"].append([handle.active for handle in handles])
        if step in (6, 12):
            seen["kept"].append((same_bits(handles[-1].residual, before), handles[-1].step))
    return seen | {"threads": exchange_threads()}


def test_attaching_and_detaching_between_steps_of_a_training_that_runs(worlds: Worlds) -> None:
    for seen in worlds.run(2, attach_and_detach):
        assert max(seen["errors"][:9] + seen["errors"][12:]) <= RELATIVE
        assert min(seen["errors"][9:12]) > 1e-3, "there was to be something sparse"
        assert seen["active"][::3] == [[], [True], [False], [False, True], [False, False]]
        assert seen["kept"] == [(True, 3)] * 2
        assert seen["threads"] == []


def freeze(attaching: bool, before: bool, unfreezes: bool, options: dict[str, Any]) -> list[Any]:
    """Return the gradients of every step, and how the training ended, if body.0 changes before or between steps."""
    model = Net()
    model.body[0].requires_grad_(not unfreezes)
    ddp = DDP(model, **options)
    if before:
        model.body[0].requires_grad_(unfreezes)
    attached = attach(ddp, dense_steps=1) if attaching else None
    steps: list[Any] = []
    for step in range(4):
        if step == 2:
            model.body[0].requires_grad_(unfreezes)
        raised = error_of(lambda step=step: step_(ddp, step))
        steps.append(grads_of(model) if raised is None else (raised.kind, raised.message.split(".")[0]))
        if raised is not None:
            break
    if attached is not None:
        attached.detach()
    return steps


FREEZING = {str(case): case for case in itertools.product((True, False), (True, False), ({}, UNUSED))}


def freeze_both_ways(*case: Any) -> tuple[list[Any], list[Any]]:
    return freeze(False, *case), freeze(True, *case)


def test_freezing_after_ddp_was_made_is_to_us_what_it_is_to_ddp(worlds: Worlds) -> None:
    """DDP reduces what required gradients when it was made, and so do we; without one of them it ends, and so do we."""
    for case, by_rank in worlds.run_all(2, freeze_both_ways, FREEZING).items():
        for plain, ours in by_rank:
            for theirs, mine in zip(plain, ours, strict=True):
                if isinstance(theirs, tuple):
                    assert mine == theirs, case
                    continue
                for name, grad in theirs.items():
                    assert (mine[name] is None) == (grad is None), (case, name)
                    assert grad is None or relative_error(mine[name], grad) <= RELATIVE, (case, name)
