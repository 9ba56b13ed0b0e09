"""P ranks as threads of one process: every algorithm at any P, in milliseconds, with the same bits as on gloo."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from oktopk.comm.base import Comm, Pending
from oktopk.errors import MismatchError, PeerError, within

T = TypeVar("T")
U = TypeVar("U")

SEGMENT_BYTES = 1 << 20
"""Bytes of the largest piece in which gloo's ring passes a sum on."""


def run_local(size: int, fn: Callable[[LocalComm], T], *, timeout: float = 60.0) -> list[T]:
    """Return `[fn(comm) for each of `size` ranks]`, run as threads; the first rank that raises ends all.

    No wait inside a collective lasts longer than `timeout` seconds.

    >>> run_local(3, lambda comm: int(comm.all_reduce(torch.tensor([comm.rank]))))
    [3, 3, 3]
    """
    within("the number of ranks", size, 1)
    meeting = _Meeting(size, timeout)
    results: list[T | None] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = fn(LocalComm(rank, meeting))
            meeting.leave(rank)
        except BaseException as error:  # whatever ends this rank has to end the others
            meeting.fail(rank, error)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failure is not None:
        raise meeting.failure[1]
    return results  # type: ignore[return-value]


class LocalComm(Comm):
    """One of the ranks of `run_local`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_reduce(self, tensor: Tensor) -> Tensor:
        every = self._share("all_reduce", tensor)
        total = _ring_sum(every) if self.rank == 0 else None
        # The second meeting also keeps everyone from overwriting what rank 0 still reads.
        return tensor.copy_(self._meeting.meet(self.rank, "all_reduce", total)[0])  # type: ignore[arg-type]

    def all_gather(self, block: Tensor) -> Tensor:
        return torch.stack(self._share("all_gather", block.clone()))

    def all_to_all_single(self, blocks: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        every = self._meeting.meet(self.rank, "all_to_all", torch.split(blocks.clone(), list(send)))
        came = [parts[self.rank] for parts in every]
        if [len(part) for part in came] != list(receive):
            raise MismatchError(f"rank {self.rank} waits for {list(receive)}, sent are {[len(p) for p in came]}")
        return torch.cat(came)

    def sendrecv(
        self, block: Tensor | None, to: int, source: int, size: int, device: torch.device | str = "cpu"
    ) -> Pending:
        if block is not None:
            self._meeting.post(self.rank, to, block.clone())
        if not size:
            return Pending(lambda: torch.empty(0, dtype=torch.int32, device=device))
        return Pending(lambda: self._meeting.collect(source, self.rank, size))

    def fail(self, error: BaseException) -> None:
        self._meeting.fail(self.rank, error)

    def _share(self, what: str, tensor: Tensor) -> list[Tensor]:
        every = self._meeting.meet(self.rank, what, tensor)
        if any(other.shape != tensor.shape for other in every):
            raise MismatchError(f"{what} wants one shape, not {[tuple(other.shape) for other in every]}")
        return every


class _Meeting:
    """Where the threads meet: one collective at a time, messages at any time, and no wait without an end."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.failure: tuple[int, BaseException] | None = None
        self._change = threading.Condition()
        self._brought: dict[int, tuple[str, object]] = {}
        self._round = 0
        self._result: list[object] = []
        self._gone: set[int] = set()
        self._messages: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def meet(self, rank: int, what: str, thing: U) -> list[U]:
        """Return the arguments of every rank to this collective, in rank order."""
        with self._change:
            mine = self._round
            self._brought[rank] = (what, thing)
            if len(self._brought) == self.size:
                self._close_round()
            self._wait(lambda: self._round > mine, what, set(range(self.size)))
            return self._result  # type: ignore[return-value]

    def post(self, source: int, to: int, block: Tensor) -> None:
        with self._change:
            self._messages[source, to].append(block)
            self._change.notify_all()

    def collect(self, source: int, to: int, size: int) -> Tensor:
        with self._change:
            self._wait(lambda: bool(self._messages[source, to]), f"a block from rank {source}", {source})
            block = self._messages[source, to].popleft()
        if len(block) != size:
            raise MismatchError(f"waited for {size} words from rank {source}, {len(block)} came")
        return block

    def leave(self, rank: int) -> None:
        with self._change:
            self._gone.add(rank)
            self._change.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        with self._change:
            self.failure = self.failure or (rank, error)
            self._change.notify_all()

    def _close_round(self) -> None:
        names = {what for what, _ in self._brought.values()}
        if len(names) > 1:
            calls = ", ".join(f"rank {rank}: {what}" for rank, (what, _) in sorted(self._brought.items()))
            raise MismatchError(f"the ranks are in different collectives: {calls}")
        self._result = [self._brought[rank][1] for rank in range(self.size)]
        self._brought = {}
        self._round += 1
        self._change.notify_all()

    def _wait(self, ready: Callable[[], bool], what: str, needed: set[int]) -> None:
        def over() -> bool:
            return ready() or self.failure is not None or bool(self._gone & needed)

        in_time = self._change.wait_for(over, self.timeout)
        if ready():
            return
        if self.failure is not None:
            rank, error = self.failure
            raise PeerError(f"rank {rank} failed: {type(error).__name__}: {error}")
        if in_time:
            raise PeerError(f"rank {min(self._gone & needed)} returned while others wait in {what}")
        raise PeerError(f"waited {self.timeout:g} s in {what}")


def _ring_sum(every: list[Tensor]) -> Tensor:
    """Return the sum as a ring makes it: block b starts at rank b - 1 and goes down, so that its bits are gloo's."""
    size, numel = len(every), every[0].numel()
    pieces = max(-(-numel * every[0].element_size() // SEGMENT_BYTES), 2 * size)
    per_rank = -(-pieces // size)
    length = max(-(-numel // (size * per_rank)), 1) * per_rank
    blocks = list(zip(*(torch.split(tensor, length) for tensor in every), strict=True))
    sums = []
    for b, block in enumerate(blocks):
        total = block[(b - 1) % size].clone()
        for step in range(1, size):
            total += block[(b - 1 - step) % size]
        sums.append(total)
    return torch.cat(sums) if sums else every[0].clone()
