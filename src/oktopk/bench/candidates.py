"""The methods as candidates: one exchange of a flat gradient, or a whole DDP step of a model, by each of them."""

import io
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from oktopk.algorithms import Algorithm
from oktopk.bench.methods import METHODS, AllReduce, Entry, Method, Ours, PowerSgd
from oktopk.bench.models import POOL, Model, load_model, make_pool
from oktopk.bench.rounds import Candidate, Samples, take_turns
from oktopk.bench.sharded import make_mesh, shard_
from oktopk.bench.summary import Sample
from oktopk.comm import MeteredComm, ProcessGroupComm
from oktopk.ddp.attach import Attached, attach
from oktopk.reducer import Reducer

BOUND = Entry("no exchange")
"""Forward and backward under no_sync(), which no method can beat."""

START_POWERSGD_ITER = 2
"""Minimum that PowerSGD's error feedback allows: the steps before are dense."""

CASTS = {
    torch.float16: default_hooks.fp16_compress_hook,
    torch.bfloat16: lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
}
"""Hooks by dtype. Under its own name DDP registers the second for NCCL alone, although gloo sums bfloat16."""

MATRIX_SIDE = 2048
"""Largest side of the matrices that the gradient is cut into for PowerSGD."""


def time_exchange(numel: int, entries: Sequence[Entry], samples: Samples) -> list[list[Sample]]:
    """Return the samples of each entry on this rank."""
    pool, scratch = make_pool(numel), torch.zeros(numel)
    return take_turns([_candidate(entry, pool, scratch) for entry in entries], samples)


def _candidate(entry: Entry, pool: Sequence[Tensor], scratch: Tensor) -> Candidate:
    """Return the candidate that exchanges the gradients of `pool` in turn, into `scratch` unless it is PowerSGD."""
    method = METHODS[entry.method]
    if isinstance(method, Ours):
        return _Reduction(method.make(entry.density), pool, scratch)
    return _Sum(method.dtype, pool, scratch) if isinstance(method, AllReduce) else _LowRank(method, pool)


class _Reduction(Candidate):
    """One `Reducer.all_reduce` into a result that is allocated."""

    def __init__(self, algorithm: Algorithm, pool: Sequence[Tensor], scratch: Tensor) -> None:
        self.pool, self.out = pool, scratch
        self.reducer = Reducer(algorithm, ProcessGroupComm())

    def run(self, number: int) -> None:
        self.reducer.all_reduce(self.pool[number % len(self.pool)], out=self.out)

    def account(self) -> Sample:
        assert self.reducer.last is not None
        return {"record_bytes": self.reducer.last.sent_bytes, "parts": dict(self.reducer.last.seconds)}


class _Sum(Candidate):
    """`all_reduce` in place, as DDP does it: float32 is in its bucket already, and nothing divides by P.

    Another dtype is cast into a buffer that is allocated, summed, and cast back.
    """

    def __init__(self, dtype: torch.dtype, pool: Sequence[Tensor], scratch: Tensor) -> None:
        self.pool, self.out, self.comm = pool, scratch, MeteredComm(ProcessGroupComm())
        self.narrow = None if dtype == scratch.dtype else torch.zeros(len(scratch), dtype=dtype)

    def prepare(self, number: int) -> None:
        if self.narrow is None:
            self.out.copy_(self.pool[number % len(self.pool)])

    def run(self, number: int) -> None:
        if self.narrow is None:
            self.comm.all_reduce(self.out)
            return
        self.narrow.copy_(self.pool[number % len(self.pool)])
        self.comm.all_reduce(self.narrow)
        self.out.copy_(self.narrow)

    def account(self) -> Sample:
        return {"record_bytes": self.comm.pop().sent_bytes, "parts": {}}


class _LowRank(Candidate):
    """PowerSGD's hook under a DDP whose backward hands the gradient over, with one copy into DDP's bucket."""

    def __init__(self, method: PowerSgd, pool: Sequence[Tensor]) -> None:
        shapes = matrices_of(len(pool[0]))
        sizes = [rows * columns for rows, columns in shapes]
        self.grads = [
            [part.view(shape) for part, shape in zip(torch.split(grad, sizes), shapes, strict=True)] for grad in pool
        ]
        self.model = wrap(Matrices(shapes), method)

    def prepare(self, number: int) -> None:  # noqa: ARG002
        self.model.zero_grad()

    def run(self, number: int) -> None:
        torch.autograd.backward(self.model(), self.grads[number % len(self.grads)])


