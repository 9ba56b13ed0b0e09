"""FSDP2 on the shard dimension, and the exchange along the other: as native HSDP where nothing is held back.

A size is (replicas, shards); ranks are numbered replica by replica.
"""

import signal
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from oktopk import OkTopk, load_distributed, save_distributed
from oktopk.ddp.fsdp import whole_of
from oktopk.ddp.hook import SHARD_IT
from tests.ddp.accounts import any_left, same_bits
from tests.ddp.harness import Worlds, attach, check_words, error_of, gathered, through_a_file
from tests.ddp.mortal import Mortals
from tests.ddp.nets import BRAIN, DOUBLE, SINGLE, Chain, Net, batch
from tests.ddp.test_failures import EXIT_S, IN_SPARSE_PHASE, check_ended

pytestmark = pytest.mark.processes
slow = pytest.mark.slow

SPARSE = OkTopk(density=0.05)
STEPS = 20
REDUCE_BRAIN = MixedPrecisionPolicy(reduce_dtype=BRAIN)
ODD = partial(Chain, (8, 13, 7, 4), (SINGLE,) * 3)  # no dimension of which the shards divide


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Six processes, for 2 x 3 and 3 x 2."""
    pool = Worlds(6, tmp_path_factory.mktemp("six"))
    yield pool
    pool.close()


def mesh_of(size):
    return init_device_mesh("cpu", size, mesh_dim_names=("replicate", "shard"))


def shard(net, mesh, sums=(), **options):
    """Make a unit of each child that has parameters, and of the net.

    A mesh of replicas alone is for replicate(). `sums`: the calls that make FSDP sum, which torchtitan makes.
    """
    wrap = replicate if mesh.mesh_dim_names == ("replicate",) else fully_shard
    for child in (*net.children(), *(net.layers if isinstance(net, Chain) else ())):
        if any(True for _ in child.parameters(recurse=False)):
            wrap(child, mesh=mesh, **options)
    wrap(net, mesh=mesh, **options)
    for module in (each for each in net.modules() if isinstance(each, FSDPModule)):
        for name, value in sums:
            getattr(module, name)(value)
    return net


def backward(model, step, factor=1.0):
    x, y = batch(dist.get_rank(), step)
    (nn.functional.mse_loss(model(x), y.to(SINGLE)) * factor).backward()


def local(tensor):
    return tensor.detach().to_local().reshape(-1).clone()


def whole_mesh(size):
    """Return the mesh of native HSDP, or of native replicate() if nothing is sharded."""
    mesh = mesh_of(size)
    return mesh["replicate"] if size[1] == 1 else mesh


def weights_of(model):
    return {name: local(parameter) for name, parameter in model.named_parameters()}


def grads_of(model):
    return {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def train(model, first=0, end=STEPS, optimizer=None, backwards=1):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(first, end):
        optimizer.zero_grad()
        for part in range(backwards):
            backward(model, backwards * step + part)
        optimizer.step()
    return weights_of(model)


def attached_model(size, net=Net, algorithm=SPARSE, options=None, as_native=False, **settings):
    """Return a model and its handle; `as_native`: FSDP has the mesh of native HSDP, or of replicate()."""
    mesh = mesh_of(size)
    model = shard(net(), whole_mesh(size) if as_native else mesh["shard"], **(options or {}))
    return model, attach(model, algorithm, mesh=None if as_native else mesh["replicate"], **settings)


def check_equals_native(size, cases, as_native=False):
    for net, algorithm, dense_steps, options, backwards in cases:
        native = shard(net(), whole_mesh(size), **options)
        model, attached = attached_model(size, net, algorithm, options, as_native, dense_steps=dense_steps)
        case = (net, algorithm, options)
        assert same_bits(train(model, backwards=backwards), train(native, backwards=backwards)), case
        assert attached.step == STEPS * backwards
        attached.detach()
        assert same_bits(train(model, end=2), train(native, end=2)), case


ALL = 10**6  # dense steps
EXACT, DENSE = ([(net, *how, {}, 1) for net in (Net, ODD)] for how in ((OkTopk(density=1.0), 0), (SPARSE, ALL)))
BRAIN_TWICE, TWICE = (Net, SPARSE, ALL, {"mp_policy": REDUCE_BRAIN}, 2), (Net, OkTopk(density=1.0), 0, {}, 2)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(ODD, OkTopk(density=1.0), STEPS // 2, {}, 1)], id="quick"),
        pytest.param([*EXACT, *DENSE, BRAIN_TWICE, TWICE], marks=slow, id="slow"),
    ],
)
def test_density_one_and_the_dense_phase_equal_native_hsdp(worlds, cases):
    worlds.run(4, check_equals_native, (2, 2), cases)


@slow
@pytest.mark.parametrize(("size", "cases"), [((2, 3), [*EXACT, *DENSE]), ((3, 2), DENSE)], ids=["2x3", "3x2"])
def test_other_grids_equal_native_hsdp(six, size, cases):
    """With three replicas a sparse step sums in the order of the ranks, and gloo's ring in another."""
    six.run(6, check_equals_native, size, cases)


