"""FSDP2 with AdamW: sparse steps exchange what each replica's optimizer moved of its shard."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from oktopk import OkTopk, load_distributed, save_distributed
from tests.ddp.accounts import any_left, same_bits
from tests.ddp.harness import attach, check_words, error_of, gathered, through_a_file
from tests.ddp.nets import Net
from tests.ddp.test_fsdp import (
    ODD,
    REDUCE_BRAIN,
    SPARSE,
    SUMS,
    backward,
    mean_over_replicas,
    shard,
    spoilt,
    train,
    trimmed,
    weights_of,
    whole_mesh,
)

pytestmark = pytest.mark.processes
slow = pytest.mark.slow
DENSE_STEPS, STEPS = 2, 7


def script(size, net=Net, algorithm=SPARSE, options=None, **settings):
    """Return a model on the mesh of native HSDP or of replicate(), its AdamW, and its handle."""
    model = shard(net(), whole_mesh(size), **(options or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    notes = []
    optimizer.register_step_pre_hook(lambda *_: notes.append(weights_of(model)))
    optimizer.register_step_post_hook(lambda *_: notes.append(weights_of(model)))  # before anything is exchanged
    settings = {"dense_steps": DENSE_STEPS, "exclude": "*bias", **settings}
    return model, optimizer, attach(model, algorithm, optimizer=optimizer, **settings), notes


def replicas_are_alike(weights, size):
    mine = dist.get_rank() % size[1]
    return all(same_bits(weights, each) for each in gathered(weights)[mine :: size[1]])


def check_nothing_is_lost(size, net, algorithm):
    model, optimizer, attached, notes = script(size, net, algorithm)
    train(model, 0, DENSE_STEPS, optimizer)
    start, moved = weights_of(model), []
    for step in range(DENSE_STEPS, STEPS):
        notes.clear()
        after = train(model, step, step + 1, optimizer)
        assert replicas_are_alike(after, size)
        moved.append({name: notes[0][name].double() - notes[1][name].double() for name in after})
    assert not all(replicas_are_alike(each, size) for each in moved)  # each replica's own
    assert attached.last.phase == "sparse"
    assert attached.step == STEPS
    owed = mean_over_replicas({name: sum(each[name] for each in moved) for name in start}, size)
    residual = mean_over_replicas(trimmed(attached.residual, model), size)
    assert any_left(residual) == (algorithm.density < 1)
    for name in start:
        arrived = start[name].double() - after[name].double()
        torch.testing.assert_close(arrived, owed[name] - residual[name], rtol=0, atol=1e-6)
    attached.detach()


@pytest.mark.parametrize(
    ("size", "net", "density"),
    [
        ((2, 2), ODD, 0.05),
        pytest.param((2, 2), Net, 1.0, marks=slow),
        pytest.param((4, 1), Net, 0.05, marks=slow),
    ],
)
def test_all_that_optimizers_moved_arrives_or_is_held_back_and_replicas_are_alike(worlds, size, net, density):
    worlds.run(4, check_nothing_is_lost, size, net, OkTopk(density=density))


def check_nan(size, on_nonfinite):
    model, optimizer, attached, _ = script(size, on_nonfinite=on_nonfinite)
    train(model, 0, 5, optimizer)
    before, held = weights_of(model), attached.residual
    if dist.get_rank() == 1:
        with spoilt(model.body[2]):
            said = error_of(backward, model, 5)
    else:
        said = error_of(backward, model, 5)
    if on_nonfinite == "raise":
        check_words(said, "NonFiniteError: shard ", "rank 0: the gradient of 'body.2.weight' is not finite")
        assert len(set(gathered(said))) == 1
    else:
        assert not said
        optimizer.step()
        assert attached.last.skipped
        assert attached.last.reason.count("shard ") == 1
    assert same_bits(weights_of(model), before)
    assert same_bits(attached.residual, held)
    assert not same_bits(train(model, 6, 8, optimizer), before)
    assert replicas_are_alike(weights_of(model), size)
    attached.detach()


@slow
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_nan_on_one_rank_moves_no_weight_of_any_shard(worlds, on_nonfinite):
    worlds.run(4, check_nan, (2, 2), on_nonfinite)


def check_resumes(size, folder):
    model, optimizer, attached, _ = script(size)
    train(model, 0, 5, optimizer)
    saved = through_a_file(attached.state_dict())
    save_distributed(folder, attached)
    weights, moments = get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"net": weights, "optimizer": moments}, checkpoint_id=folder / "net")
    end = train(model, 5, 8, optimizer)
    attached.detach()
    for load in (lambda handle: handle.load_state_dict(saved), partial(load_distributed, folder)):
        model, optimizer, attached, _ = script(size, partial(Net, seed=1))
        weights, moments = get_state_dict(model, optimizer)
        torch.distributed.checkpoint.load({"net": weights, "optimizer": moments}, checkpoint_id=folder / "net")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        load(attached)
        assert same_bits(train(model, 5, 8, optimizer), end)
        attached.detach()
    native = train(model, 8, 9, optimizer)
    assert replicas_are_alike(native, size)  # with the mean of their moments


def check_resized(size, folder):
    model, optimizer, attached, _ = script(size, partial(Net, seed=1))
    load_distributed(folder, attached)
    assert attached.step == 5
    train(model, 5, 7, optimizer)
    assert replicas_are_alike(weights_of(model), size)


@slow
@pytest.mark.parametrize("size", [(2, 2), (4, 1)])
def test_a_resumed_run_ends_with_the_same_bits(worlds, tmp_path, size):
    worlds.run(4, check_resumes, size, tmp_path)
    for other in ((2, 1), (1, 4)):
        worlds.run(other[0] * other[1], check_resized, other, tmp_path)


def check_falls_back(size):
    for options in (SUMS, {"mp_policy": REDUCE_BRAIN}):
        model, optimizer, attached, _ = script(size, options=options)
        train(model, 0, DENSE_STEPS, optimizer)
        assert "updates" not in str(attached)
        backward(model, DENSE_STEPS)
        assert attached.step == DENSE_STEPS + 1  # exchanged in backward
        attached.detach()


@slow
def test_sums_and_narrow_gradients_are_exchanged_as_gradients(worlds):
    worlds.run(4, check_falls_back, (2, 2))
