"""Many exchanges on one GPU in minutes: a GPT of 25.4 M parameters on four virtual workers, one training a line.

    python -m research.learning.sweep CORPUS LINES OUT [SECONDS]

CORPUS is a file that `--recipe gpt --pack` wrote. A line of LINES has fields of `Line`, such as "scheme=updates b1=0.5
lrs=2". A result is a line of JSON in OUT. The first steps are dense and are made once for each optimizer and seed.

All workers' gradients lie in one tensor, forward and backward passes are one CUDA graph, and the exchange is a few
passes over that tensor. It has no regions, sweeps or turns, and thresholds come from a sample: the rules of
`research.learning.emulated`. Nothing here is the library's, which `tests/ddp` tests.
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

from oktopk.train.models.gpt import Gpt
from research.learning.language import Text

WORKERS = 4
BLOCK = 512
"""Elements with a scale of their own, where values are quantised."""

SAMPLE = 400_000
WARMUP = 20
EVALUATE_EVERY = 50
EVALUATED_BYTES = 1 << 19
WEIGHT_DECAY = 0.1
EPSILON = 1e-8
NEWTON = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration (Jordan et al., 2024)."""


@dataclass(frozen=True)
class Line:
    """One training.

    opt, lr, b2, mom    adamw, or muon for the hidden matrices and AdamW for the rest; Muon's momentum is `mom`
    scheme              dense; gradients: sums of what each worker selects by magnitude, of which the largest are
                        delivered; updates: the same with what each worker's optimizer moved; ternary: each element
                        above a threshold of its block as the sign times their mean, at the worker and at the owner;
                        powersgd
    inner               what `updates` exchanges movements by: gradients or ternary
    b1, lrs             sparse steps: the first beta, and a factor on the learning rate
    density, bits       of `gradients`; bits of a value, 0: unrounded
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
                self.weights[: self.large] += offsets[worker]
            self._graphs[worker].replay() if self._graphs else self._pass(self._loss, worker)
        if offsets is not None:
            self.weights.copy_(before)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the cross entropy on text that is not trained on, in nats a byte."""
        held = self.content[self.num_train :]
        limit = EVALUATED_BYTES if self.device.type == "cuda" else 4 * self.context
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


class Exchange:
    """The residuals of all workers, and what a step delivers of them."""

    def __init__(self, world: World, line: Line) -> None:
        self._world, self._line = world, line
        self._scheme = line.inner if line.scheme == "updates" else line.scheme
        self.held = torch.zeros(WORKERS, world.large, device=world.device)
        self._owned = torch.zeros(world.large, device=world.device)  # what owners hold back, of `ternary`
        self._squares: Tensor | None = None
        self._factors: dict[int, Tensor] = {}

    def deliver(self, vectors: Tensor) -> Tensor:
        """Return the mean over workers of what a step delivers."""
        self.held += vectors
        if self._scheme == "ternary":
            return self._ternary()
        low = self._low_rank(self._line.rank if self._scheme == "powersgd" else self._line.low_rank)
        return low if self._scheme == "powersgd" else low + self._largest(vectors)

    def _largest(self, vectors: Tensor) -> Tensor:
        k, scale = self._line.density * self._world.large, self._scale(vectors)
        sent = torch.empty_like(self.held)
        for worker, held in enumerate(self.held):
            score = held.abs() * scale
            sent[worker] = self._rounded(held, score >= threshold_of(score, k))
        total = sent.sum(0)
        score = total.abs() * scale
        kept = (score >= threshold_of(score, k)) & (total != 0)
        delivered = self._rounded(total, kept)
        self.held -= sent * kept
        if self._line.bits:
            self.held += (total * kept - delivered) / WORKERS
        return delivered / WORKERS

    def _scale(self, vectors: Tensor) -> Tensor | float:
        if not self._line.power:
            return 1.0
        new = vectors.square().mean(0).view(-1, BLOCK).mean(1)
        self._squares = new if self._squares is None else self._squares * 0.9 + new * 0.1
        rms = (self._squares / self._squares.mean()).clamp_min(1e-12).sqrt()
        return (rms**-self._line.power).repeat_interleave(BLOCK)

    def _rounded(self, vector: Tensor, kept: Tensor) -> Tensor:
        chosen = vector * kept
        if not self._line.bits:
            return chosen
        rows = chosen.view(-1, BLOCK)
        if self._line.bits == 1:
            mean = rows.abs().sum(1, keepdim=True) / kept.view(-1, BLOCK).sum(1, keepdim=True).clamp_min(1)
            return (rows.sign() * mean).view(-1)
        step = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / (2 ** (self._line.bits - 1) - 1)
        return ((rows / step).round() * step).view(-1)

    def _ternary(self) -> Tensor:
        sent = torch.stack([self._signs(held) for held in self.held])
        self.held -= sent
        total = self._owned + sent.mean(0)
        delivered = self._signs(total)
        self._owned = total - delivered
        return delivered

    def _signs(self, vector: Tensor) -> Tensor:
        rows, part = vector.view(-1, BLOCK), torch.tensor(1 - self._line.part)
        above = float(math.sqrt(2) * torch.erfinv(part)) if self._line.part < 1 else -1.0
        kept = rows.abs() > above * rows.square().mean(1, keepdim=True).sqrt()
        mean = (rows.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)
        return (rows.sign() * kept * mean).view(-1)

    def _low_rank(self, rank: int) -> Tensor:
        """Return what PowerSGD delivers, with one step of a power iteration on the mean (Vogels et al., 2019)."""
        low = torch.zeros(self._world.large, device=self._world.device)
        for start, end, shape in self._world.matrices if rank else ():
            chance = torch.Generator(self._world.device).manual_seed(start)
            shapes = (shape[1], min(rank, *shape))
            factor = self._factors.get(start)
            factor = torch.randn(shapes, generator=chance, device=low.device) if factor is None else factor
            mean = self.held[:, start:end].mean(0).view(shape)
            left = torch.linalg.qr(mean @ factor)[0]
            self._factors[start] = mean.T @ left
            low[start:end] = (left @ self._factors[start].T).reshape(-1)
        self.held -= low
        return low


