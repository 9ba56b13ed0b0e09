"""The profile of a model by real steps: its computing alone, then what the exchange's computing and messages cost.

All ranks do the same at once, so that they compete as they do in training. Of each sample the slowest rank's counts.
"""

from __future__ import annotations

import gc
import io
import socket
import time
from collections.abc import Callable, Mapping, Sequence
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
from oktopk.bench.methods import PowerSgd
from oktopk.bench.models import Model, check_model, heavy_tailed, load_model
from oktopk.bench.probe import Stopwatch
from oktopk.bench.processes import Setting
from oktopk.comm import Comm, ProcessGroupComm
from oktopk.cost import Call, ring_words
from oktopk.ddp.attach import attach
from oktopk.plan.methods import Method
from oktopk.plan.profile import Host, Parameter, Profile, Rate
from oktopk.plan.schedule import schedule_of
from oktopk.plan.topology import Level
from oktopk.reducer import Reducer
from oktopk.words import WORD_BYTES

WARM_UP, REPEATS = 3, 5
SMALL_CALLS = 15
SMALL_PART = 8
"""Divisor of the largest group for the second size, with which a rate is fitted."""

LEAST_NUMEL = 1024
SLOWER = 1.3
"""Factor on a link's time of a word, above which the host is what takes longer."""

Times = dict[str, Any]
"""Times of one rank, in seconds of each repeat: step (forward, backward, optimizer, ready by parameter), collectives
(by kind: small, big), computing (by method and size), hooked (by method: what a hook adds to a step); and whether the
ranks share cores."""


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
    shares = num_cores() < 2  # one core computes, the other exchanges
    return profile_of(model, [{**rank, "step": alone, "shares": shares} for rank in ranks], methods, optimizer)


def time_rank(model: str, batch: int, optimizer: str, methods: Sequence[Method]) -> Times:
    """Return the times of this rank of the default process group."""
    loaded, comm = load_model(model), ProcessGroupComm()
    groups = [dist.new_group([rank]) for rank in range(comm.size)]  # which end with the default group
    own = groups[comm.rank]
    step, profile = time_step(loaded, batch, optimizer, own), _bare(model, loaded.net)
    bare_s = median(map(sum, zip(step["forward"], step["backward"], strict=True)))
    hooked = {m.computing: _hooked_seconds(m, loaded, batch, own) for m in methods if m.rank or m == _first(methods)}
    return {
        "step": step,
        "collectives": _collectives(profile, methods, comm),
        "computing": {m.computing: _computing(m, profile, comm) for m in methods if m.computing and not m.two_level},
        "hooked": {name: [each - bare_s for each in seconds] for name, seconds in hooked.items()},
        "shares": _shares_cores(comm),
    }


def _first(methods: Sequence[Method]) -> Method | None:
    """Return the first of our methods, which stands for all of them where an attachment is timed."""
    return next((each for each in methods if each.algorithm is not None and each.every == 1), None)


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


def _hooked_seconds(method: Method, loaded: Model, batch: int, own: dist.ProcessGroup) -> list[float]:
    """Return the seconds of forward and backward with a method's hook, in a group of this rank alone."""
    model = wrap(share_weights(loaded.net), PowerSgd(method.rank) if method.rank else None, own)
    if method.rank:
        return _ddp_seconds(model, loaded, batch)
    assert method.algorithm is not None
    with redirect_stderr(io.StringIO()):
        attached = attach(model, method.algorithm, dense_steps=0, group=own)
    try:
        return _ddp_seconds(model, loaded, batch)
    finally:
        attached.detach()


def _ddp_seconds(model: nn.Module, loaded: Model, batch: int) -> list[float]:
    def step() -> None:
        loaded.loss(model(*inputs), targets).backward()  # type: ignore[no-untyped-call]

    seconds = []
    for number in range(WARM_UP + REPEATS):
        inputs, targets = loaded.inputs(batch, seed=number)
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
    ready = [median(moments) for moments in zip(*ranks[0]["step"]["ready"], strict=True)]
    net = load_model(model).net
    shapes = [tuple(each.shape) for each in net.parameters() if each.requires_grad]
    parameters = tuple(Parameter(shape, at) for shape, at in zip(shapes, ready, strict=True))
    return Profile(
        name=model, parameters=parameters, optimizer=optimizer, forward_s=step["forward"],
        backward_s=step["backward"], optimizer_s=step["optimizer"], host=_host(ranks, methods, parameters, link),
    )  # fmt: skip


def _slowest(ranks: Sequence[Sequence[float]]) -> float:
    return float(median(map(max, zip(*ranks, strict=True))))


def _host(
    ranks: Sequence[Times], methods: Sequence[Method], parameters: Sequence[Parameter], link: Level | None
) -> Host:
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
    computing = {}
    for method in methods:
        name = method.computing
        if method.rank:
            computing[name] = Rate(max(0.0, _slowest([rank["hooked"][name] for rank in ranks])))
        elif ranks[0]["computing"].get(name):
            computing[name] = _rate([rank["computing"][name] for rank in ranks])
    attach_s = _attachment_s(ranks, methods, computing, parameters)
    ours = {method.computing for method in methods if method.algorithm is not None}
    computing = {n: replace(rate, call_s=rate.call_s + attach_s * (n in ours)) for n, rate in computing.items()}
    return Host(message_s=message_s, word_s=word_s, computing=computing, shares=ranks[0]["shares"])


def _host_word_s(measured_s: float, link: Level | None) -> float:
    """Return the host's seconds of a word; where the link took about as long, they are unknown and taken as usual."""
    wire_s = 0.0 if link is None else link.wire_s(WORD_BYTES)
    return measured_s if measured_s > SLOWER * wire_s else min(measured_s, Host().of_word(""))


def _attachment_s(
    ranks: Sequence[Times], methods: Sequence[Method], computing: Mapping[str, Rate], parameters: Sequence[Parameter]
) -> float:
    """Return the seconds a group that an attachment takes beside its reductions: threads, futures and records."""
    first = _first(methods)
    if first is None or first.algorithm is None:
        return 0.0
    bare = Profile(name="", parameters=tuple(parameters), forward_s=0.0, backward_s=0.0)
    groups = bare.groups(first.algorithm.density)
    reductions_s = sum(computing[first.computing].seconds(part.numel + part.tail) for part in groups)
    whole_s = _slowest([rank["hooked"][first.computing] for rank in ranks])
    return max(0.0, whole_s - reductions_s) / len(groups)


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
