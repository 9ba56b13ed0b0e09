"""What one rank does with its gradient in a sparse step, around the library's algorithms:

    before      what is accumulated: the gradient, its momentum (DGC), or the change of its average (EF21)
    weigh       what counts as large: |acc| times a weight that is the same on all ranks
    exchange    one of the library's algorithms, with error feedback; or everything, dense
    deliver     what is late, or large, may arrive in part
    after       what trains: what was delivered, or the sum of all that ever was (EF21)

Vectors are flat: first the elements of the large tensors, which sparse steps send sparsely, then the side, the small
tensors, which always travel dense. Conservation, element by element, unless `decay` or `late=drop` say otherwise:

    sum over ranks of what was accumulated  =  P times the mean delivered  +  sum over ranks of the residual
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from oktopk import Algorithm, Comm
from oktopk.algorithms.base import InputStatus, StepInput, check_finite
from oktopk.codec.values import WIRES
from oktopk.comm import MeteredComm
from oktopk.feedback import Residual
from oktopk.selection import num_selected
from oktopk.sparse import Sparse
from research.learning.settings import Setting


@dataclass(frozen=True)
class Layout:
    """Which elements of the flat vector are which tensor's: the large ones, then the side.

    `rows` has the length of a row of each large tensor.
    """

    lengths: Sequence[int]
    rows: Sequence[int]
    side: int

    @property
    def large(self) -> int:
        """Elements of the large tensors."""
        return sum(self.lengths)

    @property
    def numel(self) -> int:
        """All elements."""
        return self.large + self.side

    def groups(self, over: str) -> list[int]:
        """Return the lengths of the groups that have a scale of their own: tensors, rows, or blocks of a length."""
        if over == "tensor":
            return list(self.lengths)
        if over == "row":
            pairs = zip(self.lengths, self.rows, strict=True)
            return [row for length, row in pairs for _ in range(length // row)]
        block = int(over)
        return [min(block, self.large - start) for start in range(0, self.large, block)]


class Exchange:
    """One rank's gradient in, the gradient that trains out: the same bits on every rank."""

    def __init__(
        self,
        setting: Setting,
        comm: Comm,
        layout: Layout,
        *,
        device: torch.device | str = "cpu",
        clip: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        device = torch.device(device)
        self.setting, self.layout, self.comm = setting, layout, MeteredComm(comm)
        self.clip = clip / math.sqrt(comm.size) if setting.local_clip else 0.0
        self.residual = Residual(layout.large, torch.float32, device)
        self.source = _source(setting, momentum)
        self.weights = Weights(setting, layout, device) if setting.is_weighted else None
        self.age = torch.zeros(layout.large, device=device) if setting.late != "sum" else None
        self.parts = [_Part(low, high) for low, high in _spans(setting, layout)]
        self.sparse_step = 0
        self.selected_over_k = 1.0

    def take_sent_bytes(self) -> int:
        """Return what this rank sent since it was last asked."""
        return self.comm.pop().sent_bytes

    def dense(self, grad: Tensor) -> Tensor:
        """Return the mean gradient, as in the steps before the switch."""
        return self.comm.all_reduce(grad.clone()).div_(self.comm.size)

    def begin(self, buffer: Tensor) -> None:
        """Take over from the optimizer, whose momentum buffer this is, at the switch."""
        self.source.begin(buffer)

    def sparse(self, grad: Tensor) -> Tensor:
        """Return what trains in the next sparse step."""
        change = self.source.before(_clipped(grad, self.clip))
        mean = torch.zeros_like(change)
        mean[self.layout.large :] = self.dense(change[self.layout.large :])
        every = self.setting.flush_every
        if every and (self.sparse_step + 1) % every == 0:
            mean[: self.layout.large] = self._flush(change[: self.layout.large])
        else:
            index, value = self._exchange(change[: self.layout.large])
            mean.index_copy_(0, index, value)
        self.sparse_step += 1
        return self.source.after(mean)

    def _flush(self, change: Tensor) -> Tensor:
        """Return the mean of everything, dense; what rounding to the wire takes stays here."""
        acc = self.residual.accumulate_(change, decay=self.setting.decay)
        sent = acc.to(WIRES[self.setting.flush_wire], copy=True)
        self.residual.retain_(slice(None), rounding_error=acc - sent)
        self.residual.commit_()
        self.source.forget(slice(0, self.layout.large))
        self._note_age(slice(None))
        return self.comm.all_reduce(sent).float() / self.comm.size

    def _exchange(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return where something is delivered, and its mean over ranks."""
        acc = self.residual.accumulate_(change, decay=self.setting.decay)
        status = InputStatus.on(self.residual.nonfinite_at)
        weight = None if self.weights is None else self.weights.of(acc, change, self.comm)
        ranked = acc if weight is None else acc * weight
        made = [self._reduce(part, ranked, weight, status) for part in self.parts]
        index, value = torch.cat([each.index for each in made]), torch.cat([each.value for each in made])
        arrives = self._arriving(index, value)
        if arrives is not value and self.setting.late != "drop":
            self.residual.retain_(slice(0), [Sparse(index, value - arrives, len(acc))])
        self.residual.commit_()
        self._note_age(index)
        return index, arrives

    def _reduce(self, part: _Part, ranked: Tensor, weight: Tensor | None, status: int) -> Sparse:
        """Return the mean over ranks that one part of the vector delivers; clear what was taken of the residual."""
        algorithm, span = self.setting.algorithm_at(self.sparse_step), slice(part.low, part.high)
        if part.state is None:
            part.state = _init(algorithm, part, self.layout, self.comm)
        numel = part.high - part.low
        fine = weight is None and status == InputStatus.FINE
        measured = algorithm.measure(part.state, ranked[span], self.residual.held[span]) if fine else None
        inputs = StepInput(status, measured=measured)
        reduced = check_finite(algorithm.reduce_step(ranked[span], part.state, self.comm, inputs))
        self.selected_over_k = reduced.num_selected(numel) / num_selected(
            numel, self.setting.density_at(self.sparse_step)
        )
        local = None if weight is None else weight[span]
        returned = [_unweighted(each, local) for each in reduced.leftover]
        error = reduced.rounding_error
        error = error if local is None or error is None else error / local[reduced.taken]
        self.residual.retain_(reduced.taken, returned, at=span, rounding_error=error)
        assert isinstance(reduced.taken, Tensor)
        assert isinstance(reduced.sum, Sparse)
        taken = reduced.taken.nonzero().view(-1) if reduced.taken.dtype == torch.bool else reduced.taken
        self.source.forget(taken + part.low)
        return _unweighted(Sparse(reduced.sum.index, reduced.sum.value / self.comm.size, numel), local).shift(
            part.low, self.layout.large
        )

    def _arriving(self, index: Tensor, value: Tensor) -> Tensor:
        """Return how much of the means arrives; the rest stays, in every rank's residual alike, or is lost."""
        if self.setting.ceiling:
            most = self.setting.ceiling * value.square().mean().sqrt()
            return torch.minimum(torch.maximum(value, -most), most)
        return value if self.age is None else value / (self.age[index] + 1)

    def _note_age(self, delivered: Tensor | slice) -> None:
        for age in (self.age, None if self.weights is None else self.weights.age):
            if age is not None:
                age += 1
                age[delivered] = 0


@dataclass
class _Part:
    """A part of the large elements that has an exchange of its own."""

    low: int
    high: int
    state: Any = None


def _spans(setting: Setting, layout: Layout) -> list[tuple[int, int]]:
    lengths = layout.lengths if setting.parts == "tensor" else [layout.large]
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def _init(algorithm: Algorithm, part: _Part, layout: Layout, comm: Comm) -> Any:
    numel = part.high - part.low
    if numel == layout.large:
        return algorithm.init_state(numel, comm, layout.groups("row"))
    return algorithm.init(numel, comm)


def _unweighted(part: Sparse, weight: Tensor | None) -> Sparse:
    return part if weight is None else Sparse(part.index, part.value / weight[part.index], part.numel)


def _clipped(grad: Tensor, limit: float) -> Tensor:
    return grad * (limit / grad.norm()).clamp(max=1.0) if limit else grad


class Weights:
    """What |acc| is multiplied by to be ranked, the same on all ranks: a power of 1 / rms of its group, more with age.

    The rms is of acc, or of what this step adds to it: acc is larger where much waits, and what waits would lower the
    weight that lets it go.
    """

    def __init__(self, setting: Setting, layout: Layout, device: torch.device) -> None:
        self.setting, self.step = setting, 0
        self.lengths = torch.tensor(layout.groups(setting.scale_over or str(layout.large)), device=device)
        self.mean_squares = torch.zeros(len(self.lengths), device=device)
        self.scale_weight: Tensor | None = None
        self.age = torch.zeros(layout.large, device=device) if setting.age_power else None

    def of(self, acc: Tensor, change: Tensor, comm: Comm) -> Tensor:
        """Return the weight of each element of acc, to which this step adds `change`."""
        setting = self.setting
        if self.scale_weight is None or (setting.scale_over and self.step % setting.scale_every == 0):
            scale = self._rescaled(acc if setting.scale_of == "acc" else change, comm)
            self.scale_weight = scale.pow(-setting.scale_power).repeat_interleave(self.lengths)
        self.step += 1
        if self.age is None:
            return self.scale_weight
        return self.scale_weight * (1 + self.age / setting.age_steps) ** setting.age_power

    def _rescaled(self, vector: Tensor, comm: Comm) -> Tensor:
        """Return the rms of each group over all ranks; a silent one gets that of the whole."""
        new = torch.segment_reduce(vector.square(), "mean", lengths=self.lengths)
        new = comm.all_reduce(new) / comm.size
        memory = self.setting.scale_memory if self.step else 0.0
        self.mean_squares = memory * self.mean_squares + (1 - memory) * new
        whole = (self.mean_squares * self.lengths).sum() / self.lengths.sum()
        return torch.where(self.mean_squares > 0, self.mean_squares, whole).clamp_min(1e-30).sqrt()


class Source(Protocol):
    """What becomes of a gradient before the exchange, and of what was delivered after it."""

    def begin(self, buffer: Tensor) -> None:
        """Start where the optimizer's momentum buffer is."""

    def before(self, grad: Tensor) -> Tensor:
        """Return what is accumulated."""

    def after(self, mean: Tensor) -> Tensor:
        """Return what trains, of what was delivered."""

    def forget(self, taken: Tensor | slice) -> None:
        """Know what of this rank's was delivered."""


class Plain:
    """The gradient itself."""

    def begin(self, buffer: Tensor) -> None:
        """Nothing to start."""

    def before(self, grad: Tensor) -> Tensor:
        """Return the gradient."""
        return grad

    def after(self, mean: Tensor) -> Tensor:
        """Return what was delivered."""
        return mean

    def forget(self, taken: Tensor | slice) -> None:
        """Nothing to forget."""


@dataclass
class LocalMomentum(Plain):
    """DGC (Lin et al., 2018): u = m u + g is accumulated; where it was delivered it starts again."""

    factor: float
    masking: bool
    velocity: Tensor = field(default_factory=lambda: torch.zeros(0))

    def begin(self, buffer: Tensor) -> None:
        """Every rank goes on with the momentum that all of them had."""
        self.velocity = buffer.clone()

    def before(self, grad: Tensor) -> Tensor:
        """Return u."""
        return self.velocity.mul_(self.factor).add_(grad)

    def forget(self, taken: Tensor | slice) -> None:
        """Start again where it was delivered."""
        if self.masking:
            self.velocity[taken] = 0


@dataclass
class Ef21(Plain):
    """EF21-SGDM (Fatkhullin et al., 2023): the ranks' averages v are followed by a vector h that all hold.

    v = (1 - eta) v + eta g, and h += c for the c = C(v - h) that is sent. So v - h is the residual of ordinary error
    feedback on the changes of v, and the mean of all ranks' h is the sum of all that was delivered. That is what
    trains: a dense vector, out of sparse messages.
    """

    eta: float
    momentum: float
    average: Tensor = field(default_factory=lambda: torch.zeros(0))
    followed: Tensor = field(default_factory=lambda: torch.zeros(0))

    def begin(self, buffer: Tensor) -> None:
        """Start from the average that a momentum buffer is a multiple of: all ranks hold it, nothing is pending."""
        self.average = buffer * (1 - self.momentum)
        self.followed = self.average.clone()

    def before(self, grad: Tensor) -> Tensor:
        """Return the change of v."""
        change = (grad - self.average).mul_(self.eta)
        self.average += change
        return change

    def after(self, mean: Tensor) -> Tensor:
        """Return the mean of all ranks' h."""
        self.followed += mean
        return self.followed.clone()


def _source(setting: Setting, momentum: float) -> Source:
    if setting.ef21:
        return Ef21(setting.ef21, momentum)
    if setting.local_momentum:
        return LocalMomentum(setting.local_momentum, setting.masking)
    return Plain()
