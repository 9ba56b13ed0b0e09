"""The profile of a model by real steps: its computing alone, then what the exchange's computing and messages cost.

All ranks do the same at once, so that they compete as they do in training. Of each sample the slowest rank's counts.
"""

from __future__ import annotations

import gc
import io
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from oktopk.algorithms import Algorithm, Dense
from oktopk.bench.candidates import share_weights, wrap
from oktopk.bench.machine import num_cores, threads_for
from oktopk.bench.methods import AllReduce, PowerSgd
from oktopk.bench.models import Model, check_model, heavy_tailed, load_model
from oktopk.bench.probe import Stopwatch
from oktopk.bench.processes import Setting
from oktopk.comm import Comm, ProcessGroupComm
from oktopk.cost import Call, ring_words
from oktopk.ddp.attach import attach
from oktopk.plan.methods import BF16, Method
from oktopk.plan.model import predict_step
from oktopk.plan.profile import Host, Parameter, Profile, Rate
from oktopk.plan.schedule import schedule_of
from oktopk.plan.topology import Level, Topology, flat
from oktopk.reducer import Reducer
from oktopk.words import WORD_BYTES

WARM_UP, REPEATS = 3, 5
SMALL_CALLS = 15
DATA_SEEDS = 100
"""Seeds of a rank, because ranks with the same examples would select the same elements."""

SMALL_PART = 8
"""Divisor of the largest group for the second size, with which a rate is fitted."""

LEAST_NUMEL = 1024
SMALL_SHARE = 0.2
"""Part of a step up to which the network's time may be predicted where the rest of the step is measured."""

CLOSE = 1e-4
SLOWER = 1.3
"""Factor on a link's time of a word, above which the host is what takes longer."""

Times = dict[str, Any]
"""Times of one rank, in seconds of each repeat: step (forward, backward, optimizer, ready by parameter), collectives
(by kind: small, big), computing (by method and size), hooked (by method: forward and backward with its exchange); and
whether the ranks share cores."""


def measure(model: str, batch: int, size: int, methods: Sequence[Method], optimizer: str) -> Profile:
    """Return the profile of a model on this machine, with two processes over the loopback for the exchange, if any."""
    check_model(model, batch)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        alone = time_step(load_model(model), batch, optimizer, dist.group.WORLD)
    finally:
        gc.collect()  # a DDP sits in reference cycles, and owns the group, too
        dist.destroy_process_group()
    if size == 1:
        return profile_of(model, [{"step": alone}], methods, optimizer)
    ranks = Setting(2, None).run(time_rank, model, batch, optimizer, methods)
    host = profile_of(model, ranks, methods, optimizer).host
    shares = num_cores() < 2  # one core computes, the other exchanges
    return replace(profile_of(model, [{"step": alone}], methods, optimizer), host=replace(host, shares=shares))


def time_rank(model: str, batch: int, optimizer: str, methods: Sequence[Method]) -> Times:
    """Return the times of this rank of the default process group."""
    loaded, comm = load_model(model), ProcessGroupComm()
    groups = [dist.new_group([rank]) for rank in range(comm.size)]  # which end with the default group
    own = groups[comm.rank]
    step, profile = time_step(loaded, batch, optimizer, own), _bare(model, loaded.net)
    hooked = {m.computing: _hooked_seconds(m, loaded, batch) for m in methods if m.every == 1 and not m.two_level}
    return {
        "step": step,
        "collectives": _collectives(profile, methods, comm),
        "computing": {m.computing: _computing(m, profile, comm) for m in methods if m.computing and not m.two_level},
        "hooked": hooked,
        "shares": _shares_cores(comm),
    }


