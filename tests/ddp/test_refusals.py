"""What cannot work is refused at once, on all ranks, in words that say what to do."""

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from oktopk import Dense, MemorySink, OkTopk, OkTopkPaper, SettingError, TopkA
from oktopk.ddp.hook import SHARD_IT, check_alone_in_backward
from tests.ddp.accounts import same_bits
from tests.ddp.harness import attach, check_words, error_of, exchange_threads, on_ranks
from tests.ddp.nets import Net, step_


def attaching(algorithm=None, **settings):
    return lambda: attach(DDP(Net()), algorithm, **settings)


def twice():
    model = DDP(Net())
    first = attach(model)
    try:
        attach(model)
    finally:
        assert first.active
        first.detach()


def after_another_hook(trains):
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    if trains:
        step_(model, 0)
    attach(model)


def with_a_group_of_one(other):
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    attach(DDP(Net()), group=alone[dist.get_rank() ^ other])


def with_dynamos_python_reducer():
    """DDP chooses its reducer when it is made: what is set later does not matter to it."""
    model = DDP(nn.Linear(8, 8))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        attached = attach(model)
        model(torch.ones(1, 8)).sum().backward()
        assert attached.step == 1
        attached.detach()
        attach(DDP(nn.Linear(8, 8)))


class Strange:
    """A custom algorithm with an `init` of any kind, whose `reduce` returns no `Reduced`."""

    def __init__(self, init=lambda _numel, _comm: None):
        self.init = init

    def reduce(self, acc, _state, _comm):
        return acc


REFUSED = [
    (twice, ("attached", "detach()")),
    *((partial(after_another_hook, trains), ("another communication hook",)) for trains in (False, True)),
    (partial(with_a_group_of_one, False), ("group=", "ranks [0, 1]", "dist.new_group([0, 1])")),
    (partial(with_a_group_of_one, True), ("group=", "does not have this rank")),
    (lambda: attach(DDP(nn.Embedding(10, 4, sparse=True))), ("sparse=True",)),
    (lambda: attach(FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))), ("FSDP1", SHARD_IT)),
    (lambda: attach(DDP(Net()), mesh=init_device_mesh("cpu", (2,))), ("mesh= is for", "group=")),
    (with_dynamos_python_reducer, ("python_reducer",)),
    (attaching(exclude="body.0.wieght"), ("'body.0.wieght'", "Did you mean 'body.0.weight'?")),
    (attaching(exclude="encoder.*"), ("'encoder.*'",)),
    (attaching(exclude=("*bias", "nose.*")), ("'nose.*'", "Did you mean 'norm.")),
    (attaching(on_nonfinite="ignore"), ("on_nonfinite", "'ignore'", "raise, skip")),
    (attaching(clip=0.0), ("clip", "0")),
    (attaching(dense_steps=-1), ("dense_steps", "-1")),
    (attaching(OkTopk), ("OkTopk is a class: write OkTopk(), with brackets",)),
    (attaching(object()), ("init(numel, comm)", "reduce(acc, state, comm)", "this object has no init and no reduce")),
    (
        attaching(Strange(lambda _numel: None)),
        ("init(numel, comm)", "this Strange has", "(_numel): too many positional"),
    ),
    (attaching(Strange(lambda _numel, _comm, _more: None)), ("missing a required argument: '_more'",)),
    (attaching("oktopp"), ("'oktopp'", "Did you mean 'oktopk'?")),
    (attaching(density_schedule=[(3, 1.5)]), ("density", "1.5")),
    (attaching(density_schedule=[(0, 0.5)]), ("steps", "0")),
    (attaching(Dense(), density_schedule=[(3, 0.5)]), ("density",)),
]


@on_ranks(2)
def test_what_cannot_work_is_refused_and_leaves_no_thread():
    for attempt, words in REFUSED:
        check_words(error_of(attempt), "SettingError: ", *words)
    assert exchange_threads() == []


@on_ranks(2)
def test_an_algorithm_that_returns_something_else_is_told_the_contract_in_its_first_step():
    model = DDP(Net())
    attached = attach(model, Strange())
    said = error_of(step_, model, 0)
    check_words(said, "SettingError: ", "-> Reduced(sum, taken)", "reduce of this Strange returned a Tensor")
    assert not attached.active


def odd(usual, otherwise):
    return otherwise if dist.get_rank() == 1 else usual