SUMS = {"sums": [("set_gradient_divide_factor", 1.0), ("set_force_sum_reduction_for_comms", True)]}
SUMS_OF_MEANS = {"sums": [("set_gradient_divide_factor", 2)]}  # gloo takes this of two shards, and no other alone
SUMS_IN_BRAIN = {**SUMS, "mp_policy": REDUCE_BRAIN}
EXACT_SUMS = [(ODD, OkTopk(density=1.0), 0, SUMS, 1), (ODD, OkTopk(density=1.0), 0, SUMS_OF_MEANS, 1)]
DENSE_SUMS = [(Net, SPARSE, ALL, options, 1) for options in (SUMS, SUMS_OF_MEANS, SUMS_IN_BRAIN)]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        pytest.param((2, 2), EXACT[1:], id="2-D mesh"),
        pytest.param((2, 2), [*EXACT, *DENSE, BRAIN_TWICE, TWICE], marks=slow, id="2-D mesh, slow"),
        pytest.param((2, 2), EXACT_SUMS[:1], id="sums"),
        pytest.param((2, 2), [*EXACT_SUMS, *DENSE_SUMS], marks=slow, id="sums, slow"),
        pytest.param((2, 1), EXACT[1:], id="replicate()"),
        pytest.param((2, 1), [*EXACT, *DENSE, BRAIN_TWICE, TWICE, EXACT_SUMS[0]], marks=slow, id="replicate(), slow"),
        pytest.param((4, 1), [*DENSE, BRAIN_TWICE, DENSE_SUMS[0]], marks=slow, id="replicate() on 4"),
    ],
)
def test_a_model_that_would_sum_over_the_replicas_itself_equals_native_hsdp(worlds, size, cases):
    """As a whole mesh or replicate() do, and torchtitan, which divides by the number of tokens itself."""
    worlds.run(size[0] * size[1], check_equals_native, size, cases, True)


def mean_over_replicas(tensors, size):
    """Return the mean, in float64, over the ranks that have this rank's shard."""
    replicas = gathered(tensors)[dist.get_rank() % size[1] :: size[1]]
    return {name: torch.stack([each[name].double() for each in replicas]).mean(0) for name in tensors}


def trimmed(residual, model):
    """Return the residuals without FSDP's padding, which must be zero."""
    lengths = {name: p.to_local().numel() for name, p in model.named_parameters()}
    assert not any(bool(tensor[lengths[name] :].any()) for name, tensor in residual.items())
    return {name: tensor[: lengths[name]] for name, tensor in residual.items()}


def check_nothing_is_lost(size, net, options, backwards, as_native, settings):
    model, attached = attached_model(size, net, options=options, as_native=as_native, **settings)
    alone = shard(net(), mesh_of(size)["shard"], **options)  # sums over the shards only
    replicas = size[0] if "sums" in options else 1  # whose mean is made here
    applied = {name: torch.zeros_like(each).double() for name, each in weights_of(model).items()}
    wanted, magnitude = ({name: each.clone() for name, each in applied.items()} for _ in range(2))
    for step in range(12):
        for each in (model, alone):
            each.zero_grad()
            for part in range(backwards):
                backward(each, backwards * step + part)
        for name, grad in grads_of(model).items():
            applied[name] += grad.double() / replicas
        for name, grad in mean_over_replicas(grads_of(alone), size).items():
            wanted[name] += grad
            magnitude[name] += grad.abs()
    own = trimmed(attached.residual, model)
    residual = mean_over_replicas(own, size)
    assert not same_bits(own, {name: mean.float() for name, mean in residual.items()})  # each replica's is another
    for name, total in applied.items():
        assert bool(((total + residual[name] - wanted[name]).abs() <= 1e-5 * magnitude[name] + 1e-7).all()), name
    assert any_left(residual)
    assert same_bits(applied, mean_over_replicas(applied, size))
    attached.detach()