def time_step(loaded: Model, batch: int, optimizer: str, own: dist.ProcessGroup | None) -> Times:
    """Return the seconds of forward, backward and optimizer of each repeat, and those until each gradient was there.

    The model is under DDP, in a group of this rank alone and without a sum.
    """
    net = wrap(share_weights(loaded.net), None, own)
    parameters = [each for each in net.parameters() if each.requires_grad]
    made, arrived = _optimizer(optimizer, parameters), [0.0] * len(parameters)

    def note(i: int, _: Tensor) -> None:
        arrived[i] = time.perf_counter()

    hooks = [
        each.register_post_accumulate_grad_hook(partial(note, i))  # type: ignore[no-untyped-call]
        for i, each in enumerate(parameters)
    ]
    times: Times = {"forward": [], "backward": [], "optimizer": [], "ready": []}
    for number in range(WARM_UP + REPEATS):
        inputs, targets = loaded.inputs(batch, seed=number)
        net.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        with net.no_sync():
            loss = loaded.loss(net(*inputs), targets)
            between = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
        after = time.perf_counter()
        made.step()
        times["optimizer"].append(time.perf_counter() - after)
        times["forward"].append(between - start)
        times["backward"].append(after - between)
        times["ready"].append([max(0.0, each - between) / (after - between) for each in arrived])
    for hook in hooks:
        hook.remove()
    return {name: values[WARM_UP:] for name, values in times.items()}


