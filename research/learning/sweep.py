"""Many exchanges on one GPU in minutes: a GPT of 25.4 M parameters on four virtual workers, one training a line.

    python -m research.learning.sweep CORPUS LINES OUT [SECONDS [NET]]

CORPUS is a file that `--recipe gpt --pack` wrote. A line of LINES has fields of `Line`, such as "scheme=updates b1=0.5
lrs=2". A result is a line of JSON in OUT; a line that is there is not trained again. The first steps are dense and are
made once for each optimizer and seed. NET is a smaller net: gpt-tiny, for a CPU.

All workers' gradients lie in one tensor, forward and backward passes are one CUDA graph, and the exchange is a few
passes over that tensor (`research.learning.schemes`). It has no regions, sweeps or turns, and thresholds come from a
sample: the rules of `research.learning.emulated`. Nothing here is the library's, which `tests/ddp` tests.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oktopk.train.models.gpt import SIZES, Gpt
from research.learning.language import Text
from research.learning.schemes import FLOAT_BITS, Demo, Scheme, scheme_of

WORKERS = 4
SIZE, BATCH = (8, 512, 8, 512), 16
SMALL_BATCH = 2
"""Texts of each worker in a step of a smaller net."""
WARMUP = 20
EVALUATE_EVERY = 50
EVALUATED_BYTES, EVALUATED_TEXTS = 1 << 19, 1 << 8
WEIGHT_DECAY = 0.1
EPSILON = 1e-8
OUTER_LR = 0.7
NEWTON = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration (Jordan et al., 2024)."""


@dataclass(frozen=True)
class Line:
    """One training.

    opt, lr, b2, mom    adamw, or muon for the hidden matrices and AdamW for the rest; Muon's momentum is `mom`
    scheme              dense, or one of `SCHEMES`, by which gradients are exchanged; updates: what each worker's
                        optimizer moved is
    inner               the one of `SCHEMES` by which `updates` exchanges
    every               of `updates`: steps that each worker makes alone between two exchanges
    outer               of `updates` with `every`: Nesterov momentum of the exchanged movements, DiLoCo's, at lr 0.7
    b1, lrs             sparse steps: the first beta, and a factor on the learning rate
    density, bits       of what is selected; bits of a value, 0: unrounded
    decay               factor on the residuals in each exchange
    eta                 of `dgc` and `ef21`: part of the new gradient in their averages
    power               of the running rms of the gradient in a block, by which scores are divided
    part                of `ternary`: the part of normal values that is above the threshold; 1: all, their sign
    rank                of `powersgd`; low_rank: of a PowerSGD before `gradients`
    preview             of `updates`: part of its residual that a worker adds to its weights for its gradient
    quasi               part of the momentum in the direction, the rest is the plain gradient
    clip                largest norm of the mean
    """

    name: str = ""
    seed: int = 1
    opt: str = "adamw"
    lr: float = 2e-3
    b2: float = 0.95
    mom: float = 0.95
    steps: int = 500
    dense: int = 100
    scheme: str = "dense"
    inner: str = "gradients"
    b1: float = 0.9
    lrs: float = 1.0
    every: int = 1
    outer: float = 0.0
    decay: float = 1.0
    eta: float = 0.1
    density: float = 0.03
    bits: int = 0
    power: float = 0.0
    part: float = 0.15
    rank: int = 4
    low_rank: int = 0
    preview: float = 0.0
    quasi: float = 1.0
    clip: float = 1.0

    @staticmethod
    def parse(text: str) -> Line:
        """Return the training that a line describes.

        >>> Line.parse("scheme=updates b1=0.5").b1
        0.5
        """
        kinds = {each.name: type(each.default) for each in fields(Line)}
        pairs = [part.split("=") for part in text.split()]
        return replace(Line(name=text), **{key: kinds[key](value) for key, value in pairs})

    def lr_at(self, step: int) -> float:
        """Return the learning rate: it rises for a while, and falls linearly to nothing."""
        return self.lr * min(1.0, (step + 1) / WARMUP) * max(0.0, 1 - step / self.steps)