@pytest.mark.parametrize(
    ("net", "options", "backwards", "as_native"),
    [
        (ODD, {}, 1, False),
        (ODD, {}, 1, True),
        pytest.param(Net, {"mp_policy": REDUCE_BRAIN}, 1, False, marks=slow),
        pytest.param(Net, {"mp_policy": REDUCE_BRAIN}, 2, False, marks=slow),
        pytest.param(Net, {}, 3, False, marks=slow),
        pytest.param(Net, SUMS_IN_BRAIN, 2, True, marks=slow),
        pytest.param(ODD, SUMS, 1, True, marks=slow),
    ],
)
def test_nothing_is_lost_and_all_replicas_of_a_shard_get_the_same_bits(worlds, net, options, backwards, as_native):
    dense_steps = 0 if "mp_policy" in options else 2  # a dense step in bfloat16 rounds, as native HSDP's
    settings = {"exclude": "*bias", "dense_steps": dense_steps}
    worlds.run(4, check_nothing_is_lost, (2, 2), net, options, backwards, as_native, settings)


@contextmanager
def spoilt(layer):
    """Make one element of the gradient of a layer's weight NaN on this rank, which has the whole weight then."""
    handles = []

    def spoil(grad):
        grad = grad.clone()
        grad[-1, -1] = float("nan")
        return grad

    def before_forward(*_):
        handles.append(layer.weight.register_hook(spoil))

    handles.append(layer.register_forward_pre_hook(before_forward))
    yield
    for handle in handles:
        handle.remove()


def check_nan_changes_nothing(size, on_nonfinite, steps, as_native):
    settings = {"exclude": "*bias", "dense_steps": 2, "on_nonfinite": on_nonfinite}
    model, attached = attached_model(size, as_native=as_native, **settings)
    train(model, end=steps[0])
    for step in range(steps[0], 6):
        model.zero_grad()
        before = attached.residual
        with spoilt(model.body[2]) if step in steps and dist.get_rank() == 1 else nullcontext():
            said = error_of(backward, model, step)
        assert attached.last.skipped == (step in steps)
        if step in steps:
            assert same_bits(attached.residual, before)
            if on_nonfinite == "skip":
                assert not said
                assert not any_left(grads_of(model))
            else:
                replica = 1 // size[1]
                check_words(said, "NonFiniteError: shard ", f"rank {replica}: the gradient of 'body.2.weight'")
                assert len(set(gathered(said))) == 1
        else:
            assert not said
            assert any_left(grads_of(model))
    assert attached.active
    attached.detach()


@pytest.mark.parametrize(
    ("size", "on_nonfinite"),
    [
        ((2, 2), "raise"),
        pytest.param((2, 2), "skip", marks=slow),
        pytest.param((4, 1), "raise", marks=slow),
    ],
)
def test_a_nan_on_one_rank_changes_nothing_on_any_replica_of_any_shard(worlds, size, on_nonfinite):
    worlds.run(4, check_nan_changes_nothing, size, on_nonfinite, (1, 4), size[1] == 1)


def check_clip(size, clip=0.05):
    model, attached = attached_model(size, algorithm=OkTopk(density=1.0), clip=clip)
    alone = shard(Net(), mesh_of(size)["shard"])
    for each in (model, alone):
        backward(each, 0)
    mine = sum(float(grad.double().square().sum()) for grad in grads_of(alone).values())
    replica = dist.get_rank() // size[1]
    norm = sum(gathered(mine)[replica * size[1] : (replica + 1) * size[1]]) ** 0.5
    scaled = {name: grad * (clip / size[0] ** 0.5 / norm) for name, grad in grads_of(alone).items()}
    wanted = mean_over_replicas(scaled, size)
    assert all(torch.allclose(grad.double(), wanted[name], rtol=1e-4) for name, grad in grads_of(model).items())
    attached.detach()


def check_unused_unit(size):
    model, attached = attached_model(size)
    train(model, end=3)
    before = attached.residual
    model.zero_grad()
    x, y = batch(dist.get_rank(), 0)
    nn.functional.mse_loss(model(x, branch=False), y).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"branch.weight", "branch.bias"}
    kept = {name: tensor for name, tensor in attached.residual.items() if name.startswith("branch")}
    assert same_bits(kept, {name: before[name] for name in kept})
    assert not same_bits(attached.residual, before)
    attached.detach()