def threshold_of(score: Tensor, k: float) -> Tensor:
    """Return about the k-th largest score, from a sample; 0 if all are wanted."""
    if k >= len(score):
        return score.new_zeros(())
    stride = max(1, len(score) // SAMPLE)
    sample = score[int(torch.randint(stride, (1,))) :: stride]
    return sample.topk(min(max(1, round(k / stride)), len(sample)), sorted=False).values.min()


class Training:
    """One line: dense steps, then those of its scheme."""

    def __init__(self, world: World, line: Line) -> None:
        self._world, self._line = world, line
        self.moments, self.curve = [Moments(world, line)], dict[int, float]()
        self._exchange: Exchange | None = None
        world.weights.copy_(world.first)

    def steps(self, first: int, end: int) -> None:
        """Make some steps, and evaluate every so often."""
        for step in range(first, end):
            self._step(step, step >= self._line.dense and self._line.scheme != "dense")
            if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == self._line.steps:
                self.curve[step + 1] = round(self._world.evaluate(), 4)

    def _step(self, step: int, sparse: bool) -> None:
        world, line = self._world, self._line
        if sparse and self._exchange is None:
            self._exchange = Exchange(world, line)
        offsets = -line.preview * self._exchange.held if sparse and line.preview and self._exchange else None
        world.make_grads(step, offsets)
        lr, b1 = line.lr_at(step) * (line.lrs if sparse else 1), line.b1 if sparse else 0.9
        if sparse and line.scheme == "updates":
            moved = lr * self._updates(b1)
        else:
            mean = world.grads.mean(0)
            if self._exchange is not None:
                mean[: world.large] = self._exchange.deliver(world.grads[:, : world.large])
            mean *= (line.clip / mean.norm()).clamp(max=1.0)
            moved = lr * self.moments[0].direction(mean, b1, line.quasi if sparse else 1.0)
        if sparse and line.scheme == "updates":
            assert self._exchange is not None
            large = self._exchange.deliver(moved[:, : world.large])
            moved = torch.cat([large, moved[:, world.large :].mean(0)])
        world.weights[: world.large] *= 1 - lr * WEIGHT_DECAY
        world.weights -= moved

    def _updates(self, b1: float) -> Tensor:
        """Return the direction of each worker's own optimizer."""
        if len(self.moments) < WORKERS:
            self.moments = [self.moments[0].copy() for _ in range(WORKERS)]
        grads = self._world.grads
        grads *= (self._line.clip / grads.mean(0).norm()).clamp(max=1.0)
        made = [each.direction(grad, b1) for each, grad in zip(self.moments, grads, strict=True)]
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
        yield {"line": line.name, "nats": run.curve, "seconds": round(time.monotonic() - started, 1)}


def main(corpus: str, lines: str, out: str, limit_s: str = "inf") -> None:
    """Train every line of a file, and append the results to another."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, worlds = Text.load(Path(corpus)), dict[int, World]()
    size, batch = ((8, 512, 8, 512), 16) if device.type == "cuda" else ((1, 512, 8, 32), 1)
    torch.backends.cuda.matmul.allow_tf32 = True

    def world_of(seed: int) -> World:
        if seed not in worlds:
            worlds.clear()
            worlds[seed] = World(text, seed, size, batch, device)
        return worlds[seed]

    wanted = [Line.parse(each) for each in Path(lines).read_text().splitlines() if each.strip()]
    for result in train(wanted, world_of, float(limit_s)):
        print(result["line"], result["nats"], flush=True)
        with Path(out).open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
