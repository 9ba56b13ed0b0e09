"""What does the exchange add to a DDP training step on one GPU?

    python -m benchmarks.device_step --model lstman4 --batch 16

One rank over NCCL: nothing travels, so that what is left is what selecting costs. Plain DDP and attachments take
turns; a step is forward, backward and the optimizer's, and its time ends when the GPU is done. A few steps are timed
as one, as a training makes them. Hosts are noisy: what counts is the median over many rounds of how much longer a
round's steps took than plain DDP's in the same round, with its range. Last line: JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from contextlib import redirect_stderr
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.bench.models import Model, load_model
from oktopk.bench.processes import spread

RUN = 3
"""Steps that are timed as one."""

WARM_UP = 20
ALGORITHMS = {
    "plain DDP": None,
    "1 %, fp32": oktopk.OkTopk(density=0.01, wire="fp32"),
    "1 %, fp32, by magnitude": oktopk.OkTopk(density=0.01, wire="fp32", ranking="magnitude"),
    "the default": oktopk.OkTopk(),
    "the default, in int8": oktopk.OkTopk(wire="int8"),
}


class Contender:
    """A net of its own, with its optimizer."""

    def __init__(self, name: str, algorithm: oktopk.OkTopk | None, model: Model, batch: int) -> None:
        self.name = name
        inputs, self.targets = _on_gpu(model.inputs(batch, 0))
        self.inputs, self.loss = inputs, model.loss
        self.net = DistributedDataParallel(model.net.cuda(), device_ids=[0])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-6, momentum=0.9)
        self.attached = None
        if algorithm is not None:
            with redirect_stderr(io.StringIO()):
                self.attached = oktopk.attach(self.net, algorithm, dense_steps=0)

    def run(self, steps: int) -> float:
        """Return the seconds of so many steps."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.net(*self.inputs), self.targets).backward()
            self.optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    def close(self) -> None:
        """Detach."""
        if self.attached is not None:
            self.attached.detach()


def time_round(contenders: list[Contender], number: int) -> list[float]:
    """Time each of them once; another one begins in every round, since who comes first has the cooler machine."""
    seconds = [0.0] * len(contenders)
    for turn in range(len(contenders)):
        which = (turn + number) % len(contenders)
        seconds[which] = contenders[which].run(RUN)
    return seconds


def median_and_range(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and the two values between which it lies 19 times out of 20."""
    ranked, half_width = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = (round(len(values) / 2 + sign * half_width) for sign in (-1, 1))
    return median(ranked), ranked[max(low, 0)], ranked[min(high, len(ranked) - 1)]


def _on_gpu(thing: Any) -> Any:
    if isinstance(thing, tuple):
        return tuple(map(_on_gpu, thing))
    return thing.cuda() if isinstance(thing, torch.Tensor) else thing


def main(arguments: list[str] | None = None) -> None:
    """Time them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lstman4", help="as oktopk bench step has them, or module:factory")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=80, help=f"runs of {RUN} steps of each")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark wants a CUDA GPU, and there is none here; benchmarks.step times the CPU")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    contenders = [Contender(name, each, load_model(chosen.model), chosen.batch) for name, each in ALGORITHMS.items()]
    for contender in contenders:
        contender.run(WARM_UP)
    samples = [time_round(contenders, number) for number in range(chosen.rounds)]
    table = Table(title=f"a step of {chosen.model}, batch {chosen.batch}, {torch.cuda.get_device_name()}, P = 1")
    for column in ("", "median ms", "min", "max", "over plain DDP", "lies in"):
        table.add_column(column, justify="left" if not column else "right")
    rows = []
    for number, contender in enumerate(contenders):
        times, over = (
            spread([sample[number] for sample in samples]),
            [sample[number] / sample[0] - 1 for sample in samples],
        )
        middle, low, high = median_and_range(over)
        rows.append({"name": contender.name, "seconds": times, "over_plain": middle, "lies_in": [low, high]})
        milliseconds = (f"{1e3 * times[key]:.2f}" for key in ("median", "min", "max"))
        table.add_row(contender.name, *milliseconds, f"{middle:+.1%}", f"{low:+.1%} to {high:+.1%}")
        contender.close()
    dist.destroy_process_group()
    Console(width=120).print(table)
    print(json.dumps({"bench": "device_step", "model": chosen.model, "batch": chosen.batch, "rows": rows}))


if __name__ == "__main__":
    main()
