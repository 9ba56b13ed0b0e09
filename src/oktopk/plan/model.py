"""The model: seconds, bytes and memory of a step by each method.

A step without overlap is computing plus the exchange. With it the exchange is a queue: buckets enter when backward has
filled them, and leave one after the other.

    round       latency + messages * message_s + max(bytes / link, words * word_s)
    exchange    sum over the rounds of its schedule, plus the computing of the method
    step        forward + max(backward, end of the queue) + optimizer

Where `attach` exchanges what Adam moved, the exchange waits for the optimizer and nothing overlaps.
Where ranks outnumber cores the exchange and backward share one. Then a step is at least the sum of all computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from oktopk.algorithms import Algorithm, Dense, GTopk
from oktopk.cost import ELEMENT_S, GROUP_S, Call, Cost, predict, ring_words
from oktopk.plan.methods import BF16, Method
from oktopk.plan.profile import Host, Parameter, Part, Profile, Rate
from oktopk.plan.schedule import Schedule, crossings, schedule_of, tree, wire_seconds
from oktopk.plan.topology import Topology
from oktopk.words import WORD_BYTES

UNMEASURED = Rate(GROUP_S, ELEMENT_S)
"""Computing of a sparse exchange that nobody measured."""

UNMEASURED_BY = {"": Rate(), BF16: Rate(0.0, 0.5e-9)}

LOW_RANK_S = 2.5e-9
"""Seconds of PowerSGD's products an element and rank that nobody measured, as on a core of a CPU."""


@dataclass(frozen=True)
class Queued:
    """A bucket on its way: part of backward before it, seconds of computing and of rounds, busy seconds among these."""

    ready: float
    computing_s: float
    rounds_s: float
    busy_s: float


@dataclass(frozen=True)
class Prediction:
    """A method's figures for one rank; bytes and seconds are those of a step, of local steps in the mean."""

    method: Method
    step_s: float
    exchange_s: float  # of all buckets, one after the other
    hidden_s: float  # of the exchange, behind backward
    sent_bytes: float
    outer_bytes: float  # that pass a link of the outermost level: a host's, a node's, a site's
    memory_bytes: int  # beside the gradient's own


def predict_step(method: Method, profile: Profile, topology: Topology) -> Prediction:
    """Return a method's figures on a network."""
    schedules = schedules_of(method, profile, topology)
    queue = [_queued(method, part, plan, profile.host, topology) for part, plan in schedules]
    exchange_s = sum(each.computing_s + each.rounds_s for each in queue)
    is_late = method.every > 1 or _exchanges_updates(method, profile)
    step_s = profile.compute_s + exchange_s / method.every if is_late else _overlapped(profile, queue)
    plans = [schedule for _, plan in schedules for schedule in plan]
    sent = sum(schedule.sent_bytes for schedule in plans) / method.every
    outer = sum(_outer_bytes(schedule, topology) for schedule in plans) / method.every
    hidden_s = 0.0 if is_late else max(0.0, profile.compute_s + exchange_s - step_s)
    return Prediction(method, step_s, exchange_s, hidden_s, sent, outer, memory_of(method, profile))


def _exchanges_updates(method: Method, profile: Profile) -> bool:
    """Whether the exchange waits for the optimizer, as with `attach(optimizer=)` and another one than SGD."""
    return method.algorithm is not None and not method.two_level and profile.optimizer != "sgd"


def _overlapped(profile: Profile, queue: Sequence[Queued]) -> float:
    """Return the seconds of a step whose buckets are exchanged while backward goes on."""
    if profile.host.shares:
        return profile.forward_s + _shared(profile.backward_s, queue) + profile.optimizer_s
    end = 0.0
    for each in queue:
        end = max(end, each.ready * profile.backward_s) + each.computing_s + each.rounds_s
    return profile.forward_s + max(profile.backward_s, end) + profile.optimizer_s


def _shared(backward_s: float, queue: Sequence[Queued]) -> float:
    """Return the seconds of backward and the queue of one rank, where both want the same core.

    An exchange wants the core all the time that it computes, and the part of its rounds in which it is busy. It gets
    what it wants up to a half. Backward gets the rest, and so fills the buckets later.
    """
    now = done = 0.0
    for each in queue:
        ready = each.ready * backward_s
        now, done = now + max(0.0, ready - done), max(done, ready)
        for length_s, busy_s in ((each.computing_s, each.computing_s), (each.rounds_s, each.busy_s)):
            wanted = min(1.0, busy_s / length_s) if length_s else 0.0
            part = min(wanted, 0.5)
            slower = wanted / part if part else 1.0
            beside_s = min(length_s * slower, (backward_s - done) / (1 - part))  # while backward goes on
            done += beside_s * (1 - part)
            now += beside_s + max(0.0, length_s - beside_s / slower)
    return now + max(0.0, backward_s - done)


def schedules_of(method: Method, profile: Profile, topology: Topology) -> list[tuple[Part, list[Schedule]]]:
    """Return the parts of the gradient that a method exchanges, each with the schedules of its exchange, in order."""
    size, inner = topology.size, topology.inner_size
    if method.rank:
        return [_low_rank(method.rank, profile, size)]
    if method.algorithm is None:
        narrow = 2 if method.name == BF16 else 1
        return [(part, [_ring(part.numel, size, narrow)]) for part in profile.buckets()]
    density = method.algorithm.density if method.algorithm.has_density else 1.0
    made = []
    for part in profile.groups(density, whole=method.every > 1):
        if method.two_level:
            made.append((part, _two_levels(method.algorithm, part, size, inner)))
        else:
            made.append((part, _flat(method.algorithm, part, size)))
    return made


