"""Local steps over slow links: the part of the time that a worker computes, and its bytes each way.

Computing is a sleep, so that eight workers may share two cores. A worker's weights move by a part of a random movement
in each step. The exchange itself, the selection included, is real.
"""

import io
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from oktopk.algorithms import Algorithm, Dense, OkTopk
from oktopk.algorithms.base import Reduced, State
from oktopk.bench.candidates import Matrices, matrices_of
from oktopk.bench.models import heavy_tailed
from oktopk.bench.netlab import received_bytes, sent_bytes
from oktopk.bench.processes import Setting
from oktopk.codec.values import num_words, read, write_
from oktopk.comm import Comm
from oktopk.ddp.local import LocalSteps
from oktopk.kernels.reference import GROUP

FRAGMENTS = 4
TIMEOUT_S = 600.0
"""Seconds that a rank waits, because 30 M elements at 10 Mbit/s take 170 s."""

METHODS = {
    "ddp": "DDP, the exchange all behind the computing",
    "dense": "local steps, float32 (DiLoCo)",
    "int8": "local steps, int8 (DiLoCo, 1 byte an element)",
    "oktopk": "local steps, OkTopk",
    "streamed": f"local steps, OkTopk in {FRAGMENTS} fragments while computing goes on",
}


@dataclass(frozen=True)
class Work:
    """The work of every worker: elements, H, seconds of computing in a step, density, and rounds of H steps."""

    numel: int
    every: int
    compute_s: float
    density: float
    rounds: int


def measure_local(setting: Setting, work: Work, methods: Sequence[str]) -> dict[str, Any]:
    """Return a row for each method: the figures of the rank that took longest."""
    ranks = setting.run(time_local, work, methods, setting.mbit is not None)
    rows = [max(rows, key=lambda row: float(row["wall_s"])) for rows in zip(*ranks, strict=True)]
    return {"setting": str(setting), **vars(setting), "rows": rows}


def time_local(work: Work, methods: Sequence[str], in_lab: bool) -> list[dict[str, Any]]:
    """Return a row for each method, as this rank sees it."""
    return [{"method": method, **_time(method, work, in_lab)} for method in methods]


def _time(method: str, work: Work, in_lab: bool) -> dict[str, Any]:
    steps = _Ddp(work) if method == "ddp" else _Local(method, work)
    steps.warm_up()
    dist.barrier()
    before = (sent_bytes(), received_bytes()) if in_lab else (0, 0)
    start, count = time.perf_counter(), steps.run()
    wall_s = time.perf_counter() - start
    dist.barrier()
    after = (sent_bytes(), received_bytes()) if in_lab else (0, 0)
    up, down = ((b - a) / count if in_lab else None for a, b in zip(before, after, strict=True))
    steps.close()
    utilisation = count * work.compute_s / wall_s
    return {"steps": count, "wall_s": wall_s, "utilisation": utilisation, "up_bytes": up, "down_bytes": down}


class _Ddp:
    """One all_reduce for each step, which starts with the computing: DDP at its best."""

    def __init__(self, work: Work) -> None:
        self.compute_s, self.grad = work.compute_s, heavy_tailed(work.numel, seed=dist.get_rank())
        self.group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))

    def warm_up(self) -> None:
        """Connect the ranks."""
        dist.all_reduce(torch.zeros(1000), group=self.group)

    def run(self) -> int:
        """Make a step, and return 1."""
        pending = dist.all_reduce(self.grad, group=self.group, async_op=True)
        time.sleep(self.compute_s)
        assert pending is not None
        pending.wait()
        return 1

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self.group)


class _Local:
    """Rounds of H steps, each of which ends with the exchange of all that moved."""

    def __init__(self, method: str, work: Work) -> None:
        self.work, self.net = work, Matrices(matrices_of(work.numel))
        drift = torch.split(heavy_tailed(work.numel, seed=dist.get_rank()), [p.numel() for p in self.net.parameters()])
        self.drift: list[Tensor] = list(drift)
        streams = method == "streamed"
        fragments = min(FRAGMENTS, work.every, len(self.drift)) if streams else 1
        with redirect_stderr(io.StringIO()):
            self.local = LocalSteps(
                self.net,
                torch.optim.SGD(self.net.parameters()),
                _algorithm(method, work.density),
                every=work.every,
                fragments=fragments,
                delay=work.every // fragments if streams else 0,
                timeout=TIMEOUT_S,
            )

    def warm_up(self) -> None:
        """Make buffers and thresholds in a round without computing; a dense round has none to make."""
        if self.local.density is not None:
            self._round(0.0)

    def run(self) -> int:
        """Make the rounds, and return the number of their steps."""
        for _ in range(self.work.rounds):
            self._round(self.work.compute_s)
        self.local.state_dict()  # waits for an exchange that is under way
        return self.work.rounds * self.work.every

    @torch.no_grad()
    def _round(self, compute_s: float) -> None:
        for step in range(self.work.every):
            time.sleep(compute_s)
            for weight, drift in zip(self.net.parameters(), self.drift, strict=True):
                part = slice(step * len(drift) // self.work.every, (step + 1) * len(drift) // self.work.every)
                weight.view(-1)[part] += drift[part]
            self.local.advance()

    def close(self) -> None:
        """Detach."""
        self.local.detach()


def _algorithm(method: str, density: float) -> Algorithm:
    return {"dense": Dense(), "int8": Int8()}.get(method, OkTopk(density=density))


class Int8(Algorithm):
    """All elements in int8, as DiLoCo is run in practice: a reduce-scatter and a gather, with a rounding in each."""

    def reduce(self, acc: Tensor, state: State, comm: Comm) -> Reduced:
        """Return the sum of everything, rounded."""
        part = GROUP * -(-len(acc) // (comm.size * GROUP))
        parts = pad(acc, (0, part * comm.size - len(acc))).view(comm.size, part)
        with comm.phase("exchange"):
            arrived = comm.all_to_all(torch.stack([_in_int8(each) for each in parts]))
        mine = torch.stack([read("int8", each, part, acc.dtype) for each in arrived]).sum(0)
        with comm.phase("gather"):
            sums = comm.all_gather(_in_int8(mine))
        state.step += 1
        total = torch.cat([read("int8", each, part, acc.dtype) for each in sums])
        return Reduced(total[: len(acc)], taken=slice(None))


def _in_int8(value: Tensor) -> Tensor:
    words = torch.zeros(num_words("int8", len(value)), dtype=torch.int32)
    write_("int8", words, value)
    return words