@slow
@pytest.mark.parametrize("check", [check_clip, check_unused_unit])
def test_clipping_spans_the_shards_and_an_unused_unit_keeps_its_residual(worlds, check):
    worlds.run(4, check, (2, 2))


def sharded(dims=("shard",), net=Net, **options):
    return shard(net(), mesh_of((2, 2))[dims] if len(dims) == 1 else mesh_of((2, 2)), **options)


def attaching(model, dims="replicate", **settings):
    return attach(model, mesh=mesh_of((2, 2))[dims], **settings)


def with_another_hook():
    model = sharded()
    model.branch.set_all_reduce_hook(lambda _: None)
    return model


def attached_twice():
    model = sharded()
    attaching(model)
    attaching(model)


def in_backward(change):
    model = sharded()
    attaching(model)
    change(model)
    backward(model, 0)


def before(change):
    model = sharded()
    change(model)
    attaching(model)


def of_several_groups():
    mesh = mesh_of((2, 2))
    other = ShardPlacementResult(placement=Shard(0), mesh_info=FSDPMeshInfo(mesh["replicate"], shard_mesh_dim=0))
    return fully_shard(
        nn.Linear(8, 8), mesh=mesh["shard"], shard_placement_fn=lambda p: other if p.dim() == 1 else None
    )


class HalfUsed(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T


REFUSED = [
    (lambda: attach(sharded()), ("mesh= wants", SHARD_IT)),
    (lambda: attach(sharded(), mesh=mesh_of((2, 2))), ("2 dimensions", SHARD_IT)),
    (lambda: attaching(sharded(), "shard"), ("mesh= has ranks [0, 1] on rank 0", SHARD_IT)),
    (lambda: attaching(sharded(("replicate", "shard")), "shard"), ("other ranks", "leave it out")),
    (lambda: attaching(of_several_groups()), ("several parameter groups",)),
    (lambda: attaching(sharded(net=lambda: Net().to(DOUBLE))), ("float64", "MixedPrecisionPolicy(reduce_dtype=")),
    (lambda: attaching(sharded(), group=dist.group.WORLD), ("group= is for DDP",)),
    (lambda: attaching(with_another_hook()), ("'branch' has another all-reduce hook",)),
    (lambda: attaching(sharded(), exclude="bodi.*"), ("'bodi.*'", "'body")),
    (attached_twice, ("detach()",)),
    *(
        (
            partial(in_turn, lambda model: model.exit.set_force_sum_reduction_for_comms(True)),
            ("'exit'", "set_gradient_divide_factor(1.0), too"),
        )
        for in_turn in (in_backward, before)
    ),
    *(
        (
            partial(in_turn, lambda model: model.exit.set_requires_all_reduce(False)),
            ("'exit'", "set_requires_gradient_sync(False)"),
        )
        for in_turn in (in_backward, before)
    ),
    (
        lambda: in_backward(lambda model: model.exit.set_gradient_divide_factor(2)),
        ("'exit'", "divide factor", "attach again"),
    ),
    (
        lambda: in_backward(lambda model: model.exit.bias.register_post_accumulate_grad_hook(lambda _: None)),
        ("'exit.bias'", "step the optimizer after backward()"),
    ),
]


def check_refusals():
    for attempt, words in REFUSED:
        check_words(error_of(attempt), "SettingError: ", *words)
    model = fully_shard(nn.Sequential(HalfUsed(8, 4)), mesh=mesh_of((2, 2))["shard"])
    attaching(model)
    check_words(error_of(backward, model, 0), "SettingError: ", "set_reduce_scatter_unused_params(True)")
    model.set_reduce_scatter_unused_params(True)
    backward(model, 0)


def test_what_cannot_work_is_refused_with_the_line_to_write(worlds):
    worlds.run(4, check_refusals)


@slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("victim", "dense_steps"), [(3, 2), (0, ALL)], ids=["sparse phase", "host, dense phase"])
def test_a_killed_rank_ends_all_replicas_of_all_shards(victim, dense_steps):
    """Those of its node notice in FSDP's own collectives, which gloo words; the others in the exchange."""
    with Mortals(4, dense_steps=dense_steps, shards=2) as mortals:
        mortals.wait_for_step(victim, IN_SPARSE_PHASE)
        at = mortals.send_signal(victim, signal.SIGKILL)
        check_ended(mortals, [rank for rank in range(4) if rank != victim], at, "Error: ")


