"""The bits of every algorithm, as digests in golden.json: a change of the code that is to change no bit changes none.

    GOLDEN=write python -m pytest -n 0 tests/test_golden.py

writes the file anew, for a change that is meant to. Gradients are integers times a power of two: their sums, and those
of their squares, are exact, so that the digests are the same on every CPU.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import oktopk
from tests.cases import device_step
from tests.ddp.harness import Worlds, attach
from tests.harness import on_threads

# Steps: LONG has every turn and every cut of regions that MIDDLE has once; SHORT is for what differs by the wire alone.
SHORT, MIDDLE, LONG = 9, 18, 34
GROWS_AT, DENSE_STEPS = 6, 4
NUMEL, LARGE = 701, 20_011  # a prime, so that no regions are equal; one that is worth compiling for
GOLDEN = Path(__file__).with_name("golden.json")


def bounded(ranking: str, wire: str, density: float = 0.03) -> Any:
    return oktopk.OkTopk(density=density, ranking=ranking, wire=wire, rescale_every=4)


def paper(ranking: str, wire: str) -> Any:
    periods = {"rethreshold_every": 4, "repartition_every": 6, "rescale_every": 4}
    return oktopk.OkTopkPaper(density=0.05, ranking=ranking, wire=wire, **periods)


BASELINES = {"topka": oktopk.TopkA, "topkdsa": oktopk.TopkDSA, "gtopk": oktopk.GTopk, "gaussiank": oktopk.GaussianK}
OKTOPK: dict[str, Callable[..., Any]] = {"oktopk-bounded": bounded, "oktopk-paper": paper}
WIRES, RANKINGS = ("fp32", "bf16", "int8"), ("magnitude", "scaled")
KINDS: dict[str, Any] = {
    "dense": oktopk.Dense(),
    **{f"{name}/{wire}": made(density=0.03, wire=wire) for name, made in BASELINES.items() for wire in WIRES},
    **{f"{n}/{r}/{w}": made(r, w) for n, made in OKTOPK.items() for r in RANKINGS for w in (*WIRES, "auto")},
    **{f"oktopk-bounded-{density}/scaled/auto": bounded("scaled", "auto", density) for density in (0.2, 1.0)},
    **{f"device/{ranking}": bounded(ranking, "fp32") for ranking in RANKINGS},
}
ON_PROCESSES = ["dense", "topka/bf16", "topkdsa/int8", "gtopk/fp32", "gaussiank/fp32", "oktopk-bounded/magnitude/auto"]
ON_PROCESSES += ["oktopk-bounded/scaled/fp32", "oktopk-paper/magnitude/bf16", "oktopk-paper/scaled/int8"]
COMPILED = ["topka/bf16", "gtopk/int8", "oktopk-bounded/scaled/auto", "oktopk-paper/scaled/int8"]
ATTACHED = {
    "oktopk": oktopk.OkTopk(),
    "oktopk-paper": paper("scaled", "int8"),
    "topka": oktopk.TopkA(density=0.03),
    "device": bounded("scaled", "fp32"),
}


def rows_of(numel: int) -> list[int]:
    rows = [0, numel // 7, numel // 5, 7, numel // 4, 1]
    return [*rows, numel - sum(rows)]


def integers(most: int, shape: tuple[int, ...], *where: int) -> Tensor:
    seed = sum(number * 1009**place for place, number in enumerate((most, *where)))
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed))


@cache
def gradient(numel: int, rank: int, step: int) -> Tensor:
    """Return heavy tails, some rows louder than others; at one step all of it grows eightfold."""
    loud = torch.arange(7).repeat_interleave(torch.tensor(rows_of(numel))) % 3
    whole = integers(6, (numel,), rank, step) ** 3 + integers(8, (numel,), rank, step)
    return (whole << loud + (3 if step >= GROWS_AT else 0)).float() * 2.0**-6


def add(digest: Any, tensors: list[Tensor], last: oktopk.StepRecord | None) -> None:
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    if last is not None:
        digest.update(f"{last.nnz} {last.selected} {last.sent_bytes};".encode())


def reduced(comm: oktopk.Comm, kind: str, numel: int = NUMEL) -> str:
    """Return the digest of what one rank sees of a run."""
    algorithm, digest = KINDS[kind], hashlib.sha256()
    segments = rows_of(numel) if getattr(algorithm, "ranking", "") == "scaled" else None
    reducer = oktopk.Reducer(algorithm, comm, segments=segments)
    is_short = numel == LARGE or not kind.endswith(
        ("magnitude/fp32", "scaled/fp32", "device/magnitude", "device/scaled")
    )
    for step in range(SHORT if is_short else LONG if comm.size == 2 else MIDDLE):
        add(digest, [reducer.all_reduce(gradient(numel, comm.rank, step))], reducer.last)
    assert reducer.residual is not None
    add(digest, [reducer.residual], None)
    return digest.hexdigest()


def reduced_by_process() -> dict[str, str]:
    return {kind: reduced(oktopk.ProcessGroupComm(), kind) for kind in ON_PROCESSES}


def trained(kind: str) -> str:
    """Return the digest of what one rank sees of a net's gradients, which are exact, too."""
    with device_step() if kind == "device" else nullcontext():
        net, digest, rank = nn.Sequential(nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 12)), hashlib.sha256(), 0
        for place, parameter in enumerate(net.parameters()):
            parameter.data = integers(2, tuple(parameter.shape), place) * 0.25
        model, rank = DDP(net, bucket_cap_mb=0.001), dist.get_rank()
        attached = attach(model, ATTACHED[kind], dense_steps=DENSE_STEPS, exclude="*.bias")
        for step in range(MIDDLE):
            model.zero_grad()
            (model(integers(3, (4, 24), rank, step) ** 3 * 1.0) * integers(3, (4, 12), rank, step)).sum().backward()
            add(digest, [p.grad for p in net.parameters() if p.grad is not None], attached.last)
        add(digest, [held for _, held in sorted(attached.residual.items())], None)
        attached.detach()
        return digest.hexdigest()