class Matrices(nn.Module):
    """Parameters of these shapes, which are the outputs, too: their gradients are handed over in backward."""

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self) -> list[Tensor]:
        """Return the matrices."""
        return [matrix.view_as(matrix) for matrix in self.matrices]


def matrices_of(numel: int) -> list[tuple[int, int]]:
    """Return shapes that add up to `numel` elements, as square as possible."""
    side = min(MATRIX_SIDE, int(numel**0.5))
    rows, rest = divmod(numel, side)
    shapes = [(min(side, rows - first), side) for first in range(0, rows, side)]
    return shapes + ([(1, rest)] if rest else [])


def time_step(model: str, batch: int, shard: int, entries: Sequence[Entry], samples: Samples) -> list[list[Sample]]:
    """Return the samples of each entry on this rank."""
    loaded = load_model(model)
    steps = [_Step(entry, loaded, batch, shard) for entry in entries]
    try:
        return take_turns(steps, samples)
    finally:
        for step in steps:
            if step.attached:
                step.attached.detach()


class _Step(Candidate):
    """A copy of the model under DDP, or sharded by FSDP, with one method."""

    def __init__(self, entry: Entry, loaded: Model, batch: int, shard: int) -> None:
        self.loss = loaded.loss
        self.batches = [loaded.inputs(batch, seed=100 * dist.get_rank() + i) for i in range(POOL)]
        method = METHODS.get(entry.method)
        net, mesh = share_weights(loaded.net), make_mesh(shard) if shard > 1 else None
        self.model: nn.Module = wrap(net, method) if mesh is None else shard_(net, method, mesh)
        replicas = None if mesh is None else mesh["replicate"]
        self.attached = _attach(self.model, method, entry.density, replicas) if isinstance(method, Ours) else None
        self.no_sync = entry == BOUND
        self.forward_s = self.backward_s = 0.0

    def prepare(self, number: int) -> None:  # noqa: ARG002
        self.model.zero_grad()

    def run(self, number: int) -> None:
        inputs, targets = self.batches[number % POOL]
        syncing: AbstractContextManager[None] = nullcontext()
        if self.no_sync and isinstance(self.model, DistributedDataParallel):
            syncing = self.model.no_sync()
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


def share_weights(net: nn.Module) -> nn.Module:
    """Return a copy that shares the memory of the weights, which no step changes."""
    copy = deepcopy(net)
    for mine, shared in zip(copy.parameters(), net.parameters(), strict=True):
        mine.data = shared.data
    return copy


def _attach(model: nn.Module, method: Ours, density: float | None, mesh: DeviceMesh | None) -> Attached:
    with redirect_stderr(io.StringIO()) as printed:  # the bar is on the same terminal
        attached = attach(model, method.make(density), dense_steps=0, mesh=mesh)
    sys.stderr.writelines(f"{line}\n" for line in printed.getvalue().splitlines() if "WARNING" in line)
    return attached


def wrap(net: nn.Module, method: Method | None, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """Return DDP, with a rival method's hook, around a net that has the same weights on all ranks: none are sent.

    PowerSGD needs one bucket. Its hook starts collectives from callbacks, which gloo runs in threads of its own:
    with several buckets each rank would start them in another order.
    """
    num_bytes = sum(p.numel() * p.element_size() for p in net.parameters())
    megabytes = 1 + num_bytes / 2**20 if isinstance(method, PowerSgd) else None
    model = DistributedDataParallel(
        net, gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=megabytes, process_group=group
    )
    if isinstance(method, PowerSgd):
        state = powerSGD_hook.PowerSGDState(group, method.rank, start_powerSGD_iter=START_POWERSGD_ITER)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif isinstance(method, AllReduce) and method.dtype != torch.float32:
        model.register_comm_hook(None, CASTS[method.dtype])
    return model
