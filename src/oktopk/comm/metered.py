"""`MeteredComm`: counts what passes through a comm, from outside, so that no algorithm counts for itself."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oktopk.comm.base import Comm, Pending

UNNAMED = "other"


@dataclass
class Traffic:
    """What one rank sent and received. Keys are (phase, collective); a block for oneself is no traffic.

    An all_reduce counts as what a ring sends, 2 (P - 1) messages of 1 / P of the tensor each; the others as one
    message for each peer that gets something.
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
    """A comm that counts. `take()` returns the traffic since the last `take()`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._phase = UNNAMED
        self.rank, self.size = comm.rank, comm.size
        self.traffic = Traffic()

    def pop(self) -> Traffic:
        """Return what was counted, and start again."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Comm`."""
        start = time.perf_counter()
        result = self._comm.all_reduce(tensor)
        self._count_ring(tensor, start)
        return result

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """See `Comm`."""
        start = time.perf_counter()
        pending = self._comm.start_all_reduce(tensor)
        self._count_ring(tensor, start)
        return pending

    def _count_ring(self, tensor: Tensor, start: float) -> None:
        edges = [i * tensor.numel() // self.size for i in range(self.size + 1)]
        blocks = [(b - a) * tensor.element_size() for a, b in itertools.pairwise(edges)]
        # In a ring, rank r passes on every block but one in each half.
        sent = [size for half in (1, 2) for i, size in enumerate(blocks) if i != (self.rank + half) % self.size]
        self._count("all_reduce", sent if self.size > 1 else [], sum(sent) if self.size > 1 else 0, start)

    def all_gather(self, block: Tensor) -> Tensor:
        """See `Comm`."""
        start = time.perf_counter()
        result = self._comm.all_gather(block)
        sent = [block.numel() * block.element_size()] * (self.size - 1)
        self._count("all_gather", sent, sum(sent), start)
        return result

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Comm`."""
        start = time.perf_counter()
        result = self._comm.all_to_all_single(blocks, send, receive)
        width = blocks.element_size()
        sent = [count * width for peer, count in enumerate(send) if peer != self.rank]
        self._count("all_to_all_single", sent, (sum(receive) - receive[self.rank]) * width, start)
        return result

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """See `Comm`."""
        start = time.perf_counter()
        result = self._comm.all_to_all(blocks)
        sent = [blocks[0].nbytes] * (self.size - 1)
        self._count("all_to_all", sent, sum(sent), start)
        return result

    def all_to_all_v(self, blocks: Sequence[Tensor], most: int | None = None) -> list[Tensor]:
        """See `Comm`."""
        start = time.perf_counter()
        result = self._comm.all_to_all_v(blocks, most)
        ours = [block.numel() * block.element_size() for peer, block in enumerate(blocks) if peer != self.rank]
        theirs = [block.numel() * block.element_size() for peer, block in enumerate(result) if peer != self.rank]
        sizes = [torch.int64.itemsize] * (self.size - 1)
        self._count("all_to_all_v", [*sizes, *ours], sum(sizes) + sum(theirs), start)
        return result

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        """See `Comm`."""
        start = time.perf_counter()
        pending = self._comm.sendrecv(block, to, source, size, device)
        sent = [] if block is None else [block.numel() * block.element_size()]
        self._count("sendrecv", sent, size * torch.int32.itemsize, start)
        return pending

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See `Comm`."""
        return _Phase(self, name)

    def fail(self, error: BaseException) -> None:
        """See `Comm`."""
        self._comm.fail(error)

    def _count(self, collective: str, sent: Sequence[int], received: int, start: float) -> None:
        self.traffic.count_((self._phase, collective), sent, received, time.perf_counter() - start)


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