def whole(of_ranks: list[str]) -> str:
    return hashlib.sha256(" ".join(of_ranks).encode()).hexdigest()[:16]


def by_threads(kind: str) -> dict[str, str]:
    with device_step() if kind.startswith("device") else nullcontext():
        sizes = (2, 3) if kind.endswith("auto") else (1, 2, 3, 4)  # it is one of the other wires
        digests = {f"{kind}/P{size}": whole(on_threads(size, reduced, kind)) for size in sizes}
        if kind in COMPILED:
            digests[f"{kind}/P2/large"] = whole(on_threads(2, reduced, kind, LARGE))
        return digests


def by_processes(worlds: Worlds) -> dict[str, str]:
    of_ranks = {size: worlds.run(size, reduced_by_process) for size in (2, 3)}
    return {
        f"{kind}/P{size}": whole([rank[kind] for rank in of_ranks[size]]) for kind in ON_PROCESSES for size in (2, 3)
    }


def when_attached(worlds: Worlds) -> dict[str, str]:
    return {f"attach/{kind}/P2": whole(worlds.run(2, trained, kind)) for kind in ATTACHED}


def check(digests: dict[str, str], writes: bool = os.environ.get("GOLDEN") == "write") -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if writes:
        GOLDEN.write_text(json.dumps(golden | digests, indent=0) + "\n")
        return
    different = [key for key, digest in digests.items() if golden.get(key) != digest]
    assert not different, f"other bits than in {GOLDEN.name}: {', '.join(different)}"


@pytest.mark.parametrize("kind", KINDS)
def test_on_threads_the_bits_are_those_of_the_file(kind: str) -> None:
    check(by_threads(kind))


@pytest.mark.processes
def test_on_processes_the_bits_are_those_of_the_file(worlds: Worlds) -> None:
    check(by_processes(worlds), writes=False)


@pytest.mark.processes
def test_when_attached_the_bits_are_those_of_the_file(worlds: Worlds) -> None:
    check(when_attached(worlds))
