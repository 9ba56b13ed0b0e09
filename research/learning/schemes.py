"""The exchanges of the sweep: what all workers' vectors deliver in a step, and the bytes that it takes.

A scheme has the residuals of all workers in one tensor, `held`. `deliver` takes a vector of each worker and returns
what all of them get. Element by element, where nothing decays,

    sum of all vectors  =  WORKERS times what was delivered  +  what is held back.

EF21 delivers the changes of averages, and what trains is their sum. DeMo trains with the sign of what is delivered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oktopk import OkTopk
from oktopk.cost import predict

if TYPE_CHECKING:
    from research.learning.sweep import Line, World

BLOCK = 512
"""Elements with a scale of their own, where values are quantised."""

SAMPLE = 400_000
TILE = 64
"""Rows and columns of a matrix that DeMo transforms at once."""

INDEX_BITS = 2
"""Of a packed index, beside the logarithm of 1 / density: 1.5 of its entropy, and half a bit of the code."""

FLOAT_BITS = 32
SLACK = OkTopk().slack


class Scheme:
    """The residuals of all workers, and what a step delivers of them."""

    def __init__(self, world: World, line: Line) -> None:
        self.world, self.line = world, line
        self.held = torch.zeros(len(world.grads), world.large, device=world.device)

    @property
    def owed(self) -> Tensor:
        """What will still be delivered, as a mean over workers."""
        return self.held.mean(0)

    def deliver(self, vectors: Tensor) -> Tensor:
        """Return the mean over workers of what a step delivers."""
        self.held *= self.line.decay
        self.held += vectors
        return self.sent()

    def sent(self) -> Tensor:
        """Return the mean over workers of what leaves the residuals."""
        raise NotImplementedError

    def bits(self) -> float:
        """Return the bits that a worker sends in an exchange."""
        raise NotImplementedError

    def ring(self, bits: float) -> float:
        """Return the bits of an all_reduce of `bits`."""
        return 2 * bits * (len(self.held) - 1) / len(self.held)


class Whole(Scheme):
    """Everything, in as many bits as values have; rounding errors are held back, but for bf16's."""

    def sent(self) -> Tensor:
        """Return the mean of all."""
        sent = torch.stack([rounded(held, held == held, self.line.bits) for held in self.held])
        self.held -= sent
        return sent.mean(0)

    def bits(self) -> float:
        """Return those of an all_reduce."""
        return self.ring((self.line.bits or FLOAT_BITS) * self.world.large)


class Bf16(Scheme):
    """DDP's hook: gradients and their sums are rounded to bfloat16, and the errors are lost."""

    def sent(self) -> Tensor:
        """Return the mean of all, as bfloat16."""
        mean = (self.held / len(self.held)).bfloat16().sum(0).float()
        self.held.zero_()
        return mean

    def bits(self) -> float:
        """Return those of an all_reduce."""
        return self.ring(16 * self.world.large)


class Bounded(Scheme):
    """Ok-Topk: the largest of each worker, of whose sums the largest are delivered; `low_rank`: after a PowerSGD."""

    def __init__(self, world: World, line: Line) -> None:
        super().__init__(world, line)
        self._squares: Tensor | None = None
        self._low = PowerSgd(world, replace(line, rank=line.low_rank)) if line.low_rank else None

    def deliver(self, vectors: Tensor) -> Tensor:
        """Return the mean over workers of what a step delivers."""
        self.held *= self.line.decay
        self.held += vectors
        if self._low is None:
            return self._largest(vectors)
        self._low.held = self.held
        return self._low.sent() + self._largest(vectors)

    def _largest(self, vectors: Tensor) -> Tensor:
        k, scale = self.line.density * self.world.large, self._scale(vectors)
        sent = torch.empty_like(self.held)
        for worker, held in enumerate(self.held):
            score = held.abs() * scale
            sent[worker] = rounded(held, score >= threshold_of(score, k), self.line.bits)
        total = sent.sum(0)
        score = total.abs() * scale
        kept = (score >= threshold_of(score, k)) & (total != 0)
        delivered = rounded(total, kept, self.line.bits)
        self.held -= sent * kept
        if self.line.bits:
            self.held += (total * kept - delivered) / len(self.held)
        return delivered / len(self.held)

    def _scale(self, vectors: Tensor) -> Tensor | float:
        if not self.line.power:
            return 1.0
        new = vectors.square().mean(0).view(-1, BLOCK).mean(1)
        self._squares = new if self._squares is None else self._squares * 0.9 + new * 0.1
        rms = (self._squares / self._squares.mean()).clamp_min(1e-12).sqrt()
        return (rms**-self.line.power).repeat_interleave(BLOCK)

    def bits(self) -> float:
        """Return the library's, with int8 values, or of this many bits; counted as int8 where values are unrounded."""
        workers, line = len(self.held), self.line
        cost = predict(OkTopk(density=line.density, wire="int8"), self.world.large, workers)
        pairs = 2 * SLACK * line.density * self.world.large * (workers - 1) / workers
        low = self._low.bits() if self._low is not None else 0.0
        return FLOAT_BITS * float(cost.typical) - (8 - (line.bits or 8)) * pairs + low


