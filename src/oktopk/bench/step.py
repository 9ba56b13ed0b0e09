"""`oktopk bench step`: a whole DDP step of a model (forward, backward, exchange), by each method."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk.bench.gradients import POOL
from oktopk.bench.hooks import hook_cast, hook_powersgd, wrap
from oktopk.bench.methods import METHODS, AllReduce, Entry, Ours, PowerSgd
from oktopk.bench.models import Model, load_model
from oktopk.bench.rounds import Sample, Samples, take_turns
from oktopk.ddp.attach import Attached, attach

BOUND = Entry("no exchange")
"""Forward and backward under no_sync(), which no method can beat."""


def time_step(model: str, batch: int, entries: Sequence[Entry], samples: Samples) -> list[list[Sample]]:
    """Return the samples of each entry on this rank."""
    loaded = load_model(model)
    steps = [_Step(entry, loaded, batch) for entry in entries]
    try:
        return take_turns(steps, samples)
    finally:
        for step in steps:
            step.close()


class _Step:
    """A copy of the model under DDP, with one method."""

    def __init__(self, entry: Entry, loaded: Model, batch: int) -> None:
        self.loss = loaded.loss
        self.batches = [loaded.inputs(batch, seed=100 * dist.get_rank() + i) for i in range(POOL)]
        self.model = wrap(_copy(loaded.net), one_bucket=isinstance(METHODS.get(entry.method), PowerSgd))
        self.attached = _arrange(self.model, entry)
        self.no_sync = entry == BOUND
        self.forward_s = self.backward_s = 0.0

    def prepare(self, number: int) -> None:  # noqa: ARG002
        self.model.zero_grad()

    def run(self, number: int) -> None:
        inputs, targets = self.batches[number % POOL]
        syncing: AbstractContextManager[None] = self.model.no_sync() if self.no_sync else nullcontext()
        with syncing:
            start = time.perf_counter()
            loss = self.loss(self.model(*inputs), targets)
            between = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
        self.forward_s, self.backward_s = between - start, time.perf_counter() - between

    def account(self) -> Sample:
        parts = {"forward": self.forward_s, "backward": self.backward_s}
        record = self.attached.last if self.attached else None
        if record is None:
            return {"record_bytes": 0 if self.no_sync else None, "parts": parts}
        assert record.wait_seconds is not None
        return {"record_bytes": record.sent_bytes, "parts": {**parts, "wait": record.wait_seconds, **record.seconds}}

    def close(self) -> None:
        if self.attached:
            self.attached.detach()


def _copy(net: nn.Module) -> nn.Module:
    """Return a copy that shares the memory of the weights, which no step changes."""
    copy = deepcopy(net)
    for mine, shared in zip(copy.parameters(), net.parameters(), strict=True):
        mine.data = shared.data
    return copy


def _arrange(model: DistributedDataParallel, entry: Entry) -> Attached | None:
    """Make the model exchange its gradients by the entry's method."""
    method = METHODS.get(entry.method)
    if isinstance(method, PowerSgd):
        hook_powersgd(model, method.rank)
    elif isinstance(method, AllReduce) and method.dtype != torch.float32:
        hook_cast(model, method.dtype)
    elif isinstance(method, Ours):
        assert entry.density is not None
        with redirect_stderr(io.StringIO()) as printed:  # the bar is on the same terminal
            attached = attach(model, method.make(entry.density), dense_steps=0)
        sys.stderr.writelines(f"{line}\n" for line in printed.getvalue().splitlines() if "WARNING" in line)
        return attached
    return None