def _flat(algorithm: Algorithm, part: Part, size: int) -> list[Schedule]:
    made = [exchange_of(algorithm, part.numel, size)] if part.numel else []
    return made + ([_ring(part.tail, size)] if part.tail else [])


@cache
def exchange_of(algorithm: Algorithm, numel: int, size: int, stride: int = 1) -> Schedule:
    """Return the schedule of one exchange of our algorithm on `numel` elements in groups of `size` ranks."""
    if isinstance(algorithm, GTopk):
        cost = _cost(algorithm, numel, size)
        trunk = schedule_of([call for call in cost.calls if call.collective != "sendrecv"], size, stride)
        _, codec = algorithm.plan(numel)
        k, _ = algorithm.plan(numel)
        return Schedule(size, tree(codec.words(k) * WORD_BYTES, size).rounds + trunk.rounds, stride)
    calls = _cost(algorithm, numel, size).calls
    if isinstance(algorithm, Dense):  # DDP and LocalSteps sum without an agreement
        calls = calls[:1]
    return schedule_of(calls, size, stride)


@cache
def _cost(algorithm: Algorithm, numel: int, size: int) -> Cost:
    return predict(algorithm, numel, size)


def _ring(numel: int, size: int, narrow: int = 1) -> Schedule:
    kind = "all_reduce bfloat16" if narrow > 1 else "all_reduce"
    words = 2 * numel * (size - 1) / size / narrow
    return schedule_of([Call(kind, words)], size)


def _two_levels(algorithm: Algorithm, part: Part, size: int, inner: int) -> list[Schedule]:
    """Return a sum that each rank of a node gets a part of, the parts' exchange between nodes, and the gather inside.

    FSDP and DDP's ranks of a node work so (docs/fsdp.md).
    """
    numel, outer = part.numel + part.tail, size // inner
    share = -(-numel // inner)
    words = numel * (inner - 1) / inner
    return [
        schedule_of([Call("reduce_scatter", words)], inner),
        exchange_of(algorithm, share, outer, stride=inner),
        schedule_of([Call("all_gather", words)], inner),
    ]


def _low_rank(rank: int, profile: Profile, size: int) -> tuple[Part, list[Schedule]]:
    """Return PowerSGD's one bucket: a sum of what is not worth a factor, then one of the P and one of the Q."""
    left, right, rest = 0, 0, 0
    for each in profile.parameters:
        rows, columns = matrix_of(each)
        low = min(rank, rows, columns)
        if low * (rows + columns) < each.numel and len(each.shape) > 1:
            left, right = left + low * rows, right + low * columns
        else:
            rest += each.numel
    calls = [Call("all_reduce", ring_words(numel, size)) for numel in (rest, left, right) if numel]
    return Part(profile.numel, 0, 1.0), [schedule_of(calls, size)]


def matrix_of(parameter: Parameter) -> tuple[int, int]:
    """Return the shape as PowerSGD sees it: the first dimension by all others."""
    rows = parameter.shape[0] if parameter.shape else 1
    return rows, parameter.numel // max(rows, 1)


def _queued(method: Method, part: Part, plan: Sequence[Schedule], host: Host, topology: Topology) -> Queued:
    numel = part.numel + part.tail
    if method.two_level:
        numel = -(-numel // topology.inner_size)
    computing_s = rate_of(method, host).seconds(numel) if topology.size > 1 else 0.0
    seconds = [round_seconds(schedule, topology, host) for schedule in plan]
    return Queued(part.ready, computing_s, sum(each for each, _ in seconds), sum(busy for _, busy in seconds))


def rate_of(method: Method, host: Host) -> Rate:
    """Return the rate of a method's computing; where nobody measured it, that of a core of a CPU."""
    if method.computing in host.computing:
        return host.computing[method.computing]
    if method.rank:
        return Rate(0.0, LOW_RANK_S * method.rank)
    return UNMEASURED_BY.get(method.computing, UNMEASURED)


def round_seconds(schedule: Schedule, topology: Topology, host: Host) -> tuple[float, float]:
    """Return the seconds of a schedule's rounds, and those among them in which the processor is busy."""
    total = busy = 0.0
    for each in schedule.rounds:
        wire_s, latency_s = wire_seconds(each, schedule, topology)
        count = len(each.distances)
        messages_s = host.of_message(each.kind) * count
        words_s = host.of_word(each.kind) * each.num_bytes / WORD_BYTES * count
        total += each.times * (latency_s + messages_s + max(wire_s, words_s))
        busy += each.times * (messages_s + words_s)
    return total, busy


def _outer_bytes(schedule: Schedule, topology: Topology) -> float:
    """Return the bytes that leave one part of the outermost level."""
    ranks = topology.inner_size
    return sum(crossings(schedule, each, ranks) * each.num_bytes * each.times for each in schedule.rounds)


def memory_of(method: Method, profile: Profile) -> int:
    """Return the bytes that a method needs on a rank beside weights, gradients and the optimizer's state."""
    whole = WORD_BYTES * profile.numel
    if method.every > 1:  # the agreed point, residual and acc, movement; Nesterov's momentum is as large as a weight
        return 4 * whole
    if method.rank:  # the error, and the factors
        _, (schedule,) = _low_rank(method.rank, profile, 2)
        return whole + round(2 * schedule.sent_bytes)
    if method.algorithm is not None:  # residual and acc, and the weights before the optimizer's step
        return (3 if _exchanges_updates(method, profile) else 2) * whole
    return whole // 2 if method.name == BF16 else 0