class World:
    """A net whose parameters are one vector, large ones first, with a gradient of each worker."""

    def __init__(self, text: Text, seed: int, size: Sequence[int], batch: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.seed, self.batch, self.context, self.device = seed, batch, size[3], device
        self.net = Gpt(*size, tied=False).to(device)  # type: ignore[misc]
        self.content, self.num_train = text.content.to(device), text.num_train
        self.parameters = sorted(self.net.parameters(), key=lambda each: each.ndim <= 1)
        sizes = [each.numel() for each in self.parameters]
        ends = np.cumsum([0, *sizes]).tolist()
        self.large = sum(each.numel() for each in self.parameters if each.ndim > 1)
        self.matrices = [
            (low, high, tuple(each.shape))
            for low, high, each in zip(ends, ends[1:], self.parameters, strict=False)
            if each.ndim > 1
        ]
        self.weights = torch.cat([each.detach().reshape(-1) for each in self.parameters])
        self.grads = torch.zeros(WORKERS, len(self.weights), device=device)
        self._views = [
            [part.view_as(each) for part, each in zip(row.split(sizes), self.parameters, strict=True)]
            for row in self.grads
        ]
        for part, each in zip(self.weights.split(sizes), self.parameters, strict=True):
            each.data = part.view_as(each)
        self.first = self.weights.clone()
        self._span = torch.arange(self.context + 1, device=device)
        self._texts = torch.zeros(WORKERS, batch, self.context + 1, dtype=torch.long, device=device)
        self.losses = torch.zeros(WORKERS, device=device)
        self._graphs = self._captured() if device.type == "cuda" else []

    def _captured(self) -> list[torch.cuda.CUDAGraph]:
        loss = torch.compile(self._loss)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                for worker in range(WORKERS):
                    self._pass(loss, worker)
        torch.cuda.current_stream().wait_stream(stream)
        graphs = []
        for worker in range(WORKERS):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                self._pass(loss, worker)
        return graphs

    def _loss(self, texts: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            scores = self.net(texts[:, :-1])
        return cross_entropy(scores.float().flatten(0, 1), texts[:, 1:].flatten())

    def _pass(self, loss_of: Any, worker: int) -> None:
        self.grads[worker].zero_()
        for parameter, view in zip(self.parameters, self._views[worker], strict=True):
            parameter.grad = view
        loss = loss_of(self._texts[worker])
        loss.backward()
        self.losses[worker] = loss.detach()

    def make_grads(self, step: int, offsets: Tensor | None = None) -> None:
        """Compute each worker's gradient of a step, at the weights plus the worker's own offset."""
        chance = np.random.default_rng((self.seed, step))
        starts = chance.integers(self.num_train - self.context, size=(WORKERS, self.batch))
        self._texts.copy_(self.content[torch.from_numpy(starts).to(self.device)[:, :, None] + self._span].long())
        before = self.weights.clone() if offsets is not None else self.weights
        for worker in range(WORKERS):
            if offsets is not None:
                self.weights.copy_(before)
                self.weights[: offsets.shape[1]] += offsets[worker]
            self._graphs[worker].replay() if self._graphs else self._pass(self._loss, worker)
        if offsets is not None:
            self.weights.copy_(before)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the cross entropy on text that is not trained on, in nats a byte."""
        held = self.content[self.num_train :]
        limit = EVALUATED_BYTES if self.device.type == "cuda" else EVALUATED_TEXTS * self.context
        starts = torch.arange(0, min(len(held) - self.context, limit), self.context, device=self.device)
        parts = starts.split(64)
        return sum(float(self._loss(held[part[:, None] + self._span].long())) * len(part) for part in parts) / len(
            starts
        )


class Moments:
    """AdamW's direction, and Muon's for the hidden matrices."""

    def __init__(self, world: World, line: Line) -> None:
        self.mean, self.square = torch.zeros_like(world.weights), torch.zeros_like(world.weights)
        self.step, self.bias = 0, 1.0
        self._b2, self._mom = line.b2, line.mom
        hidden = [each for each in world.matrices if 256 not in each[2]]  # neither embedding nor head
        self._muon = hidden if line.opt == "muon" else []

    def copy(self) -> Moments:
        """Return the same state for another to go on with."""
        other = object.__new__(Moments)
        other.__dict__ = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.__dict__.items()}
        return other

    def direction(self, grad: Tensor, b1: float, quasi: float = 1.0) -> Tensor:
        """Take a gradient; return the direction of the update, of which the learning rate is the size."""
        self.step, self.bias = self.step + 1, self.bias * b1
        before = [self.mean[low:high].clone() for low, high, _ in self._muon]
        self.mean.lerp_(grad, 1 - b1)
        self.square.mul_(self._b2).addcmul_(grad, grad, value=1 - self._b2)
        mean = quasi * self.mean / (1 - self.bias) + (1 - quasi) * grad
        made = mean / ((self.square / (1 - self._b2**self.step)).sqrt() + EPSILON)
        for (low, high, shape), buffer in zip(self._muon, before, strict=True):
            self.mean[low:high] = buffer.lerp_(grad[low:high], 1 - self._mom)
            nesterov = grad[low:high].lerp(self.mean[low:high], self._mom)
            made[low:high] = orthogonal(nesterov.view(shape)).reshape(-1) * (0.2 * math.sqrt(max(shape)))
        return made


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest matrix with orthogonal rows or columns, by Newton and Schulz."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    made = wide.bfloat16() / (wide.norm() + 1e-7).bfloat16()
    a, b, c = NEWTON
    for _ in range(5):
        square = made @ made.T
        made = a * made + (b * square + c * (square @ square)) @ made
    return (made.T if wide is not matrix else made).float()


class Training:
    """One line: dense steps, then those of its scheme."""

    def __init__(self, world: World, line: Line) -> None:
        self._world, self._line = world, line
        self.moments, self.curve = [Moments(world, line)], dict[int, float]()
        self._scheme: Scheme | None = None
        self._local = torch.zeros_like(world.grads)  # of each worker's own steps since an exchange: its weights' change
        self._velocity = torch.zeros_like(world.weights)
        world.weights.copy_(world.first)

    def steps(self, first: int, end: int) -> None:
        """Make some steps, and evaluate every so often."""
        for step in range(first, end):
            self._step(step, step >= self._line.dense and self._line.scheme != "dense")
            if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == self._line.steps:
                self.curve[step + 1] = round(self._world.evaluate(), 4)

    @property
    def bytes_of_dense(self) -> float:
        """The bytes of a step of the scheme, on average and for the large tensors, over those of a dense step."""
        if self._scheme is None:
            return 1.0
        return self._scheme.bits() / self._line.every / self._scheme.ring(FLOAT_BITS * self._world.large)

    def _step(self, step: int, sparse: bool) -> None:
        if not sparse:
            self._world.make_grads(step)
            lr = self._line.lr_at(step)
            self._move(lr, lr * self._direction(self._world.grads.mean(0), 0.9))
            return
        if self._scheme is None:
            self._scheme = scheme_of(self._world, self._line, self.moments[0].mean)
        lr = self._line.lr_at(step) * self._line.lrs
        if self._line.scheme != "updates":
            self._step_by_gradients(step, lr, self._scheme)
        elif self._line.every == 1:
            self._step_by_updates(step, lr, self._scheme)
        else:
            self._step_alone(step, lr, self._scheme)

    def _step_by_gradients(self, step: int, lr: float, scheme: Scheme) -> None:
        world, line = self._world, self._line
        world.make_grads(step, -line.preview * scheme.held if line.preview else None)
        mean = world.grads.mean(0)
        mean[: world.large] = scheme.deliver(world.grads[:, : world.large])
        made = self._direction(mean, line.b1, line.quasi)
        if isinstance(scheme, Demo):
            made[: world.large] = mean[: world.large].sign()
        self._move(lr, lr * made)

    def _step_by_updates(self, step: int, lr: float, scheme: Scheme) -> None:
        world, line = self._world, self._line
        world.make_grads(step, -line.preview * scheme.held if line.preview else None)
        moved = lr * self._updates(world.grads.mean(0).norm())
        large = scheme.deliver(moved[:, : world.large])
        self._move(lr, torch.cat([large, moved[:, world.large :].mean(0)]))

    def _step_alone(self, step: int, lr: float, scheme: Scheme) -> None:
        """Let each worker make a step of its own, and exchange what all moved after every so many."""
        world, line = self._world, self._line
        world.make_grads(step, self._local)
        weights = world.weights[: world.large] + self._local[:, : world.large]
        self._local[:, : world.large] -= lr * WEIGHT_DECAY * weights
        self._local -= lr * self._updates(world.grads.norm(dim=1, keepdim=True))
        if (step + 1 - line.dense) % line.every and step + 1 < line.steps:
            return
        moved = -self._local.mean(0)
        moved[: world.large] = scheme.deliver(-self._local[:, : world.large])
        self._velocity.mul_(line.outer).add_(moved)
        world.weights -= OUTER_LR * (moved + line.outer * self._velocity) if line.outer else moved
        self._local.zero_()

    def _direction(self, mean: Tensor, b1: float, quasi: float = 1.0) -> Tensor:
        mean *= (self._line.clip / mean.norm()).clamp(max=1.0)
        return self.moments[0].direction(mean, b1, quasi)

    def _move(self, lr: float, moved: Tensor) -> None:
        self._world.weights[: self._world.large] *= 1 - lr * WEIGHT_DECAY
        self._world.weights -= moved

    def _updates(self, norms: Tensor) -> Tensor:
        """Return the direction of each worker's own optimizer, by its gradient, which is clipped by these norms."""
        if len(self.moments) < WORKERS:
            self.moments = [self.moments[0].copy() for _ in range(WORKERS)]
        grads = self._world.grads
        grads *= (self._line.clip / norms).clamp(max=1.0)
        made = [each.direction(grad, self._line.b1) for each, grad in zip(self.moments, grads, strict=True)]
        return torch.stack(made)


def train(lines: Sequence[Line], world_of: Any, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the result of each line; those with the same dense steps, one after the other, share them."""
    began, shared, key = time.monotonic(), None, None
    for line in lines:
        if time.monotonic() - began > limit_s:
            print("left out, for want of time:", line.name)
            continue
        started, world = time.monotonic(), world_of(line.seed)
        run = Training(world, line)
        mine = (line.seed, line.opt, line.lr, line.b2, line.mom, line.steps, line.dense, line.clip)
        if shared is None or mine != key:
            run.steps(0, line.dense)
            shared, key = (world.weights.clone(), run.moments[0].copy(), dict(run.curve)), mine
        world.weights.copy_(shared[0])
        run.moments, run.curve = [shared[1].copy()], dict(shared[2])
        run.steps(line.dense, line.steps)
        seconds = round(time.monotonic() - started, 1)
        yield {"line": line.name, "nats": run.curve, "bytes": run.bytes_of_dense, "seconds": seconds}


def train_all(corpus: Path, lines: Sequence[str], out: Path, limit_s: float = math.inf, net: str | None = None) -> None:
    """Train every line that is not in `out` yet, and append its result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, worlds = Text.load(corpus), dict[int, World]()
    size, batch = (SIZES[net], SMALL_BATCH) if net else (SIZE, BATCH)
    torch.backends.cuda.matmul.allow_tf32 = True

    def world_of(seed: int) -> World:
        if seed not in worlds:
            worlds.clear()
            worlds[seed] = World(text, seed, size, batch, device)
        return worlds[seed]

    made = [json.loads(each)["line"] for each in out.read_text().splitlines()] if out.exists() else []
    wanted = [Line.parse(line) for line in lines if line not in made]
    for result in train(wanted, world_of, limit_s):
        print(result["line"], result["nats"], flush=True)
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")


def main(corpus: str, lines: str, out: str, limit_s: str = "inf", net: str = "") -> None:
    """Train every line of a file, and append the results to another."""
    wanted = [line.strip() for line in Path(lines).read_text().splitlines()]
    train_all(Path(corpus), [line for line in wanted if line], Path(out), float(limit_s), net or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
