"""`MeteredComm`: counts the bytes and messages of a comm from outside, so that no algorithm counts for itself."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from oktopk.comm.base import Comm, Pending

T = TypeVar("T")

UNNAMED = "other"


@dataclass
class Traffic:
    """The bytes and messages of one rank. Keys are (phase, collective). A block for oneself is no traffic.

    An all_reduce counts as a ring: 2 (P - 1) messages of 1 / P of the tensor each. The others count as one message
    for each peer that gets something.
    """

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sizes: dict[tuple[str, str], Counter[int]] = field(default_factory=dict)
    comm_seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    phase_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sent."""
        return sum(self.sent.values())

    @property
    def received_bytes(self) -> int:
        """Bytes this rank received."""
        return sum(self.received.values())

    @property
    def messages(self) -> int:
        """Messages this rank sent."""
        return sum(sum(sizes.values()) for sizes in self.sizes.values())

    @property
    def sent_by_phase(self) -> dict[str, int]:
        """Bytes this rank sent, by phase."""
        phases: Counter[str] = Counter()
        for (phase, _), count in self.sent.items():
            phases[phase] += count
        return dict(phases)

    @property
    def by_collective(self) -> dict[str, dict[str, Any]]:
        """Calls, bytes and [size, messages] pairs by "phase/collective": plain data, as a record holds it."""
        return {
            "/".join(key): {
                "calls": calls,
                "sent_bytes": self.sent[key],
                "received_bytes": self.received[key],
                "sizes": [[size, count] for size, count in sorted(self.sizes[key].items())],
            }
            for key, calls in self.calls.items()
        }

    def add_(self, other: Traffic) -> None:
        """Count the other's traffic as well."""
        for name in ("sent", "received", "calls", "comm_seconds", "phase_seconds"):
            mine = getattr(self, name)
            for key, amount in getattr(other, name).items():
                mine[key] += amount
        for key, sizes in other.sizes.items():
            self.sizes.setdefault(key, Counter()).update(sizes)

    def count_(self, key: tuple[str, str], sent: Sequence[int], received: int, seconds: float) -> None:
        """Count one call: the sizes of the messages it sent, and the bytes it received."""
        self.calls[key] += 1
        self.sent[key] += sum(sent)
        self.received[key] += received
        self.comm_seconds[key] += seconds
        self.sizes.setdefault(key, Counter()).update(size for size in sent if size)


class MeteredComm:
    """A comm that counts. `pop()` returns the traffic since the last `pop()`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._phase = UNNAMED
        self.rank, self.size = comm.rank, comm.size
        self.traffic = Traffic()

    def pop(self) -> Traffic:
        """Return the traffic counted so far, and start again."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def all_reduce(self, tensor: Tensor) -> Tensor:
        sent = self._ring_sizes(tensor)
        return self._counted("all_reduce", sent, sum(sent), lambda: self._comm.all_reduce(tensor))

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        sent = self._ring_sizes(tensor)
        return self._counted("all_reduce", sent, sum(sent), lambda: self._comm.start_all_reduce(tensor))

    def _ring_sizes(self, tensor: Tensor) -> list[int]:
        """Return the sizes of the messages of a ring: a rank passes on every block but one in each half."""
        if self.size == 1:
            return []
        edges = [i * tensor.numel() // self.size for i in range(self.size + 1)]
        blocks = [(b - a) * tensor.element_size() for a, b in itertools.pairwise(edges)]
        return [size for half in (1, 2) for i, size in enumerate(blocks) if i != (self.rank + half) % self.size]

    def all_gather(self, block: Tensor) -> Tensor:
        sent = [_bytes(block)] * (self.size - 1)
        return self._counted("all_gather", sent, sum(sent), lambda: self._comm.all_gather(block))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        width = blocks.element_size()
        sent = [count * width for peer, count in enumerate(send) if peer != self.rank]
        received = (sum(receive) - receive[self.rank]) * width
        run = partial(self._comm.all_to_all_single, blocks, send, receive)
        return self._counted("all_to_all_single", sent, received, run)

    def all_to_all(self, blocks: Tensor) -> Tensor:
        sent = [blocks[0].nbytes] * (self.size - 1)
        return self._counted("all_to_all", sent, sum(sent), lambda: self._comm.all_to_all(blocks))

    def all_to_all_v(self, blocks: Sequence[Tensor], most: int | None = None) -> list[Tensor]:
        sizes = [torch.int64.itemsize] * (self.size - 1)
        ours = [_bytes(block) for peer, block in enumerate(blocks) if peer != self.rank]
        run = partial(self._comm.all_to_all_v, blocks, most)
        result = self._counted("all_to_all_v", [*sizes, *ours], sum(sizes), run)
        theirs = sum(_bytes(block) for peer, block in enumerate(result) if peer != self.rank)
        self.traffic.received[self._phase, "all_to_all_v"] += theirs
        return result

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        sent = [] if block is None else [_bytes(block)]
        run = partial(self._comm.sendrecv, block, to, source, size, device)
        return self._counted("sendrecv", sent, size * torch.int32.itemsize, run)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _Phase(self, name)

    def fail(self, error: BaseException) -> None:
        self._comm.fail(error)

    def _counted(self, collective: str, sent: Sequence[int], received: int, run: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = run()
        self.traffic.count_((self._phase, collective), sent, received, time.perf_counter() - start)
        return result


def _bytes(block: Tensor) -> int:
    return block.numel() * block.element_size()


class _Phase:
    """A phase of a step, timed. Not a generator: a step on a GPU takes tens of microseconds of the host, in all."""

    def __init__(self, metered: MeteredComm, name: str) -> None:
        self._metered, self._name = metered, name

    def __enter__(self) -> None:
        metered = self._metered
        self._outer, metered._phase = metered._phase, self._name
        self._inner = metered._comm.phase(self._name)
        self._start = time.perf_counter()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        metered = self._metered
        try:
            self._inner.__exit__(*error)
        finally:
            metered._phase = self._outer
            metered.traffic.phase_seconds[self._name] += time.perf_counter() - self._start