class Ternary(Scheme):
    """Each element above a threshold of its block as the sign times their mean, at the worker and at the owner."""

    def __init__(self, world: World, line: Line) -> None:
        super().__init__(world, line)
        self._owned = torch.zeros(world.large, device=world.device)  # what owners hold back

    @property
    def owed(self) -> Tensor:
        """What will still be delivered, as a mean over workers."""
        return self.held.mean(0) + self._owned

    def sent(self) -> Tensor:
        """Return the mean over workers of what leaves the residuals."""
        sent = torch.stack([self._signs(held) for held in self.held])
        self.held -= sent
        total = self._owned + sent.mean(0)
        delivered = self._signs(total)
        self._owned = total - delivered
        return delivered

    def _signs(self, vector: Tensor) -> Tensor:
        rows, part = vector.view(-1, BLOCK), torch.tensor(1 - self.line.part)
        above = float(math.sqrt(2) * torch.erfinv(part)) if self.line.part < 1 else -1.0
        kept = rows.abs() > above * rows.square().mean(1, keepdim=True).sqrt()
        mean = (rows.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp_min(1)
        return (rows.sign() * kept * mean).view(-1)

    def bits(self) -> float:
        """Return those of a scale for each block, and of signs in as many bits as their entropy."""
        part = self.line.part
        spread = 0.0 if part == 1 else -part * math.log2(part) - (1 - part) * math.log2(1 - part)
        return self.ring((part + spread + FLOAT_BITS / BLOCK) * self.world.large)


class PowerSgd(Scheme):
    """Low rank, with one step of a power iteration on the mean (Vogels et al., 2019)."""

    def __init__(self, world: World, line: Line) -> None:
        super().__init__(world, line)
        self._factors: dict[int, Tensor] = {}

    def sent(self) -> Tensor:
        """Return the mean over workers, as far as the rank goes."""
        low = torch.zeros(self.world.large, device=self.world.device)
        for start, end, shape in self.world.matrices:
            chance = torch.Generator(self.world.device).manual_seed(start)
            shapes = (shape[1], min(self.line.rank, *shape))
            factor = self._factors.get(start)
            factor = torch.randn(shapes, generator=chance, device=low.device) if factor is None else factor
            mean = self.held[:, start:end].mean(0).view(shape)
            left = torch.linalg.qr(mean @ factor)[0]
            self._factors[start] = mean.T @ left
            low[start:end] = (left @ self._factors[start].T).reshape(-1)
        self.held -= low
        return low

    def bits(self) -> float:
        """Return those of two all_reduces for each matrix."""
        return self.ring(
            FLOAT_BITS * sum(min(self.line.rank, *shape) * sum(shape) for _, _, shape in self.world.matrices)
        )


class Gather(Scheme):
    """The largest of each worker, which all others get: SparseLoCo's exchange, on movements of several steps."""

    def sent(self) -> Tensor:
        """Return the mean over workers of what they chose."""
        pairs = zip(self.held, self.kept(), strict=True)
        sent = torch.stack([rounded(held, kept, self.line.bits) for held, kept in pairs])
        self.held -= sent
        return sent.mean(0)

    def kept(self) -> list[Tensor]:
        """Return which elements each worker chooses."""
        scores = [held.abs() for held in self.held]
        return [score >= threshold_of(score, self.line.density * self.world.large) for score in scores]

    def bits(self) -> float:
        """Return those of a worker's pairs, once for each other worker."""
        density = self.line.density
        pair = (self.line.bits or FLOAT_BITS) + (INDEX_BITS - math.log2(density) if density < 1 else 0)
        return (len(self.held) - 1) * density * self.world.large * pair


class Dgc(Gather):
    """Momentum before selection, which starts again where an element was chosen (Lin et al., 2018)."""

    def begin(self, mean: Tensor) -> None:
        """Go on with the momentum of the dense steps."""
        self.velocity = mean.repeat(len(self.held), 1)

    def deliver(self, vectors: Tensor) -> Tensor:
        """Return the mean over workers of what a step delivers."""
        self.velocity.lerp_(vectors, self.line.eta)
        return super().deliver(self.velocity)

    def kept(self) -> list[Tensor]:
        """Return which elements each worker chooses, and forget their momentum."""
        kept = super().kept()
        self.velocity *= ~torch.stack(kept)
        return kept


class Ef21(Bounded):
    """EF21-SGDM (Fatkhullin et al., 2023): the changes of averaged gradients travel, and their sum trains."""

    def begin(self, mean: Tensor) -> None:
        """Go on with the average of the dense steps, which all workers have."""
        self.average, self.followed = mean.repeat(len(self.held), 1), mean.clone()

    def deliver(self, vectors: Tensor) -> Tensor:
        """Return the sum of all changes that were delivered."""
        change = (vectors - self.average) * self.line.eta
        self.average += change
        self.followed += super().deliver(change)
        return self.followed.clone()


class Demo(Gather):
    """The largest cosine coefficients of each tile of a matrix, of a momentum that loses them (Peng et al., 2024)."""

    def __init__(self, world: World, line: Line) -> None:
        super().__init__(world, line)
        place = torch.arange(TILE, device=world.device)
        waves = torch.cos(math.pi / TILE * place[:, None] * (place + 0.5)) * math.sqrt(2 / TILE)
        waves[0] /= math.sqrt(2)
        self._waves = waves

    def sent(self) -> Tensor:
        """Return the mean over workers of what they chose."""
        sent = torch.cat([self._chosen(start, end, shape) for start, end, shape in self.world.matrices], 1)
        self.held -= sent
        return sent.mean(0)

    def _chosen(self, start: int, end: int, shape: Sequence[int]) -> Tensor:
        tiles = self.held[:, start:end].view(-1, shape[0] // TILE, TILE, shape[1] // TILE, TILE).transpose(2, 3)
        found = self._waves @ tiles @ self._waves.T
        score = found.flatten(3).abs()
        least = score.topk(max(1, round(self.line.density * TILE**2)), -1).values[..., -1:]
        chosen = rounded(found.reshape(-1), (score >= least).view(-1), self.line.bits).view_as(found)
        return (self._waves.T @ chosen @ self._waves).transpose(2, 3).reshape(len(self.held), -1)


SCHEMES: dict[str, type[Scheme]] = {
    "bf16": Bf16,
    "demo": Demo,
    "dgc": Dgc,
    "ef21": Ef21,
    "gather": Gather,
    "gradients": Bounded,
    "powersgd": PowerSgd,
    "ternary": Ternary,
    "whole": Whole,
}


def scheme_of(world: World, line: Line, mean: Tensor) -> Scheme:
    """Return the exchange of a line, which goes on from the mean of the gradients of the dense steps."""
    made = SCHEMES[line.inner if line.scheme == "updates" else line.scheme](world, line)
    if isinstance(made, (Dgc, Ef21)):
        made.begin(mean[: world.large])
    return made


def rounded(vector: Tensor, kept: Tensor, bits: int) -> Tensor:
    """Return the values that are kept, in so many bits, with a scale for each block; 0: as they are."""
    chosen = vector * kept
    if not bits:
        return chosen
    rows = chosen.view(-1, BLOCK)
    if bits <= 2:
        size, there = rows.abs(), kept.view(-1, BLOCK)
        level = _mean_of(size, there)
        if bits == 2:  # two levels for each sign
            level = torch.where(size > level, _mean_of(size, size > level), _mean_of(size, there & (size <= level)))
        return (rows.sign() * level).view(-1)
    step = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / (2 ** (bits - 1) - 1)
    return ((rows / step).round() * step).view(-1)


def _mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of those chosen in each row."""
    return (values * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp_min(1)


def threshold_of(score: Tensor, k: float) -> Tensor:
    """Return about the k-th largest score, from a sample; 0 if all are wanted."""
    if k >= len(score):
        return score.new_zeros(())
    stride = max(1, len(score) // SAMPLE)
    sample = score[int(torch.randint(stride, (1,))) :: stride]
    return sample.topk(min(max(1, round(k / stride)), len(sample)), sorted=False).values.min()
