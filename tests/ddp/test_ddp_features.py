"""Everything that DDP users do: at density 1 it gives what plain DDP gives, whatever is done."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from oktopk import OkTopk
from tests.cases import oktopk as oktopk_of
from tests.ddp.harness import (
    EXCHANGE_TIMEOUT_S,
    Net,
    Raised,
    Worlds,
    attach,
    batch,
    error_of,
    grads_of,
    in_memory_order,
    loss_of,
    mean_of,
    relative_error,
    same_bits,
    same_weights_,
    weights_of,
)

pytestmark = pytest.mark.processes

RELATIVE = 1e-6
STEPS = 5


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


def branch_only_while_accumulating(model: DDP, rank: int, step: int) -> None:
    """The branch has a gradient, though the backward pass that is exchanged does not reach it."""
    with model.no_sync():
        loss_of(model, rank, 100 * step, branch=True).backward()
    loss_of(model, rank, step, branch=False).backward()


def branch_on_one_rank_while_accumulating(model: DDP, rank: int, step: int) -> None:
    with model.no_sync():
        loss_of(model, rank, 100 * step, branch=rank == step % 2).backward()
    loss_of(model, rank, step, branch=False).backward()


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


class ConvNet(nn.Module):
    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(2, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(512, 4)
        )
        self.to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ChannelsLast(ConvNet):
    def __init__(self) -> None:
        super().__init__(torch.channels_last)


def images(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 2, 8, 8, generator=generator).to(memory_format=torch.channels_last)


def classify(model: nn.Module, rank: int, step: int) -> None:
    nn.functional.cross_entropy(model(images(rank, step)), torch.arange(4)).backward()


@dataclass(frozen=True)
class Habit:
    """What a user does with DDP."""

    make: Callable[[], nn.Module] = Net
    step: Callable[[DDP, int, int], None] = once
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    zero_grad: bool = True


HABITS = {
    "no_sync": Habit(step=accumulated),
    "no_sync, bucket view": Habit(step=accumulated, options={"gradient_as_bucket_view": True}),
    "no_sync, a branch that only it uses": Habit(
        step=branch_only_while_accumulating, options={"find_unused_parameters": True}
    ),
    "no_sync, a branch that only one rank uses in it": Habit(
        step=branch_on_one_rank_while_accumulating, options={"find_unused_parameters": True}
    ),
    "several forwards": Habit(step=several_forwards),
    "forward without backward": Habit(step=forward_without_backward),
    "gradient_as_bucket_view": Habit(options={"gradient_as_bucket_view": True}),
    "static_graph": Habit(options={"static_graph": True}),
    "static_graph, a branch that nobody uses": Habit(step=without_the_branch, options={"static_graph": True}),
    "static_graph, bucket view": Habit(options={"static_graph": True, "gradient_as_bucket_view": True}),
    "static_graph, no_sync": Habit(step=accumulated_after_the_first_step, options={"static_graph": True}),
    "activation checkpoints": Habit(step=checkpointed, options={"static_graph": True}),
    "gradients never zeroed": Habit(zero_grad=False),
    "frozen": Habit(Frozen),
    "tied": Habit(Tied),
    "scalar and empty": Habit(Scalar),
    "ignored by DDP": Habit(Ignoring),
    "conv": Habit(ConvNet, classify),
    "channels_last": Habit(ChannelsLast, classify),
    "channels_last, bucket view": Habit(ChannelsLast, classify, {"gradient_as_bucket_view": True}),
    "default exclusion": Habit(settings={"exclude": oktopk.small_or_vector}),
    "dense phase": Habit(settings={"dense_steps": 3}, options={"gradient_as_bucket_view": True}),
}


def compare(habit: Habit) -> tuple[list[float], bool]:
    """Return the largest relative difference of each step from plain DDP, and whether anything stayed behind."""
    rank = dist.get_rank()
    theirs, ours = (DDP(habit.make(), bucket_cap_mb=0.005, **habit.options) for _ in range(2))
    attached = attach(ours, **habit.settings)
    errors = []
    for step in range(STEPS):
        same_weights_(theirs, ours)
        for model in (theirs, ours):
            if habit.zero_grad:
                model.zero_grad(set_to_none=step % 2 == 0)
            habit.step(model, rank, step)
        expected, came = grads_of(theirs.module), grads_of(ours.module)
        assert all((expected[n] is None) == (came[n] is None) for n in expected)
        errors.append(
            max(relative_error(came[n], expected[n]) for n in expected if expected[n] is not None and len(expected[n]))
        )
        with torch.no_grad():
            for parameter in ours.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    left = any(bool(tensor.any()) for tensor in attached.residual.values())
    attached.detach()
    return errors, left


@pytest.mark.parametrize("name", HABITS)
def test_gradients_are_plain_ddps(worlds: Worlds, name: str) -> None:
    for errors, left in worlds.run(2, compare, HABITS[name]):
        assert max(errors) <= RELATIVE, errors
        assert not left


DTYPES = {torch.float64: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


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


@pytest.mark.parametrize("settings", [{}, {"dense_steps": 9}, {"exclude": "*bias"}], ids=["sparse", "dense", "mixed"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float16),
    ],
    ids=str,
)
def test_any_floating_dtype_and_several_in_one_model(
    worlds: Worlds, first: torch.dtype, second: torch.dtype, settings: dict[str, Any]
) -> None:
    tolerance = {**DTYPES, torch.float32: RELATIVE}
    for worst in worlds.run(2, mean_gradients, first, second, settings):
        for name, error in worst.items():
            assert error <= tolerance[second if name.startswith("second") else first], name


def channels_last_books() -> dict[str, dict[str, Tensor]]:
    """Sparse steps of a channels_last net: what was applied, what the gradients were, what is left."""
    rank, net = dist.get_rank(), ChannelsLast()
    local, model = copy.deepcopy(net), DDP(net, bucket_cap_mb=0.01, broadcast_buffers=False)
    attached = attach(model, OkTopk(density=0.05))
    applied = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in net.named_parameters()}
    gradient = copy.deepcopy(applied)
    for step in range(10):
        for each, books in ((local, gradient), (model, applied)):
            each.zero_grad()
            classify(each, rank, step)
            for name, parameter in (each.module if each is model else each).named_parameters():
                assert parameter.grad.stride() == parameter.stride()
                books[name] += in_memory_order(parameter.grad).double()
    attached.detach()
    return {"applied": applied, "gradient": gradient, "residual": attached.residual}


def test_a_channels_last_net_loses_nothing(worlds: Worlds) -> None:
    by_rank = worlds.run(2, channels_last_books)
    gradient, residual = (mean_of([each[what] for each in by_rank]) for what in ("gradient", "residual"))
    for each in by_rank:
        for name, applied in each["applied"].items():
            assert relative_error(applied + residual[name], gradient[name]) <= 1e-5
    assert any(bool(tensor.any()) for tensor in residual.values())


def train_on(group: Any, exchange: Any, number: int, steps: int, attachments: int = 1) -> list[float]:
    """Train attached and plain models on a group, attaching anew several times; return the differences."""
    theirs, ours = DDP(Net(), process_group=group), DDP(Net(), process_group=group)
    errors = []
    for attachment in range(attachments):
        attached = attach(ours, group=exchange)
        for step in range(steps):
            same_weights_(theirs, ours)
            for model in (theirs, ours):
                model.zero_grad()
                loss_of(model, number, 10 * attachment + step).backward()
            expected, came = grads_of(theirs.module), grads_of(ours.module)
            errors.append(max(relative_error(came[name], expected[name]) for name in expected))
        attached.detach()
    return errors


def on_a_subgroup(attachments: int) -> list[float]:
    """Ranks 1 and 3 train; 0 and 2 do something else, at their own pace. Rank 1 is in a group that 3 is not in."""
    rank = dist.get_rank()
    dist.new_group([0, 1])
    others, group, exchange = dist.new_group([0, 2]), dist.new_group([1, 3]), dist.new_group([1, 3])
    if rank in (0, 2):
        for _ in range(7):
            dist.all_reduce(torch.ones(1000), group=others)
        return []
    errors = train_on(group, exchange, rank, 4, attachments)
    dist.barrier(exchange)  # it is the user's, and still there
    return errors


def on_two_subgroups() -> list[float]:
    """Both halves train, each its own model, and not for as long."""
    rank = dist.get_rank()
    groups = [(dist.new_group(ranks), dist.new_group(ranks)) for ranks in ([0, 2], [1, 3])]
    return train_on(*groups[rank % 2], rank, 3 + rank % 2)


def without_a_group_for_the_exchange() -> Raised | None:
    """Only ranks 1 and 3 come to attach(), which cannot make a group without the others."""
    group = dist.new_group([1, 3])
    return error_of(lambda: attach(DDP(Net(), process_group=group))) if dist.get_rank() in (1, 3) else None


def with_a_group_of_ones_own() -> list[float]:
    group = dist.new_group()
    errors = train_on(dist.group.WORLD, group, dist.get_rank(), 2)
    dist.barrier(group)
    return errors


@pytest.mark.parametrize("attachments", [1, 3], ids=["once", "again and again"])
def test_a_subgroup_trains_while_others_do_something_else(worlds: Worlds, attachments: int) -> None:
    by_rank = worlds.run(4, on_a_subgroup, attachments)
    assert [len(errors) for errors in by_rank] == [0, 4 * attachments, 0, 4 * attachments]
    assert max(by_rank[1] + by_rank[3]) <= RELATIVE


def test_two_subgroups_train_side_by_side(worlds: Worlds) -> None:
    assert max(error for errors in worlds.run(4, on_two_subgroups) for error in errors) <= RELATIVE


def test_a_subgroup_without_a_group_for_the_exchange_is_told_what_to_do(worlds: Worlds) -> None:
    by_rank = worlds.run(4, without_a_group_for_the_exchange)
    for raised in (by_rank[1], by_rank[3]):
        assert raised is not None
        assert raised.kind == "SettingError"
        assert "dist.new_group([1, 3])" in raised.message
        assert "group=" in raised.message


def test_a_group_of_the_users_own(worlds: Worlds) -> None:
    assert max(error for errors in worlds.run(2, with_a_group_of_ones_own) for error in errors) <= RELATIVE


def two_models() -> tuple[bool, bool]:
    """Return whether each of two models, trained in turns, ended as when it is trained alone."""
    rank, ends = dist.get_rank(), []
    for alone in (True, False):
        models = [DDP(Net(seed=seed), bucket_cap_mb=0.01) for seed in (1, 2)]
        handles = [
            attach(model, oktopk_of(mode, density=density))
            for model, density, mode in zip(models, (0.02, 0.1), ("bounded", "paper"), strict=True)
        ]
        order = [(s, m) for m in (0, 1) for s in range(6)] if alone else [(s, m) for s in range(6) for m in (0, 1)]
        for step, m in order:
            if not alone and step % 3 == 2 and m == 0:
                continue  # both at once, below
            both = [m] if alone or step % 3 != 2 else [0, 1]
            for each in both:
                models[each].zero_grad()
            torch.stack([loss_of(models[each], rank, 10 * each + step) for each in both]).sum().backward()
            for each in both:
                with torch.no_grad():
                    for parameter in models[each].parameters():
                        parameter -= 0.05 * parameter.grad
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attached = attach(model) if attaching else None
    with Join([model]):
        for step in range(steps_of_rank[rank]):
            optimizer.zero_grad()
            loss_of(model, rank, step, branch=not unused or (step + rank) % 3 == 0).backward()
            optimizer.step()
    if attached is None:
        return weights_of(model.module), False, 0
    attached.detach()
    return weights_of(model.module), any(bool(each.any()) for each in attached.residual.values()), attached.step


@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
@pytest.mark.parametrize("steps_of_rank", [(3, 6), (6, 3)], ids=str)
def test_uneven_inputs_with_join_train_as_under_plain_ddp(
    worlds: Worlds, steps_of_rank: tuple[int, ...], unused: bool
) -> None:
    plain, ours = (worlds.run(2, uneven, attaching, unused, steps_of_rank) for attaching in (False, True))
    for (theirs, _, _), (weights, held, steps) in zip(plain, ours, strict=True):
        assert all(relative_error(weights[name], theirs[name]) <= 1e-5 for name in weights)
        assert not held
        assert steps == max(steps_of_rank)


def join_dividing_by_the_rest() -> tuple[Raised | None, Raised | None, bool]:
    """Return what plain DDP raises, what we raise, and whether our refusal left the weights alone."""
    raised = []
    for plain in (True, False):
        model = DDP(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attached = None if plain else attach(model)
        before = weights_of(model.module)

        def train(model: DDP = model, optimizer: Any = optimizer) -> None:
            with Join([model], divide_by_initial_world_size=False):
                for step in range(2 + 2 * dist.get_rank()):
                    optimizer.zero_grad()
                    loss_of(model, dist.get_rank(), step).backward()
                    optimizer.step()

        raised.append(error_of(train))
        if attached is not None:
            attached.detach()
    return raised[0], raised[1], same_bits(weights_of(model.module), before)


def test_join_that_divides_by_the_ranks_that_are_left_is_refused_on_all_ranks(worlds: Worlds) -> None:
    """DDP hands a hook nothing that says how many have joined."""
    for theirs, ours, untouched in worlds.run(2, join_dividing_by_the_rest):
        assert theirs is None
        assert ours == Raised(
            "SettingError", "Join(divide_by_initial_world_size=False) is not supported: the mean is over all ranks"
        )
        assert untouched


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


def attach_in_mid_training() -> list[float]:
    theirs, ours = DDP(Net(), bucket_cap_mb=0.005), DDP(Net(), bucket_cap_mb=0.005)
    errors, attached = [], None
    for step in range(6):
        if step == 3:
            attached = attach(ours)
        same_weights_(theirs, ours)
        for model in (theirs, ours):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
        expected, came = grads_of(theirs.module), grads_of(ours.module)
        errors.append(max(relative_error(came[name], expected[name]) for name in expected))
    assert attached is not None
    assert attached.step == 3
    attached.detach()
    return errors


def test_attaching_between_steps_of_a_training_that_runs(worlds: Worlds) -> None:
    for errors in worlds.run(2, attach_in_mid_training):
        assert max(errors) <= RELATIVE


def freeze_around(attaching: bool, before: bool, unfreezes: bool, options: dict[str, Any]) -> list[Any]:
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
        ddp.zero_grad()
        raised = error_of(lambda step=step: loss_of(ddp, dist.get_rank(), step).backward())
        if raised is not None:
            steps.append((raised.kind, raised.message.split(".")[0]))
            break
        steps.append(grads_of(model))
    if attached is not None:
        attached.detach()
    return steps


def freeze_both_ways(before: bool, unfreezes: bool, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    plain, ours = (freeze_around(attaching, before, unfreezes, options) for attaching in (False, True))
    return plain, ours


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
@pytest.mark.parametrize("unfreezes", [False, True], ids=["freezes", "unfreezes"])
@pytest.mark.parametrize("before", [True, False], ids=["before attach", "between steps"])
def test_freezing_after_ddp_was_made_is_to_us_what_it_is_to_ddp(
    worlds: Worlds, before: bool, unfreezes: bool, options: dict[str, Any]
) -> None:
    """DDP reduces what required gradients when it was made, and so do we; without one of them it ends, and so do we."""
    for plain, ours in worlds.run(2, freeze_both_ways, before, unfreezes, options):
        assert len(ours) == len(plain)
        for theirs, mine in zip(plain, ours, strict=True):
            if isinstance(theirs, tuple):
                assert mine == theirs
                continue
            for name, grad in theirs.items():
                assert (mine[name] is None) == (grad is None), name
                assert grad is None or relative_error(mine[name], grad) <= RELATIVE, name