def _optimizer(name: str, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer that leaves the weights as they are, so that no step changes the next one's time."""
    if name == "adam":
        return torch.optim.AdamW(parameters, lr=0.0)
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def _bare(name: str, net: nn.Module) -> Profile:
    shapes = tuple(Parameter(tuple(each.shape)) for each in net.parameters() if each.requires_grad)
    return Profile(name=name, parameters=shapes, forward_s=0.0, backward_s=0.0)


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _collectives(profile: Profile, methods: Sequence[Method], comm: Comm) -> Times:
    """Return the seconds of small and big calls of each collective, and the words of a big one."""
    sums = max(part.numel for part in profile.buckets())
    densities = [method.algorithm.density for method in methods if method.algorithm is not None]
    part = max(part.numel + part.tail for part in profile.groups(1.0))
    words = max(LEAST_NUMEL, round(part * max([d for d in densities if d < 1], default=0.01)) // comm.size)
    zeros, size = partial(torch.zeros, dtype=torch.int32), comm.size

    def send_on(block: Tensor) -> None:
        comm.sendrecv(block, (comm.rank + 1) % size, (comm.rank - 1) % size, len(block)).wait()

    makers: dict[str, tuple[Callable[[int], Callable[[], object]], int, float]] = {
        "all_gather": (lambda n: partial(comm.all_gather, zeros(n)), words, words * (size - 1)),
        "all_to_all": (lambda n: partial(comm.all_to_all, zeros(size, n)), words, words * (size - 1)),
        "sendrecv": (lambda n: partial(send_on, zeros(n)), words, words),
        "all_reduce": (lambda n: partial(comm.all_reduce, torch.zeros(n)), sums, ring_words(sums, size)),
        "all_reduce bfloat16": (
            lambda n: partial(comm.all_reduce, torch.zeros(n, dtype=torch.bfloat16)), sums, ring_words(sums, size) / 2,
        ),
    }  # fmt: skip
    found: Times = {}
    for kind, (make, many, sent) in makers.items():
        small, big = make(1), make(many)
        found[kind] = {
            "small": [_seconds(small) for _ in range(SMALL_CALLS)][WARM_UP:],
            "big": [_seconds(big) for _ in range(1 + REPEATS)][1:],
            "words": sent,
        }
    return found


def _computing(method: Method, profile: Profile, comm: Comm) -> list[Any] | None:
    """Return pairs of a group's size and the stretches of computing of each repeat; None if they are not timed here."""
    if method.rank:
        return None
    algorithm = method.algorithm
    if algorithm is None:
        sizes = _two_sizes(max(part.numel for part in profile.buckets()))
        return [(size, [[each] for each in _cast_seconds(size)]) for size in sizes]
    if isinstance(algorithm, Dense):
        return None
    groups = profile.groups(algorithm.density, whole=False)
    return [(size, _stretches(algorithm, size, comm)) for size in _two_sizes(max(part.numel for part in groups))]


def _two_sizes(largest: int) -> list[int]:
    return sorted({largest, max(largest // SMALL_PART, min(largest, LEAST_NUMEL))})


def _cast_seconds(numel: int) -> list[float]:
    wide, narrow = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)

    def both() -> None:
        narrow.copy_(wide)
        wide.copy_(narrow)

    return [_seconds(both) for _ in range(1 + REPEATS)][1:]


def _stretches(algorithm: Algorithm, numel: int, comm: Comm) -> list[list[float]]:
    """Return for each repeat the seconds that a rank computes before, between and after its messages."""
    stopwatch, out = Stopwatch(comm), torch.zeros(numel)
    pool = [heavy_tailed(numel, seed=100 * comm.rank + i) for i in range(3)]
    reducer, repeats = Reducer(algorithm, stopwatch), []
    for number in range(WARM_UP + REPEATS):
        dist.barrier()
        stopwatch.start()
        reducer.all_reduce(pool[number % len(pool)], out=out)
        repeats.append(stopwatch.stop())
    return repeats[WARM_UP:]


def _hooked_seconds(method: Method, loaded: Model, batch: int) -> list[float]:
    """Return the seconds of forward and backward by a method, with its exchange between all ranks."""
    model = wrap(share_weights(loaded.net), _rival(method))
    if method.algorithm is None:
        return _ddp_seconds(model, loaded, batch)
    with redirect_stderr(io.StringIO()):
        attached = attach(model, method.algorithm, dense_steps=0)
    try:
        return _ddp_seconds(model, loaded, batch)
    finally:
        attached.detach()


def _rival(method: Method) -> PowerSgd | AllReduce | None:
    if method.rank:
        return PowerSgd(method.rank)
    return AllReduce(torch.bfloat16) if method.name == BF16 else None


def _ddp_seconds(model: nn.Module, loaded: Model, batch: int) -> list[float]:
    def step() -> None:
        loaded.loss(model(*inputs), targets).backward()  # type: ignore[no-untyped-call]

    seconds = []
    for number in range(WARM_UP + REPEATS):
        inputs, targets = loaded.inputs(batch, seed=DATA_SEEDS * dist.get_rank() + number)
        model.zero_grad()
        seconds.append(_seconds(step))
    return seconds[WARM_UP:]


def _shares_cores(comm: Comm) -> bool:
    """Whether the ranks of this machine, with a thread for the exchange each, outnumber its cores."""
    names: list[Any] = [None] * comm.size
    dist.all_gather_object(names, socket.gethostname())
    here = names.count(socket.gethostname())
    return here * (threads_for(here) + 1) > num_cores()


def profile_of(
    model: str, ranks: Sequence[Times], methods: Sequence[Method], optimizer: str, link: Level | None = None
) -> Profile:
    """Return the profile that the times of all ranks amount to; `link` is what their messages passed, if it is slow."""
    step = {name: _slowest([rank["step"][name] for rank in ranks]) for name in ("forward", "backward", "optimizer")}
    both = _bare_seconds(ranks) / (step["forward"] + step["backward"])  # the slowest in one need not be so in the other
    ready = [median(moments) for moments in zip(*ranks[0]["step"]["ready"], strict=True)]
    net = load_model(model).net
    shapes = [tuple(each.shape) for each in net.parameters() if each.requires_grad]
    parameters = tuple(Parameter(shape, at) for shape, at in zip(shapes, ready, strict=True))
    profile = Profile(
        name=model, parameters=parameters, optimizer=optimizer, forward_s=both * step["forward"],
        backward_s=both * step["backward"], optimizer_s=step["optimizer"], host=_host(ranks, methods, link),
    )  # fmt: skip
    return _held_to_steps(profile, ranks, methods, link)


def _held_to_steps(profile: Profile, ranks: Sequence[Times], methods: Sequence[Method], link: Level | None) -> Profile:
    """Return the profile with rates of computing at which the steps by each method take what they took.

    A step needs more than its parts alone: threads wake each other, caches are cold, and PowerSGD's products are timed
    nowhere else. Where the link took much of the step nothing can be said of these.
    """
    quick = flat(len(ranks), 0.0)
    here = quick if link is None else flat(len(ranks), link.mbit, link.latency_s)
    rates = dict(profile.host.computing)
    for method in methods:
        if method.computing not in ranks[0].get("hooked", ()) or method.every > 1 or method.two_level:
            continue
        network_s = predict_step(method, profile, here).step_s - predict_step(method, profile, quick).step_s
        measured_s = _slowest([rank["hooked"][method.computing] for rank in ranks]) + profile.optimizer_s
        if network_s < SMALL_SHARE * measured_s:
            rates[method.computing] = _rate_of_steps(method, profile, here, measured_s)
    return replace(profile, host=replace(profile.host, computing=rates))


def _rate_of_steps(method: Method, profile: Profile, topology: Topology, measured_s: float) -> Rate:
    """Return a method's rate with so many seconds a call that a step takes `measured_s`."""
    host = profile.host
    rate = Rate() if method.rank else host.computing.get(method.computing, Rate())
    profile = replace(profile, optimizer="sgd")  # as it was measured: gradients are exchanged
    low, high = 0.0, measured_s
    while high - low > CLOSE * measured_s:
        middle = (low + high) / 2
        tried = replace(host, computing={**host.computing, method.computing: replace(rate, call_s=middle)})
        slow = predict_step(method, replace(profile, host=tried), topology).step_s > measured_s
        low, high = (low, middle) if slow else (middle, high)
    return replace(rate, call_s=low)


def _bare_seconds(ranks: Sequence[Times]) -> float:
    """Return the seconds of forward and backward of the slowest rank."""
    steps = [rank["step"] for rank in ranks]
    return _slowest([list(map(sum, zip(step["forward"], step["backward"], strict=True))) for step in steps])


def _slowest(ranks: Sequence[Sequence[float]]) -> float:
    return float(median(map(max, zip(*ranks, strict=True))))


def _host(ranks: Sequence[Times], methods: Sequence[Method], link: Level | None) -> Host:
    if "collectives" not in ranks[0]:
        return Host()
    size, message_s, word_s = len(ranks), {}, {}
    for kind, figures in ranks[0]["collectives"].items():
        small, big = (_slowest([rank["collectives"][kind][which] for rank in ranks]) for which in ("small", "big"))
        rounds = schedule_of([Call(kind, 1.0)], size).rounds
        waits_s = 0.0 if link is None else link.latency_s * sum(each.times for each in rounds)
        message_s[kind] = max(0.0, small - waits_s) / sum(len(each.distances) * each.times for each in rounds)
        word_s[kind] = _host_word_s(max(0.0, big - small) / figures["words"], link)
    for alias, kind in (("all_to_all_single", "all_to_all"), ("reduce_scatter", "all_reduce")):
        message_s[alias], word_s[alias] = message_s[kind], word_s[kind]
    computing = {
        method.computing: _rate([rank["computing"][method.computing] for rank in ranks])
        for method in methods
        if ranks[0]["computing"].get(method.computing)
    }
    return Host(message_s=message_s, word_s=word_s, computing=computing, shares=ranks[0]["shares"])


def _host_word_s(measured_s: float, link: Level | None) -> float:
    """Return the host's seconds of a word; where the link took about as long, they are unknown and taken as usual."""
    wire_s = 0.0 if link is None else link.wire_s(WORD_BYTES)
    return measured_s if measured_s > SLOWER * wire_s else min(measured_s, Host().of_word(""))


def _rate(ranks: Sequence[Sequence[Any]]) -> Rate:
    """Return the rate through the times at two sizes; of each stretch the slowest rank's counts."""
    points = []
    for i, (numel, _) in enumerate(ranks[0]):
        repeats = zip(*(rank[i][1] for rank in ranks), strict=True)
        points.append((numel, median(sum(map(max, zip(*stretches, strict=False))) for stretches in repeats)))
    (small, small_s), (large, large_s) = points[0], points[-1]
    if small == large:
        return Rate(0.0, large_s / large)
    slope = max(0.0, (large_s - small_s) / (large - small))
    return Rate(max(0.0, large_s - slope * large), slope)
