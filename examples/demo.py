"""What does Ok-Topk do to a training run? Half a minute: a small net, 4 workers, and what each of them sent.

    python examples/demo.py

Four processes train one net on what a fixed random net, the teacher, says about random inputs. The first steps average
the whole gradient; the others deliver about one percent of it a step and keep the rest for later.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import oktopk

WORKERS = 4
DENSITY = 0.01
STEPS = 240
DENSE_STEPS = 32
BATCH = 64
"""Examples a worker sees in a step."""
LEARNING_RATE = 0.6
FEATURES, HIDDEN, CLASSES = 64, 448, 10
HELD_OUT = 4096
"""Examples that nobody trains on."""
TEACHER_SEED, NET_SEED, HELD_OUT_SEED = 1, 2, 3
LAST = 20
"""Steps over which a loss is averaged: one batch's says little."""
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
DEADLINE_S = 300.0
READ_NEXT = '"What you can rely on" and "Use it" in README.md, then docs/accounting.md for what each figure means'


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    dense_steps = min(DENSE_STEPS, args.steps // 2)
    announce(args.steps, dense_steps)
    with tempfile.TemporaryDirectory() as folder:
        run_workers(worker, WORKERS, folder, args.steps, dense_steps, args.json)


def announce(steps: int, dense_steps: int) -> None:
    """Say what is going to happen, before anything does."""
    print(
        f"A net of {num_parameters(make_net()):,} parameters on {WORKERS} workers (gloo processes on this machine):\n"
        f"  {dense_steps} dense steps, then {steps - dense_steps} steps of Ok-Topk at density {DENSITY:g}, "
        f"{BATCH} examples a worker and step.",
        flush=True,
    )


def run_workers(work: Callable[..., None], size: int, *args: Any) -> None:
    """Run `work(rank, size, *args)` on processes; the first that raises, or the deadline, ends all."""
    context = mp.spawn(work, args=(size, *args), nprocs=size, join=False)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the workers did not end within {DEADLINE_S:g} s")
    finally:
        for process in context.processes:
            process.kill()


def worker(rank: int, size: int, folder: str, steps: int, dense_steps: int, summary: Path | None) -> None:
    """One of the processes: set up, train, compare, and on rank 0 report."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    try:
        comm = oktopk.ProcessGroupComm()
        net = make_net()
        before = held_out_accuracy(net)
        history = train(net, comm, steps, dense_steps)
        losses = comm.all_reduce(torch.tensor(history.losses)) / size
        identical = same_weights_everywhere(net, comm)
        if rank == 0:
            result = summarize(history, losses.tolist(), before, held_out_accuracy(net), identical)
            report(result)
            if summary is not None:
                summary.write_text(json.dumps(result, allow_nan=False) + "\n")
        if not identical:
            raise RuntimeError("the workers hold different weights; they should agree in every bit")
    finally:
        dist.destroy_process_group()


@dataclass
class History:
    """What one worker saw, step by step."""

    losses: list[float] = field(default_factory=list)
    records: list[oktopk.StepRecord] = field(default_factory=list)


def train(net: nn.Module, comm: oktopk.Comm, steps: int, dense_steps: int) -> History:
    """Train `net` for `steps` steps, the same on all ranks, and return what happened on this one."""
    dense = oktopk.Reducer(oktopk.Dense(), comm)
    sparse = oktopk.Reducer(oktopk.OkTopk(density=DENSITY), comm)
    teacher, generator = make_teacher(), torch.Generator().manual_seed(1000 + comm.rank)
    history = History()
    for step in range(steps):
        reducer = dense if step < dense_steps else sparse
        loss = gradient_step(net, reducer, *labelled(teacher, BATCH, generator))
        assert reducer.last is not None
        history.losses.append(loss)
        history.records.append(reducer.last)
        if comm.rank == 0:
            tell(history, steps, dense_steps)
    return history


def gradient_step(net: nn.Module, reducer: oktopk.Reducer, inputs: Tensor, labels: Tensor) -> float:
    """Move the weights against the mean of all workers' gradients, and return this worker's loss."""
    weights = parameters_to_vector(net.parameters())
    loss = nn.functional.cross_entropy(net(inputs), labels)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    mean = reducer.all_reduce(parameters_to_vector(grads))  # all that data parallelism takes, dense or sparse
    vector_to_parameters(weights.detach() - LEARNING_RATE * mean, net.parameters())
    return loss.item()


def tell(history: History, steps: int, dense_steps: int) -> None:
    """Print the first sparse step, and ten times in all how it goes."""
    step, record = len(history.records), history.records[-1]
    if step == dense_steps + 1:
        print(
            f"  first sparse step: sparsity {record.sparsity:.2%}, "
            f"{record.nnz:,} of {record.numel:,} elements, {record.sent_bytes:,} bytes sent by this worker",
            flush=True,
        )
    if step % max(steps // 10, 1) == 0 or step == steps:
        print(f"  step {step:>4}/{steps}  {record.phase:<6}  loss {fmean(history.losses[-LAST:]):.3f}", flush=True)


def same_weights_everywhere(net: nn.Module, comm: oktopk.Comm) -> bool:
    """Whether all ranks' weights have the same bits, by their hashes."""
    digest = hashlib.sha256(parameters_to_vector(net.parameters()).detach().numpy().tobytes()).digest()
    every = comm.all_gather(torch.tensor(list(digest)))
    return bool((every == every[0]).all())


def make_net() -> nn.Module:
    """Return the net that learns, with the same weights in every process."""
    return _perceptron([FEATURES, HIDDEN, HIDDEN, CLASSES], NET_SEED)


def make_teacher() -> nn.Module:
    """Return the net that says what is right."""
    return _perceptron([FEATURES, CLASSES * 2, CLASSES], TEACHER_SEED).requires_grad_(False)


def _perceptron(widths: list[int], seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def num_parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def labelled(teacher: nn.Module, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return fresh inputs and the teacher's class for each."""
    inputs = torch.randn(count, FEATURES, generator=generator)
    return inputs, teacher(inputs).argmax(1)


@torch.no_grad()
def held_out_accuracy(net: nn.Module) -> float:
    inputs, labels = labelled(make_teacher(), HELD_OUT, torch.Generator().manual_seed(HELD_OUT_SEED))
    return (net(inputs).argmax(1) == labels).float().mean().item()


def summarize(history: History, losses: list[float], before: float, after: float, identical: bool) -> dict[str, Any]:
    """Return what the table shows, as plain numbers; what could not be measured is None."""
    phases = {}
    for phase in ("dense", "sparse"):
        which = [i for i, record in enumerate(history.records) if record.phase == phase]
        phases[phase] = _phase_summary([history.records[i] for i in which], [losses[i] for i in which])
    return {
        "parameters": history.records[0].numel,
        "workers": WORKERS,
        "steps": len(losses),
        "compressed_steps": sum(r.phase == "sparse" and not r.skipped for r in history.records),
        "first_loss": losses[0],
        "accuracy_before": before,
        "accuracy_after": after,
        "same_weights": identical,
        "phases": phases,
    }


def _phase_summary(records: list[oktopk.StepRecord], losses: list[float]) -> dict[str, Any]:
    ratios = [record.compression_ratio for record in records if record.compression_ratio is not None]
    names = dict.fromkeys(name for record in records for name in record.seconds)
    return {
        "steps": len(records),
        "loss_at_end": fmean(losses[-LAST:]),
        "sparsity": fmean(record.sparsity for record in records),
        "compression_ratio": fmean(ratios) if ratios else None,
        "sent_bytes": fmean(record.sent_bytes for record in records),
        "seconds": {name: fmean(record.seconds.get(name, 0.0) for record in records) for name in names},
    }


def report(result: dict[str, Any]) -> None:
    """Print the table and what it amounts to."""
    dense, sparse = result["phases"]["dense"], result["phases"]["sparse"]
    table = Table(title="measured on rank 0, means over steps")
    for column in ("", "dense steps", "Ok-Topk steps"):
        table.add_column(column, justify="right" if column else "left")
    for name, show in _ROWS.items():
        table.add_row(name, show(dense, dense), show(sparse, dense))
    for name in _phases_in_order(dense["seconds"], sparse["seconds"]):
        table.add_row(f"ms a step: {name}", _ms(dense["seconds"].get(name)), _ms(sparse["seconds"].get(name)))
    Console(width=100).print(table)
    print(
        f"loss {result['first_loss']:.3f} -> {sparse['loss_at_end']:.3f}, held-out accuracy "
        f"{result['accuracy_before']:.1%} -> {result['accuracy_after']:.1%}\n"
        f"all {result['workers']} workers hold the same weights, bit for bit: "
        f"{'yes' if result['same_weights'] else 'NO'}\n"
        f"compression was active on {result['compressed_steps']} of {result['steps']} steps\n"
        f"read next: {READ_NEXT}",
        flush=True,
    )


_ROWS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "steps": lambda phase, _: f"{phase['steps']}",
    f"loss, last {LAST} steps": lambda phase, _: f"{phase['loss_at_end']:.3f}",
    "sparsity": lambda phase, _: f"{phase['sparsity']:.2%}",
    "compression ratio": lambda phase, _: _or_dash(phase["compression_ratio"], "{:.1f}"),
    "bytes sent": lambda phase, _: f"{phase['sent_bytes']:,.0f}",
    "bytes sent, over dense": lambda phase, dense: f"{phase['sent_bytes'] / dense['sent_bytes']:.1%}",
    "ms a step: all phases": lambda phase, _: _ms(sum(phase["seconds"].values())),
}


def _phases_in_order(*seconds: dict[str, float]) -> list[str]:
    order = ("accumulate", "agree", "select", "pack", "exchange", "reduce", "gather", "apply")
    seen = {name for one in seconds for name in one}
    return [name for name in order if name in seen] + sorted(seen.difference(order))


def _ms(seconds: float | None) -> str:
    return _or_dash(None if seconds is None else 1e3 * seconds, "{:.2f}")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of which at most {DENSE_STEPS} are dense")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps must be at least 2: a dense one and a sparse one")
    return args


if __name__ == "__main__":
    main()