@on_ranks(3)
def test_ranks_that_disagree_are_all_told():
    # The parameters have the same shapes on all ranks, so that DDP takes the net, and another name on one.
    names = OrderedDict([("first", nn.Linear(4, 4)), (odd("second", "last"), nn.Linear(4, 4))])
    said = error_of(attach, DDP(nn.Sequential(names)))
    check_words(said, "parameters", "second.weight (4, 4)", "rank 1 has last.weight")
    scaler = torch.amp.GradScaler("cpu")
    for settings, words in (
        ({"algorithm": OkTopk(density=odd(0.1, 0.2))}, ("algorithm: rank 0 has OkTopk(density=0.1", "density=0.2")),
        ({"algorithm": odd(OkTopk(density=0.1), TopkA(density=0.1))}, ("rank 1 has TopkA(",)),
        ({"algorithm": odd(OkTopk(), OkTopkPaper())}, ("rank 1 has OkTopkPaper(",)),
        ({"dense_steps": odd(3, 4)}, ("dense_steps: rank 0 has 3, rank 1 has 4. Give every rank the same",)),
        ({"exclude": odd("*bias", "*weight")}, ("parameters that travel dense", "rank 1 has")),
        ({"exclude": lambda name, _: odd(False, name == "exit.weight")}, ("nothing there, rank 1 has exit.weight",)),
        ({"clip": odd(None, 1.0)}, ("clip: rank 0 has None, rank 1 has 1.0",)),
        ({"density_schedule": odd([(2, 0.5)], [(3, 0.5)])}, ("density_schedule", "[2, 0.5]", "[3, 0.5]")),
        ({"on_nonfinite": odd("raise", "skip")}, ("on_nonfinite: rank 0 has raise, rank 1 has skip",)),
        ({"scaler": odd(None, scaler)}, ("scaler: rank 0 has None, rank 1 has one",)),
    ):
        check_words(error_of(attaching(**settings)), "MismatchError: the ranks disagree on ", *words)
    net = Net()  # with the optimizer of one rank alone, ranks would step at other momentums
    sgd, adamw = (make(net.parameters(), lr=0.1) for make in (torch.optim.SGD, torch.optim.AdamW))
    for given, there in ((odd(None, sgd), "None, rank 1 has SGD"), (odd(sgd, adamw), "SGD, rank 1 has AdamW")):
        said = error_of(partial(attach, DDP(net), optimizer=given))
        check_words(said, f"MismatchError: the ranks disagree on optimizer: rank 0 has {there}.")
    assert exchange_threads() == []


@pytest.mark.parametrize("change", ["density", "exclude"])
@on_ranks(2)
def test_changes_that_differ_between_ranks_are_told_in_the_next_backward(change):
    model, rank = DDP(Net()), dist.get_rank()
    attached = attach(model, OkTopk(density=0.1))
    step_(model, 0)
    if change == "density":
        attached.density = 0.2 + 0.1 * rank
    else:
        attached.exclude("*bias" if rank else "*weight")
    words = "OkTopk(density=0.3" if change == "density" else "travel dense"
    check_words(error_of(step_, model, 1), "MismatchError: the ranks disagree on ", words)
    check_words(error_of(step_, model, 2), "disagree")
    assert not attached.active


@on_ranks(1)
def test_exclusions_may_come_from_an_iterable_that_can_be_read_once():
    model, sink = DDP(Net()), MemorySink()
    attached = attach(model, OkTopk(density=0.01), exclude=(rule for rule in ("*bias", "*weight")), sinks=[sink])
    step_(model, 0)
    attached.density = 0.02
    step_(model, 1)
    attached.detach()
    assert [record.wanted for record in sink.records] == [sum(each.numel() for each in model.parameters())] * 2


@on_ranks(2)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing():
    model = DDP(Net())
    attached = attach(model, OkTopk(density=0.05))
    step_(model, 0)
    before = attached.residual
    for name, value in (("density", 2.0), ("algorithm", "okotpk")):
        check_words(error_of(setattr, attached, name, value), "SettingError")
    check_words(error_of(attached.exclude, "nothing.*"), "SettingError")
    step_(model, 1)
    assert attached.active
    assert not same_bits(attached.residual, before)
    assert attached.density == 0.05
    attached.algorithm = "dense"
    check_words(error_of(setattr, attached, "density", 0.5), "SettingError")


@on_ranks(1)
def test_a_copy_of_an_attached_model_is_attached_to_nothing_and_can_be():
    model = DDP(nn.Linear(200, 200))
    first = attach(model)
    other = copy.deepcopy(model)
    second = attach(other)
    other(torch.ones(1, 200)).sum().backward()
    assert (first.active, first.step, second.active, second.step) == (True, 0, True, 1)


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_batch_norm_that_communicates_in_backward_is_refused_beside_nccl(backends):
    """As it would be on GPUs: no CPU runs a SyncBatchNorm, and the check asks for names alone."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SyncBatchNorm(8))
    with pytest.raises(SettingError, match=r"'1' is a SyncBatchNorm.*backend=\"gloo\""):
        check_alone_in_backward(backends, net)
    check_alone_in_backward("cpu:gloo,cuda:gloo", net)
    check_alone_in_backward(backends, nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))


@on_ranks(1)
def test_a_tensor_parallel_module_is_refused_beside_nccl():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    for each in (net, DDP(net, device_mesh=mesh["data"]).module):
        check_words(error_of(check_alone_in_backward, "cuda:nccl", each), "SettingError: '0' is tensor parallel")


def test_attach_needs_a_process_group_only_through_ddp():
    check_words(error_of(attach, Net()), "SettingError: ", "DistributedDataParallel", "Net", "wrap it in DDP")
