"""`MeteredComm`: counts the bytes and messages of a comm from outside, so that no algorithm counts for itself."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from oktopk.comm.base import Comm, Pending

T = TypeVar("T")


@dataclass
class Traffic:
    """The bytes and messages of one rank. Keys are (phase, collective). A block for oneself is no traffic.

    An all_reduce counts as a ring: 2 (P - 1) messages of 1 / P of the tensor each. The others count as one message
    for each peer that gets something.
    """

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sizes: defaultdict[tuple[str, str], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
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
        for name in ("sent", "received", "calls", "phase_seconds"):
            mine = getattr(self, name)
            for key, amount in getattr(other, name).items():
                mine[key] += amount
        for key, sizes in other.sizes.items():
            self.sizes[key].update(sizes)


class MeteredComm:
    """A comm that counts. `pop()` returns the traffic since the last `pop()`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._phase = "other"
        self.rank, self.size = comm.rank, comm.size
        self.traffic = Traffic()

    def pop(self) -> Traffic:
        """Return the traffic counted so far, and start again."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._counted(self._comm.all_reduce(tensor), "all_reduce", self._ring_sizes(tensor))

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        return self._counted(self._comm.start_all_reduce(tensor), "all_reduce", self._ring_sizes(tensor))

    def _ring_sizes(self, tensor: Tensor) -> list[int]:
        """Return the sizes of the messages of a ring: a rank passes on every block but one in each half."""
        if self.size == 1:
            return []
        edges = [i * tensor.numel() // self.size for i in range(self.size + 1)]
        blocks = [(b - a) * tensor.element_size() for a, b in itertools.pairwise(edges)]
        return [size for half in (1, 2) for i, size in enumerate(blocks) if i != (self.rank + half) % self.size]

    def all_gather(self, block: Tensor) -> Tensor:
        return self._counted(self._comm.all_gather(block), "all_gather", [block.nbytes] * (self.size - 1))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        arrived, width = self._comm.all_to_all_single(blocks, send, receive), blocks.element_size()
        sent = [count * width for peer, count in enumerate(send) if peer != self.rank]
        return self._counted(arrived, "all_to_all_single", sent, (sum(receive) - receive[self.rank]) * width)

    def all_to_all(self, blocks: Tensor) -> Tensor:
        return self._counted(self._comm.all_to_all(blocks), "all_to_all", [blocks[0].nbytes] * (self.size - 1))

    def all_to_all_v(self, blocks: Sequence[Tensor], most: int | None = None) -> list[Tensor]:
        result = self._comm.all_to_all_v(blocks, most)
        ours, theirs = ([each.nbytes for i, each in enumerate(them) if i != self.rank] for them in (blocks, result))
        sizes = [torch.int64.itemsize] * (self.size - 1)
        return self._counted(result, "all_to_all_v", [*sizes, *ours], sum(sizes) + sum(theirs))

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        pending, sent = self._comm.sendrecv(block, to, source, size, device), [] if block is None else [block.nbytes]
        return self._counted(pending, "sendrecv", sent, size * torch.int32.itemsize)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _Phase(self, name)

    def fail(self, error: BaseException) -> None:
        self._comm.fail(error)

    def _counted(self, result: T, collective: str, sent: Sequence[int], received: int | None = None) -> T:
        """Count a call that returned `result`: the sizes of the messages it sent, and the bytes it received.

        By default it received as many. A call that raises is not counted.
        """
        key, traffic = (self._phase, collective), self.traffic
        traffic.calls[key] += 1
        traffic.sent[key] += sum(sent)
        traffic.received[key] += sum(sent) if received is None else received
        traffic.sizes[key].update(size for size in sent if size)
        return result


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