def break_exchange(rank, step, attached):
    if (rank, step) == (1, IN_SPARSE_PHASE):
        mock.patch.object(type(attached.algorithm), "reduce_step", side_effect=OSError("disk full")).start()


@slow
@pytest.mark.timeout(120)
def test_an_error_in_one_ranks_exchange_ends_all_and_names_its_cause():
    with Mortals(4, shards=2, before_step=break_exchange, stays=True) as mortals:
        mortals.wait_for_step(0, IN_SPARSE_PHASE - 1)
        at = time.monotonic()
        check_words(mortals.wait_for_word(1, EXIT_S), "OSError: disk full")
        for rank in (0, 3):  # of its node, and of its shard
            check_words(mortals.wait_for_word(rank, EXIT_S), "PeerError", "failed: OSError: disk full")
        check_words(mortals.wait_for_word(2, 2 * EXIT_S), "PeerError")
        mortals.release()
        check_ended(mortals, [0, 1, 2, 3], at)


def session(size, seed, as_native=False):
    net = partial(Net, seed=seed)
    model, attached = attached_model(size, net, as_native=as_native, dense_steps=2, exclude="*bias")
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), attached


def stop_and_resume(size, folder, as_native):
    model, optimizer, attached = session(size, 0, as_native)
    train(model, 0, 5, optimizer)
    saved = through_a_file(attached.state_dict())
    assert {"shard": dist.get_rank() % size[1], "shards": size[1]}.items() <= saved.items()
    save_distributed(folder, attached)
    weights, momenta = get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"net": weights, "optimizer": momenta}, checkpoint_id=folder / "net")
    end = train(model, 5, 10, optimizer) | {f"residual {name}": each for name, each in attached.residual.items()}
    for load in (lambda handle: handle.load_state_dict(saved), lambda handle: load_distributed(folder, handle)):
        model, optimizer, attached = session(size, 1, as_native)
        weights, momenta = get_state_dict(model, optimizer)
        torch.distributed.checkpoint.load({"net": weights, "optimizer": momenta}, checkpoint_id=folder / "net")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=momenta)
        load(attached)
        ours = train(model, 5, 10, optimizer) | {f"residual {name}": each for name, each in attached.residual.items()}
        assert same_bits(ours, end)
    other = {**saved, "shard": saved["shard"] ^ 1}
    check_words(error_of(attached.load_state_dict, other), "StateError: ", "of shard ")


def owed_by_all(model, attached):
    """Return the mean over the replicas of the residuals of the whole parameters, in float64, on every rank."""
    parts = {name: whole_of(flat, attached.parameters[name]).full_tensor() for name, flat in attached.residual.items()}
    every = gathered(parts)
    return {name: torch.stack([each[name].double() for each in every]).mean(0) for name in parts}


def save_owed(size, folder):
    model, optimizer, attached = session(size, 0)
    train(model, 0, 5, optimizer)
    save_distributed(folder, attached)
    return owed_by_all(model, attached)


def load_owed(size, folder, owed, as_native):
    model, optimizer, attached = session(size, 1, as_native)
    load_distributed(folder, attached)
    ours = owed_by_all(model, attached)
    assert any_left(ours)
    assert all(torch.allclose(ours[name], owed[name], rtol=1e-6, atol=1e-9) for name in owed)
    assert attached.step == 5
    train(model, 5, 7, optimizer)


@slow
@pytest.mark.parametrize(("size", "as_native"), [((2, 2), False), ((2, 2), True), ((4, 1), True)])
def test_a_resumed_run_ends_with_the_same_bits(worlds, tmp_path, size, as_native):
    worlds.run(4, stop_and_resume, size, tmp_path, as_native)


@slow
def test_a_resized_run_owes_the_same(worlds, six, tmp_path):
    owed = worlds.run(4, save_owed, (2, 2), tmp_path)[0]
    for pool, size in ((six, (3, 2)), (six, (2, 3)), (worlds, (2, 1)), (worlds, (1, 2)), (worlds, (1, 4))):
        pool.run(size[0] * size[1], load_owed, size, tmp_path, owed, False)
    for pool, size in ((six, (3, 2)), (worlds, (2, 1)), (worlds, (4, 1))):  # with one shard by replicate()
        pool.run(size[0] * size[1], load_owed, size, tmp_path, owed, True)
