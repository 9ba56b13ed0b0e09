"""A member of the run that `oktopk bench chaos` disturbs: a small net, data by step and rank, a log of each step."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oktopk import OkTopk
from oktopk.bench.netlab import Host
from oktopk.comm.agree import digest_of
from oktopk.errors import OktopkError
from oktopk.integrations.torchft import Member, attach
from oktopk.integrations.torchft.start import Lighthouse, Patience, make_manager

INPUTS, HIDDEN, CLASSES = 32, 128, 16
BATCH, HELD_OUT = 32, 4096
LR, MOMENTUM = 0.05, 0.9
EVAL_EVERY = 50
PORT = 29510
UP = "lighthouse.up"
"""Name of the file that says that the lighthouse listens."""


def serve_lighthouse(host: Host, patience: Patience, folder: str) -> None:
    """Run the lighthouse until this process is ended."""
    host.enter()
    _write_errors_to(Path(folder) / "lighthouse.err")
    lighthouse = Lighthouse(f"{host.address}:{PORT}", 1, patience)
    (Path(folder) / UP).touch()
    while lighthouse:
        time.sleep(3600)


def be_member(host: Host, lighthouse: Host, number: int, life: int, settings: dict[str, Any], folder: str) -> None:
    """Train until this process is ended, or for `settings["steps"]` steps."""
    host.enter()
    _write_errors_to(Path(folder) / f"member{number}.{life}.err")
    torch.set_num_threads(1)
    log = _Log(Path(folder) / f"member{number}.{life}.jsonl")
    try:
        _train(host, lighthouse, number, settings, log)
    except OktopkError as error:
        log.write(event="error", error=f"{type(error).__name__}: {error}")
        raise


def _train(host: Host, lighthouse: Host, number: int, settings: dict[str, Any], log: _Log) -> None:
    torch.manual_seed(settings["seed"])
    net, task, algorithm = make_net(), Task(settings["seed"]), OkTopk(density=settings["density"])
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    manager, close = make_manager(  # last, because the others may wait for a member that has one
        f"http://{lighthouse.address}:{PORT}", host.address, name=f"m{number}",
        min_members=settings["min_members"], patience=Patience(**settings["patience"]),
    )  # fmt: skip
    member = attach(
        net, optimizer, algorithm, manager=manager, dense_steps=settings["dense_steps"], exclude=(),
        timeout=settings["hang_s"],
    )  # fmt: skip
    while not settings["steps"] or member.step_number < settings["steps"]:
        law = _join(member)
        if law is not None:
            log.write(event="members", size=member.size, uids=member.exchange.members.uids, law=law,
                      uid=member.exchange.members.uid, step=member.step_number)  # fmt: skip
        step, started = member.step_number, time.monotonic()
        inputs, targets = task.batch(step, member.rank)
        nn.functional.cross_entropy(net(inputs), targets).backward()  # type: ignore[no-untyped-call]
        time.sleep(settings["compute_s"])
        if not member.step():
            log.write(event="uncommitted", step=step)
            continue
        log.write(event="commit", step=step + 1, size=member.size, digest=digest_of(net.parameters()), started=started)
        if member.rank == 0 and (step + 1) % EVAL_EVERY == 0:
            with torch.no_grad():
                loss = float(nn.functional.cross_entropy(net(task.inputs), task.targets))
            log.write(event="eval", step=step + 1, loss=loss)
    log.write(event="end", step=member.step_number)
    member.detach()
    close()


def _join(member: Member) -> float | None:
    """Join the next quorum; return the relative error of the residual law if the members are others than before."""
    key, size = member.exchange.members.key, member.size
    before = torch.cat(list(member.residual.values())) / max(size, 1)
    member.zero_grad()
    if member.exchange.members.key == key:
        return None
    after = torch.cat(list(member.residual.values())) / member.size
    if not after.any():  # it healed, or is new
        return 0.0
    return float((after - before).abs().max() / before.abs().max())


class Task:
    """Classes drawn from a fixed net's distribution: no run can learn it to zero."""

    def __init__(self, seed: int) -> None:
        self._seed, generator = seed, torch.Generator().manual_seed(seed)
        self._first = torch.randn(INPUTS, HIDDEN, generator=generator) / INPUTS**0.5
        self._second = 3 * torch.randn(HIDDEN, CLASSES, generator=generator) / HIDDEN**0.5
        self.inputs, self.targets = self._draw(HELD_OUT, generator)

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a member in a step."""
        return self._draw(BATCH, torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 1009 + rank))

    def _draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, INPUTS, generator=generator)
        odds = ((inputs @ self._first).tanh() @ self._second).softmax(1)
        return inputs, torch.multinomial(odds, 1, generator=generator).view(-1)


def make_net() -> nn.Module:
    """Return the net that learns the task."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def _write_errors_to(path: Path) -> None:
    """Redirect the output of this process and its libraries to a file, because torchft logs much."""
    file = path.open("w", buffering=1)
    sys.stderr = file
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
    logging.disable()
    warnings.simplefilter("ignore")


class _Log:
    """A line for each event, written at once, so that a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **values: Any) -> None:
        os.write(self._file, f"{json.dumps({'t': time.monotonic(), **values})}\n".encode())
